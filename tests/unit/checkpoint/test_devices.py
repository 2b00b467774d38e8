"""Why Triton kernels do not compute a model, by the first part that they lack."""

from __future__ import annotations

import pytest

from checkpoint import Pageless, parse_config
from checkpoint.devices import no_kernels_because
from tests.families import config_of


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", None),
        ("qwen3_next", None),
        ("hy_v4", None),
        ("deepseek_v4", None),
        ("qwen4_exp_text", "and no blocks of tokens"),
    ],
)
def test_families_that_kernels_do_not_compute(family: str, reason: str | None) -> None:
    found = no_kernels_because(parse_config(config_of(family)).kinds, is_float32=False)
    assert found is None if reason is None else found is not None and reason in found


def test_parts_beside_attention_have_kernels() -> None:
    kinds = parse_config(config_of("qwen4_exp_text")).kinds
    recurrent = [kind for kind in kinds if isinstance(kind.mixer, Pageless)]
    assert any(kind.ngrams is not None for kind in recurrent)
    assert no_kernels_because(recurrent, is_float32=False) is None


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_rows_of_latents_and_entries_are_too_wide_in_float32(family: str) -> None:
    found = no_kernels_because(parse_config(config_of(family)).kinds, is_float32=True)
    assert found is not None and "tiles of float32 exceed a GPU's registers" in found
