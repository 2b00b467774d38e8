"""The chat page of a gateway in a real browser."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from playwright.async_api import Browser, expect

from gateway.access.visitors import Doorkeeper
from gateway.upstream.contract import ChoiceEnd
from stageline_rpc.v1 import inference_pb2
from tests.integration.browser import (
    VISIBLE_MS,
    Watched,
    is_dark,
    launched_browser,
    needs_browser,
    opened_page,
)
from tests.unit.gateway.fake_upstream import Served, answer, failure, serve
from text.tokenizer import TextCodec
from web.api_keys import KeysFile, new_key, write_keys

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
ANSWER = " a bird sang in the old tree. The sun was warm, and Lily was very happy."
IMAGES = os.environ.get("STAGELINE_TEST_RECORD_IMAGES")
"""Folder for the images of the documentation, docs/images; unset: images are made and thrown away."""

pytestmark = needs_browser


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launched_browser() as launched:
        yield launched


@asynccontextmanager
async def chatting(
    browser: Browser, *, template: str | None = TEMPLATE, page: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Served, Watched]]:
    script = settings.pop("script", answer(ANSWER))
    async with serve(script, over_tcp=True, **settings) as served:
        served.gateway.template = template
        async with opened_page(browser, str(served.client.base_url), **(page or {})) as watched:
            await expect(watched.page.locator("#model option")).to_have_count(1, timeout=VISIBLE_MS)
            yield served, watched


async def test_an_answer_streams_with_its_figures_and_a_link_to_its_trace(browser: Browser) -> None:
    async with chatting(browser, dashboard_url="http://127.0.0.1:7481/") as (served, watched):
        page = watched.page
        await expect(page.locator("#prompt")).to_be_focused()
        await page.keyboard.type("Once upon a time")
        await page.keyboard.press("Enter")
        told = page.locator(".turn.assistant")
        await expect(told.locator(".text")).to_have_text(ANSWER.strip(), timeout=VISIBLE_MS)
        await expect(told).to_have_attribute("aria-busy", "false")
        await expect(told.locator(".figures")).to_contain_text("10 prompt tokens, 2 cached")
        await expect(told.locator(".figures")).to_contain_text("tokens/s")
        request_id = served.upstream.streams[-1].request_id
        link = told.get_by_role("link", name="trace")
        await expect(link).to_have_attribute("href", f"http://127.0.0.1:7481/#trace={request_id}")
        await expect(page.locator("#prompt")).to_be_focused()


async def test_a_conversation_is_sent_with_the_chosen_parameters(browser: Browser) -> None:
    async with chatting(browser) as (served, watched):
        page = watched.page
        await page.locator("#settings-button").click()
        await page.get_by_label("System message").fill("Be brief.")
        await page.get_by_label("Temperature").fill("0.5")
        await page.get_by_label("Max tokens").fill("7")
        await page.get_by_label("Seed").fill("11")
        for text in ("Hello", "And then?"):
            await page.locator("#prompt").fill(text)
            await page.locator("#send").click()
            await expect(page.locator(".turn.assistant").last).to_have_attribute("aria-busy", "false")
            await expect(page.locator(".turn.assistant").last.locator(".figures")).not_to_be_empty()
        sent = served.request
        assert (sent.sampling.temperature, sent.max_tokens, sent.sampling.seed) == (0.5, 7, 11)
        codec = served.gateway.codec
        assert codec is not None
        prompt = codec.decode(sent.token_ids.ids)
        assert prompt.startswith("system: Be brief.\nuser: Hello\nassistant:"), prompt
        assert prompt.endswith("user: And then?\nassistant:"), prompt


@pytest.mark.parametrize("way", ["key", "button"])
async def test_an_answer_is_stopped_and_its_request_cancelled(browser: Browser, way: str) -> None:
    async with chatting(browser) as (served, watched):
        served.upstream.end_gate.clear()
        page = watched.page
        await page.locator("#prompt").fill("Go on")
        await page.keyboard.press("Enter")
        told = page.locator(".turn.assistant")
        await expect(told.locator(".text")).to_have_text(ANSWER.strip(), timeout=VISIBLE_MS)
        await expect(told).to_have_attribute("aria-busy", "true")
        if way == "key":
            await page.keyboard.press("Escape")
        else:
            await page.get_by_role("button", name="Stop").click()
        await expect(told.locator(".figures")).to_contain_text("stopped")
        async with asyncio.timeout(10):
            await served.upstream.streams[-1].cancelled.wait()
        await expect(page.locator("#send")).to_be_visible()


@pytest.mark.full
async def test_without_a_template_the_model_continues_a_text(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextCodec, "has_chat_template", False)
    async with chatting(browser, template=None) as (served, watched):
        page = watched.page
        await expect(page.locator("#model-facts")).to_contain_text("continues your text")
        await page.locator("#prompt").fill("Once upon")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant .text")).to_have_text(ANSWER.strip(), timeout=VISIBLE_MS)
        codec = served.gateway.codec
        assert codec is not None
        assert list(served.request.token_ids.ids) == codec.encode("Once upon")


async def test_a_key_stays_in_the_tab_and_out_of_urls(browser: Browser, tmp_path: Path) -> None:
    text, key = new_key(tenant="acme")
    write_keys(tmp_path / "keys.toml", [key])
    doorkeeper = Doorkeeper(KeysFile(tmp_path / "keys.toml"), lambda key_id, kind, num_tokens: None)
    async with (
        serve(answer(ANSWER), over_tcp=True, doorkeeper=doorkeeper) as served,
        opened_page(browser, str(served.client.base_url)) as watched,
    ):
        page = watched.page
        await expect(page.locator("#problem")).to_contain_text("no API key", timeout=VISIBLE_MS)
        await page.locator("#key").fill(text)
        await page.keyboard.press("Enter")
        await expect(page.locator("#model option")).to_have_count(1, timeout=VISIBLE_MS)
        await page.locator("#prompt").fill("Once upon a time")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant .text")).to_have_text(ANSWER.strip(), timeout=VISIBLE_MS)
        assert await page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        assert await page.evaluate("Object.entries(sessionStorage)") == [["stageline-api-key", text]]
        assert not [address for address in {*watched.urls, page.url} if text in address]
        watched.complaints.clear()  # the browser's own message for status 401


async def test_failures_are_said_in_one_line_and_the_next_message_works(browser: Browser) -> None:
    async with chatting(browser) as (served, watched):
        page, problem = watched.page, watched.page.locator("#problem")
        served.upstream.refusal = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=2)
        await page.locator("#prompt").fill("Hello")
        await page.keyboard.press("Enter")
        await expect(problem).to_contain_text("it failed", timeout=VISIBLE_MS)
        await expect(problem).to_contain_text("Try again in 2 s.")
        served.upstream.refusal = None
        cut = [*answer(ANSWER)(inference_pb2.GenerateRequest()), failure(grpc.StatusCode.ABORTED)]
        served.upstream.script = lambda request: [item for item in cut if not isinstance(item, ChoiceEnd)]
        await page.locator("#prompt").fill("Again")
        await page.keyboard.press("Enter")
        await expect(problem).to_contain_text("it failed", timeout=VISIBLE_MS)
        served.upstream.script = answer(ANSWER)
        await page.locator("#prompt").fill("Once more")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant").last.locator(".text")).to_have_text(ANSWER.strip())
        await expect(problem).to_be_hidden()
        watched.complaints.clear()  # the browser's own message for status 429


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_follows_the_colour_scheme(browser: Browser, scheme: Any, tmp_path: Path) -> None:
    page_settings = {"color_scheme": scheme, "viewport": {"width": 1000, "height": 640}}
    async with chatting(browser, page=page_settings, dashboard_url="http://127.0.0.1:7481/") as (_, watched):
        page = watched.page
        await page.locator("#settings-button").click()
        await page.locator("#prompt").fill("Tell me a story about a bird.")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn .figures")).not_to_be_empty(timeout=VISIBLE_MS)
        assert await is_dark(page) == (scheme == "dark")
        folder = Path(IMAGES) if IMAGES else tmp_path
        await page.screenshot(path=folder / f"chat-{scheme}.png")
        await page.locator("#theme").click()
        assert await is_dark(page) == (scheme == "light")


@pytest.mark.full
async def test_the_page_fits_a_phone_and_has_a_name_for_every_control(browser: Browser) -> None:
    phone = {"viewport": {"width": 375, "height": 780}, "is_mobile": True}
    async with chatting(browser, page=phone) as (_, watched):
        page = watched.page
        await page.locator("#settings-button").click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 375
        nameless = await page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea")]
                 .filter((one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel)
                 .map((control) => control.id)"""
        )
        assert nameless == []
