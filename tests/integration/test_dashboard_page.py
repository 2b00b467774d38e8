"""The dashboard page in a real browser, on a running pipeline."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Route, expect

from coordinator.observability.trace_reader import TraceReader
from tests.integration.browser import (
    VISIBLE_MS,
    Watched,
    is_dark,
    launched_browser,
    needs_browser,
    opened_page,
)
from tests.integration.cluster import Cluster
from tests.integration.request_cases import mixed_cases
from tests.integration.test_dashboard import TOKEN, served, url
from tests.integration.traced_request import traced_request
from web.api_keys import new_key, write_keys
from wire.ids import id_text

SLOW_LAST = ("step=6ms", "step=6ms", "step=12ms")
pytestmark = needs_browser


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launched_browser() as launched:
        yield launched


def opened(browser: Browser, cluster: Cluster, **settings: Any) -> AbstractAsyncContextManager[Watched]:
    """Open the page of a cluster."""
    return opened_page(browser, url(cluster, ""), **settings)


@asynccontextmanager
async def at_work(cluster: Cluster, count: int = 6) -> AsyncIterator[None]:
    """Run requests until the block ends."""
    async with cluster.generating(mixed_cases(count, max_tokens=900)):
        yield
        for request in cluster.server.engine.registry.live:
            cluster.server.engine.cancel(request.id)


async def test_the_page_shows_stages_steps_and_the_slow_stage(browser: Browser) -> None:
    async with served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster, opened(browser, cluster) as watched:
        page = watched.page
        async with at_work(cluster):
            await expect(page.locator("#state")).to_have_text("serving", timeout=VISIBLE_MS)
            await expect(page.locator("#stages > li")).to_have_count(3)
            await expect(page.locator("#summary")).to_contain_text(
                "Stage 2 (w2) is the slowest", timeout=VISIBLE_MS
            )
            await expect(page.locator(".stage.slowest")).to_contain_text("w2")
            await expect(page.locator("#timeline")).to_have_attribute(
                "data-blocks", re.compile(r"[1-9]\d+"), timeout=VISIBLE_MS
            )
            await expect(page.locator("#model-facts")).to_contain_text(
                re.compile(r" · loop lag p99 \d\S*\s(ms|µs)$"), timeout=VISIBLE_MS
            )
            await expect(page.locator("#rows tr")).to_have_count(6)
            await expect(page.locator("#generated .line")).to_have_attribute("d", re.compile("L"))
        await expect(page.locator("#rows")).to_contain_text("cancelled", timeout=VISIBLE_MS)


@pytest.mark.full
async def test_users_log_in_and_see_what_their_role_may(browser: Browser, tmp_path: Path) -> None:
    text, key = new_key(tenant="acme", role="viewer")
    write_keys(tmp_path / "keys.toml", [key])
    async with (
        served(2, num_workers=3, keys_file=tmp_path / "keys.toml") as cluster,
        opened_page(browser, url(cluster, "")) as watched,
    ):
        page = watched.page
        await page.goto(f"{url(cluster, '')}#trace=0199")
        await expect(page).to_have_url(f"{url(cluster, 'login')}#trace=0199")
        await page.fill("#key", f"{text[:-2]}xx")
        await page.keyboard.press("Enter")
        await expect(page.locator("#problem")).to_have_text("the API key is wrong, or was revoked")
        await page.fill("#key", text)
        await page.keyboard.press("Enter")
        await expect(page.locator("#user")).to_have_text(f"viewer: key {key.id} of tenant acme")
        await expect(page.locator("#trace-title")).to_contain_text("0199")
        await page.keyboard.press("Escape")
        await expect(page.locator("#stages > li")).to_have_count(2)
        await expect(page.get_by_role("button", name="Drain…")).to_have_count(0)
        await expect(page.locator("#unlock")).to_be_hidden()
        kept = await page.evaluate(
            "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])"
        )
        assert kept == '["",{},{}]'
        await page.click("#logout")
        await expect(page).to_have_url(url(cluster, "login"))
        operator, entry = new_key(tenant="ops", role="operator")
        write_keys(tmp_path / "keys.toml", [key, entry])
        await page.fill("#key", operator)
        await page.keyboard.press("Enter")
        await expect(page.locator("#user")).to_have_text(f"operator: key {entry.id} of tenant ops")
        drain = page.locator("#stages > li button").first
        await drain.click()
        await drain.click()
        await expect(page.locator("#notice")).to_contain_text("drains: it stops once its layers have moved")
        write_keys(tmp_path / "keys.toml", [key])
        await expect(page).to_have_url(url(cluster, "login"), timeout=VISIBLE_MS)
        watched.complaints.clear()  # the browser's own messages for 401 and 404


async def test_a_pipeline_with_fewer_stages_is_shown_with_the_reason(browser: Browser) -> None:
    async def shrunk(route: Route) -> None:
        response = await route.fetch()
        detail = "with 2 of 3 stages; worker w2 is lost"
        await route.fulfill(
            response=response, json={**await response.json(), "num_stages": 3, "detail": detail}
        )

    async with served(2, "step=6ms") as cluster, opened(browser, cluster) as watched:
        facts, detail = watched.page.locator("#model-facts"), watched.page.locator("#state-detail")
        await expect(facts).to_contain_text("· 2 stages ·", timeout=VISIBLE_MS)
        await expect(detail).to_be_empty()
        await watched.page.route("**/api/status", shrunk)
        await expect(facts).to_contain_text("· 2 of 3 stages ·", timeout=VISIBLE_MS)
        await expect(detail).to_have_text("with 2 of 3 stages; worker w2 is lost")
        await expect(watched.page.locator("#state")).to_have_text("serving")
        await watched.page.unroute_all(behavior="wait")


async def test_a_stage_shows_its_recurrent_states(browser: Browser) -> None:
    async def recurrent(route: Route) -> None:
        response = await route.fetch()
        status = await response.json()
        status["workers"][0]["kv"] |= {"states_live": 2, "states_saved": 1, "states_free": 5}
        await route.fulfill(response=response, json=status)

    async with served(2, "step=6ms") as cluster, opened(browser, cluster) as watched:
        blocks = watched.page.locator('.stage [data-bar="blocks"]')
        await watched.page.route("**/api/status", recurrent)
        expected = re.compile(r" free; recurrent states: 2 live, 1 saved, 5 free$")
        await expect(blocks.nth(0)).to_have_attribute("title", expected, timeout=VISIBLE_MS)
        await expect(blocks.nth(1)).to_have_attribute("title", re.compile(r"cached, [1-9]\d* free$"))
        await watched.page.unroute_all(behavior="wait")


async def test_a_stage_shows_the_speed_of_its_gpu_and_its_cuda_graphs(browser: Browser) -> None:
    async def on_a_gpu(route: Route) -> None:
        response = await route.fetch()
        status = await response.json()
        status["workers"][0] |= {
            "rates": {"bytes_per_second": "3350000000000", "operations_per_second": "798000000000000"},
            "cuda_graphs": {
                "num_replayed": "97",
                "eager": [
                    {"reason": "EAGER_REASON_FIRST", "num_steps": "2"},
                    {"reason": "EAGER_REASON_NO_SIZE", "num_steps": "1"},
                ],
                "sizes": [
                    {"num_tokens": 8, "has_prompts": False, "num_graphs": 3},
                    {"num_tokens": 64, "has_prompts": True, "num_graphs": 1},
                ],
                "num_failed": 0,
                "pool_bytes": str(96 << 20),
            },
        }
        await route.fulfill(response=response, json=status)

    async with served(2, "step=6ms") as cluster, opened(browser, cluster) as watched:
        gpus = watched.page.locator(".stage .gpu")
        await expect(gpus.nth(0)).to_be_empty(timeout=VISIBLE_MS)
        await watched.page.route("**/api/status", on_a_gpu)
        await expect(gpus.nth(0)).to_have_text(
            re.compile(r"3\D350 GB/s 798 TFLOP/s\s*CUDA graphs 97\s%"), timeout=VISIBLE_MS
        )
        await expect(gpus.nth(0).locator("[title*=replayed]")).to_have_attribute(
            "title",
            re.compile(
                r"^97 steps replayed; eager: 2 first, 1 no size; 4 graphs of 96\.0\sMiB; "
                r"tokens: 8, 64 with prompts; 0 failed$"
            ),
        )
        await expect(gpus.nth(1)).to_be_empty()
        await watched.page.unroute_all(behavior="wait")


async def test_stages_show_what_they_fetch_and_for_how_long_still(browser: Browser) -> None:
    async def fetching(route: Route) -> None:
        response = await route.fetch()
        status = await response.json()
        fetch = {"done_bytes": str(1 << 30), "total_bytes": str(3 << 30), "bytes_per_second": str(256 << 20)}
        status["workers"][0]["fetch"] = fetch
        status["workers"][1]["fetch"] = fetch | {"bytes_per_second": "0", "is_prefetch": True}
        await route.fulfill(response=response, json=status)

    async with served(2, "step=6ms") as cluster, opened(browser, cluster) as watched:
        await watched.page.route("**/api/status", fetching)
        shown = watched.page.locator(".stage .times")
        await expect(shown.nth(0)).to_have_text(
            re.compile(r"^fetches 1\.0\sGiB of 3\.0\sGiB, 256\.0\sMiB/s, 8\.00\ss left$"), timeout=VISIBLE_MS
        )
        await expect(shown.nth(1)).to_have_text(
            re.compile(r"^prefetches 1\.0\sGiB of 3\.0\sGiB, 0\sB/s$"), timeout=VISIBLE_MS
        )
        await watched.page.unroute_all(behavior="wait")


async def test_stages_show_the_links_of_their_hops(browser: Browser) -> None:
    async def on_hosts(route: Route) -> None:
        response = await route.fetch()
        status = await response.json()
        ends = [("", "w0"), ("w0", "w1"), ("w1", "w2"), ("w2", "")]
        status["links"] = [
            {"from_worker": one, "to_worker": other, "round_trip": f"{number}.5s", "bytes_per_second": "0"}
            for number, (one, other) in enumerate(ends)
        ]
        status["links"][1] |= {"bytes_per_second": str(250 << 20), "advice": "use int8"}
        del status["links"][2]  # both on one host
        status["workers"][0] |= {"hop_transport": "HOP_TRANSPORT_TCP", "same_host_fallback": ""}
        status["workers"][1] |= {"hop_transport": "HOP_TRANSPORT_GRPC", "same_host_fallback": "other users"}
        await route.fulfill(response=response, json=status)

    async with served(3, "step=6ms") as cluster, opened(browser, cluster) as watched:
        links = watched.page.locator(".stage .links")
        await expect(links.nth(0)).to_have_text("to w1 grpc", timeout=VISIBLE_MS)
        await expect(links.nth(2)).to_be_empty()
        await watched.page.route("**/api/status", on_hosts)
        await expect(links.nth(0)).to_have_text(
            re.compile(r"^from the coordinator 500\sms\s*to w1 1\.50\ss, 250\.0\sMiB/s tcp$"),
            timeout=VISIBLE_MS,
        )
        await expect(links.nth(0).locator("span").nth(0)).to_have_attribute(
            "title", "round trip; rate not measured yet"
        )
        await expect(links.nth(0).locator("span").nth(1)).to_have_attribute(
            "title", "round trip and rate; use int8"
        )
        await expect(links.nth(1)).to_have_text("to w2 grpc")
        await expect(links.nth(1).locator("span")).to_have_attribute(
            "title", "not in shared memory: other users"
        )
        await expect(links.nth(2)).to_have_text(re.compile(r"^to the coordinator 3\.50\ss$"))
        await watched.page.unroute_all(behavior="wait")


@pytest.mark.full
async def test_a_trace_is_opened_and_closed_with_the_keyboard(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def facts(self: TraceReader, wanted: str) -> Mapping[str, Any]:
        trace = traced_request(wanted)
        former = {"worker": "worker-9"}  # ran stage 2 before a recovery
        for name in ("rows", "stages"):
            trace[name] = [*trace[name], {**trace[name][-1], **former}]
        return trace

    monkeypatch.setattr(TraceReader, "facts", facts)
    async with served(3, *SLOW_LAST) as cluster, opened(browser, cluster) as watched:
        page = watched.page
        await cluster.generate_all(mixed_cases(3, max_tokens=5))
        await expect(page.locator("#rows tr", has_text="finished")).to_have_count(3, timeout=VISIBLE_MS)
        for _ in range(30):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.tagName") == "TR":
                break
        await page.keyboard.press("ArrowDown")
        chosen = await page.evaluate("document.activeElement.dataset.id")
        assert chosen == await page.locator("#rows tr").nth(1).get_attribute("data-id")
        await page.keyboard.press("Enter")
        await expect(page.locator("#trace .sentence")).to_contain_text(
            "computing on stage 2", timeout=VISIBLE_MS
        )
        await expect(page.locator("#trace-title")).to_contain_text(chosen)
        assert await page.locator("#trace .segment").count() > 30
        await expect(page.locator("#trace .slow-row")).to_have_count(1)
        await expect(page.locator("#trace .slow-row")).to_contain_text("worker-2")
        await expect(page.locator("#trace .label", has_text="▲")).to_have_count(1)
        await page.keyboard.press("Escape")
        await expect(page.locator("#trace")).to_be_hidden()
        assert await page.evaluate("document.activeElement.dataset.id") == chosen


async def test_a_link_opens_the_trace_of_its_request(browser: Browser) -> None:
    async with served(3, *SLOW_LAST) as cluster, opened(browser, cluster) as watched:
        (case,) = mixed_cases(1, max_tokens=5)
        await cluster.generate_all([case])
        request_id = id_text(case.request_id)
        page = watched.page
        await page.goto(f"{url(cluster, '')}#trace={request_id}")
        await expect(page.locator("#trace-title")).to_contain_text(request_id, timeout=VISIBLE_MS)
        await expect(page.locator("#trace .sentence")).to_contain_text("computing on", timeout=VISIBLE_MS)
        await page.keyboard.press("Escape")
        await page.goto(f"{url(cluster, '')}#trace=0199")
        await expect(page.locator("#trace")).to_contain_text(
            re.compile("spans have not arrived yet|No trace of this request is stored"), timeout=VISIBLE_MS
        )
        watched.complaints.clear()  # the browser's own message for the 404


@pytest.mark.full
async def test_a_live_request_shows_its_milestones(browser: Browser) -> None:
    async with (
        served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster,
        opened(browser, cluster) as watched,
        at_work(cluster, 1),
    ):
        await watched.page.locator("#rows tr").first.click(timeout=VISIBLE_MS)
        await expect(watched.page.locator("#trace .sentence")).to_contain_text(
            "in decode", timeout=VISIBLE_MS
        )


@pytest.mark.full
async def test_the_pipeline_view_is_paused_and_stepped_with_the_keyboard(browser: Browser) -> None:
    async with (
        served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster,
        opened(browser, cluster) as watched,
        at_work(cluster),
    ):
        page = watched.page
        await expect(page.locator("#timeline")).to_have_attribute(
            "data-blocks", re.compile(r"[1-9]\d+"), timeout=VISIBLE_MS
        )
        await page.locator("#timeline").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
        first = await page.locator("#step").text_content()
        assert first is not None
        assert re.match(r"Step \d+: [a-z ]+, epoch 1, .* stage 2 1\d\.\d\sms\.$", first), first
        await page.keyboard.press("ArrowLeft")
        assert await page.locator("#step").text_content() != first
        await page.keyboard.press(" ")
        await expect(page.locator("#pause")).to_have_attribute("aria-pressed", "false")


async def test_actions_need_the_operator_token(browser: Browser) -> None:
    async with (
        served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster,
        opened(browser, cluster) as watched,
        at_work(cluster, 1),
    ):
        page = watched.page
        await expect(page.locator("#rows tr")).to_have_count(1, timeout=VISIBLE_MS)
        await expect(page.get_by_role("button", name="Drain")).to_have_count(0)
        await page.locator("#unlock").click()
        await page.locator("#token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Drain")).to_have_count(3)
        await page.locator("#rows tr").first.click()
        await page.locator("#trace-cancel").click(timeout=VISIBLE_MS)
        await expect(page.locator("#rows tr .pill")).to_have_text("cancelled", timeout=VISIBLE_MS)
        stored = await page.evaluate("[Object.keys(localStorage), Object.keys(sessionStorage)]")
        assert stored == [[], ["stageline-token"]]


@pytest.mark.full
async def test_the_page_recovers_when_the_coordinator_responds_again(browser: Browser) -> None:
    async with served(2) as cluster, opened(browser, cluster) as watched:
        page = watched.page
        await expect(page.locator("#state")).to_have_text("serving", timeout=VISIBLE_MS)
        await page.route("**/api/**", lambda route: route.abort())
        await expect(page.locator("#state")).to_have_text("no answer", timeout=VISIBLE_MS)
        await page.unroute("**/api/**")
        await expect(page.locator("#state")).to_have_text("serving", timeout=VISIBLE_MS)
        watched.complaints.clear()  # the browser's own message for a cut connection


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_follows_the_colour_scheme_and_can_be_switched(
    browser: Browser, scheme: Any, tmp_path: Path
) -> None:
    async with (
        served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster,
        opened(browser, cluster, color_scheme=scheme) as watched,
        at_work(cluster),
    ):
        page = watched.page
        await expect(page.locator("#timeline")).to_have_attribute(
            "data-blocks", re.compile(r"[1-9]\d+"), timeout=VISIBLE_MS
        )
        assert await is_dark(page) == (scheme == "dark")
        await page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        await page.locator("#theme").click()
        assert await is_dark(page) == (scheme == "light")
        await page.reload()
        assert await is_dark(page) == (scheme == "light")


@pytest.mark.full
async def test_the_page_fits_a_phone(browser: Browser) -> None:
    phone = {"width": 375, "height": 780}
    async with (
        served(3, *SLOW_LAST) as cluster,
        opened(browser, cluster, viewport=phone, is_mobile=True) as watched,
    ):
        await cluster.generate_all(mixed_cases(3, max_tokens=5))
        await expect(watched.page.locator("#rows tr")).to_have_count(3, timeout=VISIBLE_MS)
        assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.full
async def test_with_reduced_motion_the_page_is_drawn_once_per_response(browser: Browser) -> None:
    async with (
        served(3, *SLOW_LAST, max_kv_tokens=8192) as cluster,
        opened(browser, cluster, reduced_motion="reduce") as watched,
        at_work(cluster),
    ):
        page = watched.page
        await expect(page.locator("#timeline")).to_have_attribute(
            "data-blocks", re.compile(r"[1-9]\d+"), timeout=VISIBLE_MS
        )
        draws = await page.evaluate(
            """new Promise((done) => {
              let draws = 0, frames = 0;
              new MutationObserver((all) => { draws += all.length; })
                .observe(document.getElementById("timeline"), { attributeFilter: ["data-blocks"] });
              const tick = () => (++frames < 30 ? requestAnimationFrame(tick) : done(draws));
              requestAnimationFrame(tick);
            })"""
        )
        assert draws <= 3
