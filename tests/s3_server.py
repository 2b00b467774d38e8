"""An S3 server on loopback: moto, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.repository import REPOSITORY

REGION = "eu-west-1"
_POLICY = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'


@dataclass(frozen=True)
class S3Server:
    """A running server; requests need no credentials before `require_credentials`."""

    url: str

    def client(self, service: str) -> Any:
        """A client of AWS's library."""
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="admin",
            aws_secret_access_key="unchecked",
        )

    def upload(self, directory: Path, bucket: str, prefix: str) -> None:
        """Put the files of a directory into a bucket, which is made if needed."""
        client = self.client("s3")
        if bucket not in (found["Name"] for found in client.list_buckets()["Buckets"]):
            client.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        for path in sorted(directory.iterdir()):
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())

    def require_credentials(self) -> tuple[str, str]:
        """Refuse all requests that are not signed by a new user; return the user's key id and secret."""
        client = self.client("iam")
        client.create_user(UserName="reader")
        client.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=_POLICY)
        key = client.create_access_key(UserName="reader")["AccessKey"]
        self.check_credentials(is_on=True)
        return key["AccessKeyId"], key["SecretAccessKey"]

    def check_credentials(self, *, is_on: bool) -> None:
        """Begin or end to refuse requests."""
        after = b"0" if is_on else b"inf"  # so many requests need none
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", data=after, headers={"Content-Type": "text/plain"}
        )
        with urllib.request.urlopen(request, timeout=60):
            pass


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server without buckets while the block runs."""
    command = [sys.executable, "-m", "tests.s3_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        yield S3Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        process.kill()


def _serve() -> None:
    """Serve until standard input ends; print the port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
