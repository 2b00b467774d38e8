"""transformers on the same checkpoint and device: decode steps of `generate`, eager and compiled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.bounds import StageWork
from bench.gpu.model import ELEMENT_BYTES, dtype_of, geometry_of
from bench.gpu.phase import Order, Recorder, needs_cuda
from bench.gpu.phases.decode import NO_TIME
from bench.gpu.rates import Rates
from bench.gpu.timing import synchronize
from bench.harness.figure import Better

COMPILE_S = 60.0
"""Time without which compilation does not begin; it takes 30 to 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Batches of prompts of `prompt_tokens`, and the new tokens of each."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int


FULL = Plan(batches=(1, 32), prompt_tokens=2048, new_tokens=24)
QUICK = Plan(batches=(1, 4), prompt_tokens=16, new_tokens=4)


async def measure(recorder: Recorder) -> None:
    """Eager with a dynamic cache; compiled with a static one where there is time."""
    from transformers import AutoModelForCausalLM  # imported late: a missing package fails this phase only

    order = recorder.order
    plan = QUICK if order.is_quick else FULL
    dtype = dtype_of(order.device)
    model: Any = AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype)
    model.to(order.device).eval()
    for batch in plan.batches:
        _record(recorder, plan, batch, _step_s(model, order, plan, batch), "eager")
    for batch in plan.batches:
        name = _name(plan, batch, "compiled")
        if not order.is_cuda:
            recorder.not_measured(name, "ms", needs_cuda(order), better=Better.LOWER)
        elif recorder.left_s < COMPILE_S:
            recorder.not_measured(name, "ms", NO_TIME, better=Better.LOWER)
        else:
            took_s = _step_s(model, order, plan, batch, cache_implementation="static")
            _record(recorder, plan, batch, took_s, "compiled")


def _name(plan: Plan, batch: int, mode: str) -> str:
    return f"transformers decode step, {mode}, batch {batch}, context {plan.prompt_tokens}"


@torch.inference_mode()
def _step_s(model: Any, order: Order, plan: Plan, batch: int, **options: Any) -> float:
    """Seconds of all new tokens but the first, per token; the second of two calls."""
    vocab = geometry_of(is_quick=order.is_quick).vocab
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, vocab, (batch, plan.prompt_tokens), generator=generator).to(order.device)
    times_s = {}
    for _ in range(2):
        for count in (1, plan.new_tokens):
            times_s[count] = _generate_s(model, prompts, count, order, options)
    return (times_s[plan.new_tokens] - times_s[1]) / (plan.new_tokens - 1)


def _generate_s(
    model: Any, prompts: torch.Tensor, num_tokens: int, order: Order, options: dict[str, Any]
) -> float:
    device = torch.device(order.device)
    synchronize(device)
    began_s = time.perf_counter()
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    synchronize(device)
    assert output.shape[1] == prompts.shape[1] + num_tokens, "the checkpoint has no end of sequence"
    return time.perf_counter() - began_s


def _record(recorder: Recorder, plan: Plan, batch: int, step_s: float, mode: str) -> None:
    order, bound_ms = recorder.order, None
    if (rates := Rates.of(order.rates)) is not None:
        geometry = geometry_of(is_quick=order.is_quick)
        work = StageWork(geometry, geometry.num_layers, ELEMENT_BYTES[dtype_of(order.device)])
        context = plan.prompt_tokens + plan.new_tokens // 2
        bound_ms = rates.decode_ms(work, [context] * batch) + 1e3 * work.head_bytes / rates.memory
    recorder.figure(_name(plan, batch, mode), step_s * 1e3, "ms", bound=bound_ms, better=Better.LOWER)
