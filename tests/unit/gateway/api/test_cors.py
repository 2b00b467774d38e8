"""Pages of other origins: which may call the gateway, and what they can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.access.visitors import Doorkeeper
from gateway.config import parse_origins
from tests.unit.gateway.fake_upstream import Served, serve
from tests.unit.web.test_api_keys import made
from web.api_keys import KeysFile

PATH = "/v1/chat/completions"
PAGE = "https://chat.example.com"
HELLO = [{"role": "user", "content": "hi"}]
ALLOW, EXPOSE = "access-control-allow-origin", "access-control-expose-headers"


async def ask(served: Served, origin: str = PAGE, path: str = PATH, **body: Any) -> Any:
    return await served.client.post(path, json={"messages": HELLO, **body}, headers={"origin": origin})


async def preflight(served: Served, origin: str = PAGE, path: str = PATH, method: str = "POST") -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    return await served.client.options(path, headers=headers)


async def test_no_origin_is_allowed_by_default() -> None:
    async with serve() as served:
        response = await ask(served)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert (await preflight(served)).status_code == 405


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_pages_of_allowed_origins_read_answers_streams_and_errors(origins: tuple[str, ...]) -> None:
    async with serve(over_tcp=True, allowed_origins=origins) as served:
        shown = "*" if origins == ("*",) else PAGE
        for body, status in (({}, 200), ({"stream": True}, 200), ({"n": -1}, 400), ({"model": "other"}, 404)):
            response = await ask(served, **body)
            assert (response.status_code, response.headers[ALLOW]) == (status, shown)
            exposed = {name.strip() for name in response.headers[EXPOSE].split(",")}
            assert {"x-stageline-ignored", "x-request-id", "retry-after", "retry-after-ms"} <= exposed
        served.gateway.is_draining = True
        response = await ask(served)
        assert (response.status_code, response.headers[ALLOW]) == (503, shown)
        assert response.headers["retry-after"] == "1"


async def test_a_preflight_permits_methods_and_headers_of_clients() -> None:
    async with serve(allowed_origins=(PAGE,)) as served:
        for path, method in ((PATH, "POST"), ("/v1/models", "GET"), ("/v1/responses/resp_1", "DELETE")):
            response = await preflight(served, path=path, method=method)
            assert (response.status_code, response.headers[ALLOW]) == (200, PAGE)
            assert method in response.headers["access-control-allow-methods"]
            assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
            assert "Origin" in response.headers["vary"]
            assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", f"{PAGE}.evil.com", "http://chat.example.com", "null"]
)
async def test_pages_of_other_origins_read_nothing(origin: str) -> None:
    async with serve(allowed_origins=(PAGE,)) as served:
        assert ALLOW not in (await ask(served, origin)).headers
        response = await preflight(served, origin)
        assert response.status_code == 400 and ALLOW not in response.headers


async def test_a_preflight_needs_no_key_and_refused_keys_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text, _ = made(path)
    keeper = Doorkeeper(KeysFile(path), lambda *_: None)
    async with serve(allowed_origins=(PAGE,), doorkeeper=keeper) as served:
        assert (await preflight(served)).status_code == 200
        refused = await ask(served)
        assert (refused.status_code, refused.headers[ALLOW]) == (401, PAGE)
        headers = {"origin": PAGE, "authorization": f"Bearer {text}"}
        served_one = await served.client.post(PATH, json={"messages": HELLO}, headers=headers)
        assert (served_one.status_code, served_one.headers[ALLOW]) == (200, PAGE)


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("https://a.example", ("https://a.example",)),
        (" http://LOCALHOST:3000 , https://b.example:443", ("http://localhost:3000", "https://b.example")),
        ("*", ("*",)),
        ('["https://a.example", "*"]', ("https://a.example", "*")),
        ("http://[::1]:8080", ("http://[::1]:8080",)),
    ],
)
def test_origins_are_read_as_browsers_send_them(text: str, origins: tuple[str, ...]) -> None:
    assert parse_origins(text) == origins


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.example",
        "https://",
        "https://a.example/",
        "https://a.example/x",
        "ftp://a",
        "https://u@a",
        "https://é",
    ],
)
def test_what_is_no_origin_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"--allowed-origins has .*: write .* such as https://chat.example.com"
    ):
        parse_origins(text)
