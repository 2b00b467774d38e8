"""Factors of the rows of matrices: multipliers between the operations of a family, in its config.json.

A factor of an input or an output of a product is one of the matrix' rows, and of its bias. Weights are
multiplied once, when they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.config_fields import RawConfig, positive_float, positive_floats
from checkpoint.errors import BadConfig
from checkpoint.names import TensorRole
from checkpoint.recurrent import Mamba2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScale:
    """Rows [begin, end) of a role are multiplied by `weight`, their biases by `bias`."""

    role: TensorRole
    begin: int
    end: int
    weight: float
    bias: float


def parse_row_scales(raw: RawConfig, mamba: Mamba2, sizes: dict[TensorRole, int]) -> tuple[RowScale, ...]:
    """The factors of Falcon H1, without those that are 1.

    `sizes` are the rows of queries, keys, values, outputs, gates and downs. Source: transformers'
    compute_mup_vector, and the multipliers of its FalconH1DecoderLayer. Raises BadConfig.
    """
    into, state_in = (positive_float(raw, f"{part}_in_multiplier", 1.0) for part in ("attention", "ssm"))
    out, state_out = (positive_float(raw, f"{part}_out_multiplier", 1.0) for part in ("attention", "ssm"))
    key = positive_float(raw, "key_multiplier", 1.0)
    gate, down = _floats(raw, "mlp_multipliers", 2)
    factors = {
        TensorRole.Q: (into, 1.0),
        TensorRole.K: (into * key, key),
        TensorRole.V: (into, 1.0),
        TensorRole.O: (out, out),
        TensorRole.STATE_OUT: (state_out, state_out),
        TensorRole.GATE: (gate, gate),
        TensorRole.DOWN: (down, down),
    }
    found = [
        RowScale(role=role, begin=0, end=sizes[role], weight=weight, bias=bias)
        for role, (weight, bias) in factors.items()
    ]
    begin = 0
    widths = (mamba.o_size, mamba.o_size, mamba.q_size, mamba.q_size, mamba.num_heads)
    for width, factor in zip(widths, _floats(raw, "ssm_multipliers", 5), strict=True):
        scale = RowScale(
            role=TensorRole.MAMBA_IN, begin=begin, end=begin + width, weight=state_in * factor, bias=factor
        )
        found.append(scale)
        begin += width
    return tuple(scale for scale in found if (scale.weight, scale.bias) != (1.0, 1.0))


def _floats(raw: RawConfig, key: str, count: int) -> tuple[float, ...]:
    found = (1.0,) * count if raw.get(key) is None else positive_floats(raw, key)
    if len(found) != count:
        raise BadConfig(f"config field {key!r} must list {count} numbers, has {len(found)}")
    return found
