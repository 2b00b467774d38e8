"""Rotary position embedding with the scalings linear, llama3, yarn, longrope and proportional.

Angles are computed in float32 from absolute positions; cos and sin are rounded to the run dtype last, as
in transformers (modeling_rope_utils.py and LlamaRotaryEmbedding.forward), so that float32 tokens agree.
Element i of a head is paired with element i + head_dim / 2 ("rotate half"), the order of most families'
query and key projections; others are reordered when loaded (`head_order`), and elements without rotation
get the angle 0. Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from checkpoint import Attention, Compressed, Latent, RopeConfig, RopeKind
from checkpoint.rope_config import QueryGrowth, yarn_mscale
from checkpoint.step_sizes import KEPT_POSITIONS


class Rope:
    """The rotary embedding of heads of one width, rounded to one dtype on one device."""

    def __init__(
        self, config: RopeConfig | None, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Frequencies are computed on the CPU, so that every stage has the same bits."""
        self._inv_freq = inverse_frequencies(config, head_dim).to(device)
        self._num_still = head_dim // 2 - len(self._inv_freq)
        self._attention_factor = 1.0 if config is None else attention_factor(config)
        self._dtype = dtype
        self._kept = self._compute(torch.arange(0, device=device))

    def cos_sin(self, positions: Tensor, *, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions` int64 [n] below `end`, [n, 1, head_dim] each; the first half of `sin` is
        negated.
        """
        if end > KEPT_POSITIONS:
            both = self._compute(positions)
        else:
            self.reserve(end)
            both = self._kept.index_select(0, positions)
        return both[:, 0], both[:, 1]

    def reserve(self, end: int) -> None:
        """Precompute positions below `end`, unless there are too many; for lower ones it then stays."""
        if len(self._kept) < end <= KEPT_POSITIONS:
            kept = min(KEPT_POSITIONS, 2 * end)
            self._kept = self._compute(torch.arange(kept, device=self._kept.device))

    def _compute(self, positions: Tensor) -> Tensor:
        """[n, 2, 1, head_dim]: cos, then sin."""
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        if self._num_still:
            cos, sin = pad(cos, (0, self._num_still), value=1.0), pad(sin, (0, self._num_still))
        both = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        return both[:, :, None].to(self._dtype)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RotaryTable:
    """`cos` and `sin` of a step's tokens, [num_tokens, 1, head_dim], see `Rope.cos_sin`.

    Rotated queries are multiplied by `query_scale` [num_tokens, 1, 1]; None for 1.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rotary:
    """What the tables of a mixer depend on. Layers look one up in each step: the hash is kept.

    With `stride`, the table has its multiples from 0 to the end of the step's longest sequence, and not the
    positions of the step.
    """

    rope: RopeConfig | None
    head_dim: int
    growth: QueryGrowth | None
    stride: int | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.rope, self.head_dim, self.growth, self.stride)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, mixer: Attention | Latent | Compressed) -> Rotary:
        width = mixer.head_dim if isinstance(mixer, Attention) else max(2, mixer.rope_dim)
        return cls(mixer.rope, width, mixer.query_growth)

    @classmethod
    def of_queries(cls, mixer: Attention) -> Rotary:
        """Of the queries of an indexer of blocks."""
        assert mixer.indexer is not None, "a layer without an indexer"
        return cls(index_rope(mixer), mixer.indexer.head_dim, None)

    @classmethod
    def of_blocks(cls, mixer: Attention) -> Rotary:
        """Of the keys of an indexer of blocks."""
        assert mixer.indexer is not None, "a layer without an indexer"
        return cls(index_rope(mixer), mixer.indexer.head_dim, None, mixer.indexer.block_size)

    @classmethod
    def all_of(cls, mixer: Attention | Latent | Compressed) -> tuple[Rotary, ...]:
        """All that the layers of a mixer look up."""
        if isinstance(mixer, Attention) and mixer.indexer is not None:
            return cls.of(mixer), cls.of_queries(mixer), cls.of_blocks(mixer)
        return (cls.of(mixer),)


def index_rope(mixer: Attention) -> RopeConfig | None:
    """The rotation of an indexer of blocks: of as many elements as in a head of attention."""
    rope = mixer.rope
    return None if rope is None else replace(rope, width=rope.width or mixer.head_dim)


def rotary_table(key: Rotary, rope: Rope, positions: Tensor, *, end: int) -> RotaryTable:
    """The table of `positions` int64 [n], which are below `end`, or see `Rotary.stride`."""
    if key.stride is not None:
        positions = torch.arange(0, end, key.stride, device=positions.device)
    cos, sin = rope.cos_sin(positions, end=end)
    return RotaryTable(cos=cos, sin=sin, query_scale=_query_scale(key.growth, positions, cos, end=end))


def _query_scale(growth: QueryGrowth | None, positions: Tensor, like: Tensor, *, end: int) -> Tensor | None:
    if growth is None or end <= growth.original_length:
        return None
    turns = positions // growth.original_length
    scale = 1 + growth.beta * torch.log1p(turns.to(torch.float32))
    return scale.to(like)[:, None, None]


def rotate_last_(x: Tensor, table: RotaryTable, rope: RopeConfig, *, is_back: bool = False) -> None:
    """Rotate the last elements of `x` [n, heads, head_dim] in place, in the order of the checkpoint.

    Products and sums are float32, as in transformers' DeepSeek V4. With `is_back`, by the negative angles.
    """
    width = table.cos.shape[-1]
    cos, sin = table.cos[..., : width // 2], table.sin[..., width // 2 :]
    if is_back:
        sin = -sin
    part = x[..., x.shape[-1] - width :]
    first, second = (part[..., ::2], part[..., 1::2]) if rope.is_interleaved else part.chunk(2, dim=-1)
    wide_first, wide_second = first.float(), second.float()
    turned = wide_first * cos - wide_second * sin
    second.copy_(wide_second * cos + wide_first * sin)
    first.copy_(turned)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [n, heads, head_dim] in place; `cos` and `sin` are from `Rope.cos_sin`."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1).mul_(sin)
    x.mul_(cos).add_(swapped)


def rotated_pairs(heads: Tensor, rope: RopeConfig, step: int = 1) -> Tensor:
    """Rotated float32 `heads` [..., n, heads, width] of the first n multiples of `step`, in the order of the
    checkpoint.

    Nothing is rounded, reordered or shared with `Rope` but the frequencies: references use it.
    """
    frequencies = inverse_frequencies(rope, heads.shape[-1])
    if rope.kind is RopeKind.PROPORTIONAL:  # all elements are paired, some pairs turn by 0
        frequencies = pad(frequencies, (0, heads.shape[-1] // 2 - len(frequencies)))
    angles = (step * torch.arange(heads.shape[-3])[:, None] * frequencies)[:, None]
    cos, sin = (f * attention_factor(rope) for f in (angles.cos(), angles.sin()))
    moving, still = heads[..., : 2 * len(frequencies)], heads[..., 2 * len(frequencies) :]
    first, second = (moving[..., ::2], moving[..., 1::2]) if rope.is_interleaved else moving.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if rope.is_interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, still), dim=-1)


def head_order(rope: RopeConfig, head_dim: int) -> list[int] | None:
    """The elements of a head in the order of `rotate_`; None for the usual order."""
    width = rope.width or head_dim
    if rope.kind is RopeKind.PROPORTIONAL or (width == head_dim and not rope.is_interleaved):
        return None
    halves = (range(width // 2), range(width // 2, width))
    first, second = (range(0, width, 2), range(1, width, 2)) if rope.is_interleaved else halves
    middle = (width + head_dim) // 2
    return [*first, *range(width, middle), *second, *range(middle, head_dim)]


def inverse_frequencies(rope: RopeConfig | None, head_dim: int) -> Tensor:
    """Angles per position of the rotated pairs of a head, float32."""
    if rope is None:
        return torch.empty(0)
    width = rope.width or head_dim
    all_pairs = head_dim if rope.kind is RopeKind.PROPORTIONAL else width
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / all_pairs
    wavelength_base: Tensor = rope.theta**exponents
    plain = 1.0 / wavelength_base
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR | RopeKind.PROPORTIONAL:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, wavelength_base, width)
        case RopeKind.LONGROPE:
            factors = rope.long_factors if rope.is_long else rope.short_factors
            return 1.0 / (torch.tensor(factors) * wavelength_base)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between.

    Source: llama-models, models/llama3/model.py, apply_scaling; transformers _compute_llama3_parameters.
    """
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    is_low = wavelength > original / rope.low_freq_factor
    is_high = wavelength < original / rope.high_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(is_low, plain / rope.factor, torch.where(is_high, plain, between))


def _yarn(rope: RopeConfig, wavelength_base: Tensor, head_dim: int) -> Tensor:
    """Interpolation of slow dimensions, extrapolation of fast ones, a linear ramp between.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2; transformers _compute_yarn_parameters.
    """
    low = _yarn_dimension(rope, rope.beta_fast, head_dim)
    high = _yarn_dimension(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    extrapolated = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelength_base) * (1 - extrapolated) + 1.0 / wavelength_base * extrapolated


def _yarn_dimension(rope: RopeConfig, num_rotations: float, head_dim: int) -> float:
    """The dimension that rotates `num_rotations` times within the original context length."""
    turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


def attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin: the attention temperature of yarn and longrope, else 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is not RopeKind.YARN:
        return 1.0
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)
