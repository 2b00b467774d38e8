"""Bursts of requests against another engine with the same checkpoint, in turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from bench.harness.bursts import Burst
from bench.harness.figure import Figure, NotMeasured, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.llama import LLAMA_88M, checkpoint
from bench.harness.openai_engine import OpenAiEngine
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster
from bench.harness.streams import Stream
from bench.harness.vllm_server import VllmServer

REQUESTS = (1, 8, 16)
QUICK_REQUESTS = (2,)
WARM_UP_TOKENS = 8
TARGETS = {"decode": 1.2, "whole burst": 1.2, "prefill": 1.3}
RATES: dict[str, Callable[[Burst], float]] = {
    "decode": lambda burst: burst.decode_rate,
    "whole burst": lambda burst: burst.all_rate,
    "prefill": lambda burst: burst.prefill_rate,
}
HOW = (
    "tokens/s of requests with prompts of 128 tokens and 64 new ones sent at once; decode: without the time "
    "of the same prompts with one new token : the other engine's, in turns"
)


class Engine(Protocol):
    """Anything that runs requests."""

    async def generate_all(self, num_streams: int, prompt_tokens: int, max_tokens: int) -> list[Stream]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """An engine, and the context in which it may be measured."""

    engine: Engine
    active: Callable[[], AbstractContextManager[None]]


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of each number of requests on both engines, which change places after each round."""
    numbers = QUICK_REQUESTS if setting.is_quick else REQUESTS
    ours: dict[int, list[Burst]] = {number: [] for number in numbers}
    others: dict[int, list[Burst]] = {number: [] for number in numbers}
    async with AsyncExitStack() as stack:
        name, other = await stack.enter_async_context(_other_engine(setting))
        cluster = await stack.enter_async_context(real_cluster(setting))
        turns = [(Turn(cluster, nullcontext), ours), (other, others)]
        for turn, _ in turns:
            with turn.active():
                await turn.engine.generate_all(max(numbers), PROMPT_TOKENS, WARM_UP_TOKENS)
        for index in range(setting.rounds(5)):
            for number in numbers:
                for turn, bursts in turns[:: -1 if index % 2 else 1]:
                    bursts[number].append(await _burst(turn, number))
                setting.say(f"{number} at once: {_summary(ours[number][-1], others[number][-1])}")
    return [
        figure for number in numbers for figure in _figures(number, ours[number], others[number], name=name)
    ]


async def _burst(turn: Turn, num_requests: int) -> Burst:
    with turn.active():
        await turn.engine.generate_all(1, PROMPT_TOKENS, WARM_UP_TOKENS)
        prefill = await turn.engine.generate_all(num_requests, PROMPT_TOKENS, 1)
        streams = await turn.engine.generate_all(num_requests, PROMPT_TOKENS, NEW_TOKENS)
    return Burst.of(prefill, streams, prompt_tokens=PROMPT_TOKENS)


@asynccontextmanager
async def _other_engine(setting: Setting) -> AsyncIterator[tuple[str, Turn]]:
    """Raises NotMeasured without an engine."""
    other = setting.other_engine
    async with AsyncExitStack() as stack:
        active: Callable[[], AbstractContextManager[None]] = nullcontext
        if other.openai_url is not None:
            name, url = "OpenAI server", other.openai_url
        elif other.vllm_python is not None:
            log = setting.output_directory / "vllm.log"
            server = VllmServer(other.vllm_python, checkpoint(setting.cache_directory), log=log)
            await stack.enter_async_context(server)
            name, url, active = "vLLM for CPU, 2 stages", server.url, server.running
        else:
            raise NotMeasured("no other engine: pass --vllm-python PATH or --openai-url URL")
        engine = await stack.enter_async_context(OpenAiEngine(url, vocab_size=LLAMA_88M.vocab))
        yield name, Turn(engine, active)


def _figures(number: int, ours: list[Burst], others: list[Burst], *, name: str) -> list[Figure]:
    requests = f"{number} request{'s at once' if number > 1 else ''}"
    return [
        of_rounds(
            f"peers, {requests}, {what} : {name}",
            [Round(rate(our), rate(other)) for our, other in zip(ours, others, strict=True)],
            unit="tok/s",
            target=TARGETS[what],
            how=HOW,
        )
        for what, rate in RATES.items()
    ]


def _summary(our: Burst, other: Burst) -> str:
    return ", ".join(f"{what} {rate(our):.0f} : {rate(other):.0f}" for what, rate in RATES.items()) + " tok/s"
