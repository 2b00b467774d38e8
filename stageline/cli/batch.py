"""`stageline batch`: a file of requests to a gateway, with a file of responses."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stageline.batch.calls import CallLimits, send_all
from stageline.batch.files import BatchInput, BatchOutput
from stageline.cli.options import CommandFailed, build_config, option_parser, parse_non_negative
from stageline.gateway_client import GatewayUnreachable
from wire.exit_codes import ExitCode


def _gateway_url(text: str) -> str:
    parts = urlsplit(text)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/", "/v1", "/v1/")
    ):
        raise ValueError(f"{text!r} is not a URL such as http://127.0.0.1:7482")
    return f"{parts.scheme}://{parts.netloc}"


_seconds = option_parser(parse_non_negative)


_Requests = Annotated[
    Path,
    typer.Argument(
        metavar="IN", exists=True, dir_okay=False, readable=True, help="Requests, one JSON object a line."
    ),
]
_Responses = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", dir_okay=False, help="Responses; requests that it has already are skipped."
    ),
]
_Gateway = Annotated[
    str,
    typer.Option(
        metavar="URL",
        parser=option_parser(_gateway_url),
        envvar="STAGELINE_GATEWAY",
        show_envvar=False,
        help="Gateway URL, also set by STAGELINE_GATEWAY.",
    ),
]
_Concurrency = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum concurrent requests.")]
_Retries = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, help="Maximum retries of a request after cut connections and server errors."
    ),
]
_RetryWait = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        parser=_seconds,
        help="Maximum wait of a request for an overloaded server that says when to retry.",
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", parser=_seconds, help="Maximum wait for a response before a retry."),
]


def batch(
    requests: _Requests,
    responses: _Responses,
    gateway: _Gateway = "http://127.0.0.1:7482",
    concurrency: _Concurrency = 32,
    retries: _Retries = 8,
    retry_wait: _RetryWait = 600.0,
    timeout: _Timeout = 600.0,
) -> int:
    """Send a file of requests in OpenAI's batch form, and write the responses.

    Start it again after an interruption: it continues. Exit code 1 if a request failed.
    """
    if responses.exists() and requests.samefile(responses):
        raise typer.BadParameter("OUT is the file IN")
    limits = CallLimits(concurrency=concurrency, num_retries=retries, wait_s=retry_wait, timeout_s=timeout)
    given = build_config(lambda: BatchInput(requests))
    with build_config(lambda: BatchOutput(responses)) as output:
        run = _Run(given=given, output=output, gateway_url=gateway, limits=limits)
        try:
            run.send()
        except GatewayUnreachable as error:
            raise CommandFailed(f"{error}; {_CONTINUE}", reason="GATEWAY_UNREACHABLE") from None
        except KeyboardInterrupt:
            print(f"\nstageline: interrupted; {_CONTINUE}", file=sys.stderr)
            return ExitCode.INTERRUPTED
        print(run.summary())
        return ExitCode.FAILED if run.num_failed else ExitCode.DONE


_CONTINUE = "the same command continues"


@dataclass(kw_only=True, slots=True)
class _Run:
    given: BatchInput
    output: BatchOutput
    gateway_url: str
    limits: CallLimits
    num_sent: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def num_failed(self) -> int:
        return sum(not self.output.served[custom_id] for custom_id in self.given.custom_ids)

    def send(self) -> None:
        custom_ids = self.given.custom_ids
        missing = [custom_id for custom_id in custom_ids if custom_id not in self.output.served]
        started_s = time.monotonic()
        with _progress() as progress:
            task = progress.add_task("", total=len(custom_ids), completed=len(custom_ids) - len(missing))

            def on_answer(
                custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
            ) -> None:
                self.output.append(custom_id, response, error)
                self.num_sent += 1
                self.num_tokens += _num_output_tokens(response)
                progress.advance(task)

            asyncio.run(send_all(self.gateway_url, self.given.requests(missing), self.limits, on_answer))
        self.elapsed_s = time.monotonic() - started_s

    def summary(self) -> str:
        custom_ids: Sequence[str] = self.given.custom_ids
        num_failed, num_skipped = self.num_failed, len(custom_ids) - self.num_sent
        rate = self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0
        return (
            f"{len(custom_ids)} requests: {len(custom_ids) - num_failed} served, {num_failed} failed; "
            f"{self.num_sent} sent in {self.elapsed_s:.1f} s, {num_skipped} by earlier runs; "
            f"{self.num_tokens} output tokens, {rate:.1f} tokens/s"
        )


def _num_output_tokens(response: dict[str, Any] | None) -> int:
    body = None if response is None else response["body"]
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    found = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return found if isinstance(found, int) else 0


def _progress() -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
