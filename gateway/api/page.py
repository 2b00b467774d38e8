"""The chat page."""

from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Gateway
from web.static_files import StaticFile, load_static_files

DIRECTORY = Path(__file__).parents[1] / "page" / "static"


@cache
def _files() -> dict[str, StaticFile]:
    return load_static_files(DIRECTORY)


def _response(name: str, request: Request) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, f"file {name!r} not found")
    return file.response(request)


async def page(gateway: Gateway, request: Request) -> Response:
    """Return the chat page."""
    return _response("index.html", request)


async def static(gateway: Gateway, request: Request) -> Response:
    """Return a file of the chat page."""
    return _response(request.path_params["name"], request)


async def icon(gateway: Gateway, request: Request) -> Response:
    """Return the icon of the chat page."""
    return _response("icon.svg", request)
