from __future__ import annotations

import pytest

from bench.gpu.bounds import StageWork
from bench.gpu.model import REFERENCE
from bench.gpu.rates import Rates

H100 = Rates(memory=3.35e12, products=798e12)


@pytest.fixture
def work() -> StageWork:
    return StageWork(REFERENCE, 16, 2)


def test_the_reference_stage_has_the_sizes_of_llama_3_8b(work: StageWork) -> None:
    assert work.layer_weights == 218_103_808
    assert work.weight_bytes == pytest.approx(6.98e9, rel=1e-3)
    assert work.kv_token_bytes == 64 * 1024
    assert work.head_bytes == 128_256 * 4096 * 2


@pytest.mark.parametrize(("batch", "least_ms"), [(1, 2.12), (32, 3.37), (128, 7.21)])
def test_decode_steps_are_bound_by_their_bytes(work: StageWork, batch: int, least_ms: float) -> None:
    assert H100.decode_ms(work, [2048] * batch) == pytest.approx(least_ms, rel=0.01)


def test_decode_steps_of_large_batches_are_bound_by_products(work: StageWork) -> None:
    num_sequences = 4096
    products_ms = 2 * work.layer_weights * 16 * num_sequences / H100.products * 1e3
    assert H100.decode_ms(work, [1] * num_sequences) == pytest.approx(products_ms)


@pytest.mark.parametrize(("start", "least_ms"), [(0, 18.6), (2048, 20.0), (30720, 39.0)])
def test_prompt_steps_are_bound_by_products(work: StageWork, start: int, least_ms: float) -> None:
    assert H100.prompt_ms(work, 2048, start) == pytest.approx(least_ms, rel=0.04)


def test_a_chunk_in_parts_needs_as_many_operations(work: StageWork) -> None:
    parts = work.prompt_flops(512, 1024) + work.prompt_flops(512, 1536)
    assert parts == work.prompt_flops(1024, 1024)


def test_rates_are_none_if_the_hardware_was_not_measured() -> None:
    assert Rates.of({}) is None
    assert Rates.of(H100.as_json()) == H100
