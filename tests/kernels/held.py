"""Weights of held matrices, by their definition."""

from __future__ import annotations

import torch
from torch import Tensor

from stage_worker.model.held_matrices import HeldMatrix, NibbleMatrix

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
"""Source: OCP Microscaling Formats 1.0."""


def unpacked(matrix: HeldMatrix) -> Tensor:
    """Float32 [rows, columns] in the order of the input."""
    plan, columns = matrix.plan, torch.arange(matrix.plan.columns)
    if not isinstance(matrix, NibbleMatrix):
        element = torch.float8_e4m3fn if matrix.plan.is_fp8 else torch.int8
        of_blocks = matrix.scales[columns // (matrix.plan.width or plan.columns)]
        rows = torch.arange(plan.rows) // matrix.plan.height
        return matrix.codes.view(element).float() * of_blocks[:, rows].t().float()
    half, groups = matrix.plan.half, columns // (matrix.plan.group or plan.columns)
    in_run = columns % (2 * half)
    octets = matrix.codes[:, columns // (2 * half) * half + in_run % half]
    codes = torch.where(in_run < half, octets & 15, octets >> 4)
    if matrix.plan.is_float:
        scales = matrix.scales.view(torch.float8_e8m0fnu) if matrix.plan.has_exponents else matrix.scales
        return E2M1[codes.int()] * scales.float()[groups].t()
    zeros = 8.0 if matrix.zeros is None else matrix.zeros[groups].t().float()
    found = (codes.float() - zeros) * matrix.scales[groups].t().float()
    if matrix.offsets is not None:
        found = found + matrix.offsets[groups].t().float()
    if matrix.order is None:
        return found
    orders = matrix.order.long().repeat_interleave(len(found) // plan.experts, 0)
    return torch.empty_like(found).scatter_(1, orders, found)
