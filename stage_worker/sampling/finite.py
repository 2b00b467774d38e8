"""Finds logits that no token may be drawn from."""

import torch
from torch import Tensor


def non_finite_rows(logits: Tensor) -> list[int]:
    """Rows of `logits` [n, vocab_size] with a NaN or an infinity in them.

    The sum of a row is finite only if all of it is, which costs one pass; a sum that overflows is looked at
    again.
    """
    suspects = torch.nonzero(~torch.isfinite(logits.sum(dim=-1))).flatten().tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]
