"""A real browser, whose pages may not complain or load anything from other hosts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = (
    os.environ.get("STAGELINE_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
VISIBLE_MS = 20_000
"""Time limit in milliseconds for visible changes."""

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install chromium, or name one in STAGELINE_TEST_CHROMIUM"
)


@asynccontextmanager
async def launched_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        await launched.close()


class Watched:
    """A page with its errors and requested URLs."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.urls: set[str] = set()
        page.on("console", lambda message: self._record(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.urls.add(request.url))

    def _record(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


@asynccontextmanager
async def opened_page(browser: Browser, url: str, **settings: Any) -> AsyncIterator[Watched]:
    """Open the page at `url`; fail on page errors and on requests to other hosts."""
    size: Any = settings.pop("viewport", {"width": 1360, "height": 1000})
    context = await browser.new_context(viewport=size, **settings)
    watched = Watched(await context.new_page())
    await watched.page.goto(url)
    yield watched
    assert watched.complaints == []
    assert {re.match(r"https?://[^/]*/", address)[0] for address in watched.urls} == {url}  # type: ignore[index]
    await context.close()


async def is_dark(page: Page) -> bool:
    red = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    return int(red) < 100
