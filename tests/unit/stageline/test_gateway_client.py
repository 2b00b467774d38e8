"""Gateways on this host are reached directly, others through the environment's proxies, which errors name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stageline.cli import main
from stageline.gateway_client import GatewayUnreachable, open_gateway_client, unreachable
from tests.error_lines import parse_error_line
from tests.ports import unused_address

PROXY = "http://user:secret@127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2"])
@pytest.mark.parametrize(
    ("variable", "proxy"),
    [("http_proxy", PROXY), ("ALL_PROXY", "socks5://127.0.0.1:9"), ("http_proxy", "ftp://x")],
)
async def test_a_gateway_of_this_host_is_reached_directly(
    host: str, variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    url = f"http://{host}:7482"
    async with open_gateway_client(url, timeout=1.0) as client:
        assert str(client.base_url) == f"{url}"
        assert not any(client._mounts.values())
    assert str(unreachable(url, "refused")) == f"no connection to {url}: refused"


async def test_another_gateway_is_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", PROXY)
    url = "http://10.0.0.7:7482"
    async with open_gateway_client(url, timeout=1.0) as client:
        assert any(client._mounts.values())
    text = str(unreachable(url, "refused"))
    assert text == f"no connection to {url} through the proxy http://127.0.0.1:9 of the environment: refused"
    monkeypatch.setenv("no_proxy", "10.0.0.7")
    assert str(unreachable(url, "refused")) == f"no connection to {url}: refused"


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "ftp://127.0.0.1:9"])
async def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(GatewayUnreachable, match=f"through the proxy {proxy} of the environment"):
        open_gateway_client("http://10.0.0.7:7482", timeout=1.0)


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_batch_to_this_host_does_not_ask_a_proxy(
    variable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "socks5://127.0.0.1:9")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    url = f"http://{unused_address()}"
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert main(["batch", *files, "--gateway", url, "--retries", "0"]) == 1
    reason, text = parse_error_line(capsys.readouterr().err)
    assert reason == "GATEWAY_UNREACHABLE"
    assert text.startswith(f"no connection to {url}: ") and "proxy" not in text.lower()
