"""Checksums of payloads that stay on the device, as in `model.checksums`, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model import checksums
from stage_worker.model.triton_kernels.launch import Launch

_PLACE, _FIRST, _SECOND = (
    tl.constexpr(factor) for factor in (checksums.PLACE, checksums.FIRST, checksums.SECOND)
)
"""Negative, so that they are int64, and shifts arithmetic."""
_WORDS = 4096
"""Of one program."""


# fmt: off
@triton.jit(do_not_specialize=["num_words", "first"], do_not_specialize_on_alignment=["words"])
def sum_kernel(words, num_words, first, sums, WORDS: tl.constexpr):  # noqa: N803
    """The sum over `WORDS` words: grid [programs]. One variant for all sizes and places, compiled ahead."""
    program = tl.program_id(0).to(tl.int64)
    index = program * WORDS + tl.arange(0, WORDS)
    is_word = index < num_words
    x = tl.load(words + index, mask=is_word, other=0).to(tl.int64)
    x = (x + (index + first + 1) * _PLACE) * _FIRST
    x = (x ^ (x >> 32)) * _SECOND
    x = x ^ (x >> 29)
    tl.store(sums + program, tl.sum(tl.where(is_word, x, 0), 0))
# fmt: on


def checksum(words: Tensor, first: int) -> Tensor:
    """The sum int64 [1] over words int32 [n], of which the first has index `first` in the payload."""
    programs = triton.cdiv(len(words), _WORDS)
    sums = words.new_empty(programs, dtype=torch.int64)
    Launch(sum_kernel, (programs,), {"WORDS": _WORDS})(words, len(words), first, sums)
    return sums.sum(dtype=torch.int64).view(1)
