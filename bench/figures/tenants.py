"""The timing attack on the prefix cache: does a tenant feel which prompts another one has sent?"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import VOCAB_SIZE, mock_cluster
from gateway.upstream.contract import RequestOwner, Tokens
from gateway.upstream.link import CoordinatorLink
from stageline_rpc.v1 import inference_pb2

NUM_TRIES = 1000
PROMPT_TOKENS, TOKENS = 512, range(10, VOCAB_SIZE)
STAGE = "step=1ms,token=40us"
"""A hit saves 20 ms."""
VICTIM, ATTACKER = "victim", "attacker"
AUC_WITHIN = 0.95
CHANCE, AUC_ACROSS = 0.5, 0.55


@dataclass(slots=True)
class Guesses:
    """Seconds to the first token of guesses that were right, and of wrong ones."""

    right_s: list[float] = field(default_factory=list)
    wrong_s: list[float] = field(default_factory=list)

    @property
    def auc(self) -> float:
        """Share of pairs of a right and a wrong guess of which the right one is faster; ties are half."""
        wrong = sorted(self.wrong_s)
        slower = sum(
            len(wrong) - (bisect_left(wrong, right_s) + bisect_right(wrong, right_s)) / 2
            for right_s in self.right_s
        )
        return slower / (len(wrong) * len(self.right_s))


async def measure(setting: Setting) -> list[Figure]:
    """Guess prompts of the victim as itself and as another tenant, in random order."""
    num_tries = 40 if setting.is_quick else NUM_TRIES
    generator = random.Random(17)
    guesses = {VICTIM: Guesses(), ATTACKER: Guesses()}
    tries = [(tenant, is_right) for tenant in guesses for is_right in (True, False)] * (num_tries // 2)
    generator.shuffle(tries)
    async with mock_cluster([STAGE]) as cluster:
        link = CoordinatorLink(cluster.processes.address)
        await link.start()
        try:
            for tenant, is_right in tries:
                sent, other = (generator.choices(TOKENS, k=PROMPT_TOKENS) for _ in range(2))
                await _first_token_s(link, VICTIM, sent)
                found_s = await _first_token_s(link, tenant, sent if is_right else other)
                times = guesses[tenant]
                (times.right_s if is_right else times.wrong_s).append(found_s)
        finally:
            await link.stop()
    for tenant, times in guesses.items():
        setting.say(f"as {tenant}: AUC {times.auc:.3f}")
    return _figures(guesses[VICTIM].auc, guesses[ATTACKER].auc)


def _figures(within: float, across: float) -> list[Figure]:
    return [
        Figure(
            name="guessing a tenant's prompt by time, as the same tenant : always right",
            measured=within,
            bound=1.0,
            unit="AUC",
            target=AUC_WITHIN,
            how="area under the ROC curve of the time to the first token: the attack works",
        ),
        Figure(
            name="guessing a tenant's prompt by time, as another tenant : chance",
            measured=CHANCE + abs(across - CHANCE),
            bound=CHANCE,
            unit="AUC",
            better=Better.LOWER,
            target=AUC_ACROSS / CHANCE,
            how="the same with another tenant's requests; on either side of chance",
            details={"auc": across},
        ),
    ]


async def _first_token_s(link: CoordinatorLink, tenant: str, prompt: Sequence[int]) -> float:
    """Seconds until the first token of a request of one token."""
    request = inference_pb2.GenerateRequest(max_tokens=1)
    request.token_ids.ids.extend(prompt)
    began_s = time.perf_counter()
    first_s = 0.0
    async for item in await link.submit(request, owner=RequestOwner(tenant=tenant)):
        if isinstance(item, Tokens) and not first_s:
            first_s = time.perf_counter() - began_s
    return first_s
