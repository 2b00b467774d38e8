"""The gated delta rules of the self-check's reference: token by token, and shared with no stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from checkpoint import GatedDelta, KimiDelta
from checkpoint.names import TensorRole
from checkpoint.tensors import DECAY_KIND, DT_KIND

if TYPE_CHECKING:
    from stage_worker.loading.reference import StreamedLayer


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """Projections of n tokens: `fresh` [copies, n, channels] before the convolution, `gate`
    [copies, n, heads * value_dim], `strength` (b) and `decay` (a) [copies, n, heads].
    """

    fresh: Tensor
    gate: Tensor
    strength: Tensor
    decay: Tensor

    def mixed_by(
        self,
        mixer: GatedDelta,
        kernel: Tensor,
        decays: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        rounded: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Output [copies, n, heads, value_dim] before its norm, of texts of `lengths`.

        `kernel` is [channels, 1, kernel_size]; `decays` are A_log, or the rates, and dt_bias [heads].
        """
        rates = decays[0] if mixer.layout.has_rates else -decays[0].exp()
        kept = (rates * softplus(self.decay + decays[1])).exp()
        of_tokens = (self.fresh, rounded(self.strength.sigmoid()), kept[..., None])
        found = []
        for rows, b, g in zip(*(x.split_with_sizes(list(lengths), dim=1) for x in of_tokens), strict=True):
            heads = _heads(_convolved(rows, kernel, rounded), mixer)
            found.append(_delta_rule(*heads, b, g))
        return torch.cat(found, dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class KimiDeltaInputs:
    """Projections of n tokens for Kimi Delta Attention: `fresh` [copies, n, channels] before
    the convolutions, `strength` (b) [copies, n, heads] and `decay` (a) [copies, n, heads * head_dim].
    """

    fresh: Tensor
    strength: Tensor
    decay: Tensor

    def mixed_by(
        self,
        mixer: KimiDelta,
        kernel: Tensor,
        decays: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        rounded: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See `DeltaInputs.mixed_by`; dt_bias is [heads * head_dim]."""
        rates = decays[0] if mixer.has_rates else -decays[0].exp()
        steps = torch.unflatten(softplus(self.decay + decays[1]), -1, (mixer.num_heads, -1))
        of_tokens = (self.fresh, rounded(self.strength.sigmoid()), (rates[:, None] * steps).exp())
        found = []
        for rows, b, g in zip(*(x.split_with_sizes(list(lengths), dim=1) for x in of_tokens), strict=True):
            convolved = _convolved(rows, kernel, rounded)
            query, key, value = torch.unflatten(convolved, -1, (3, mixer.num_heads, -1)).unbind(2)
            found.append(_delta_rule(_unit(query), _unit(key), value, b, g))
        return torch.cat(found, dim=1)


def delta_inputs(mixer: GatedDelta, wide: Tensor, narrow: Tensor) -> DeltaInputs:
    """Separate projections as they are on disk: `wide` has queries, keys, values and gates, `narrow` has
    strengths and decays.
    """
    of_values, of_heads = (size // mixer.num_key_heads for size in (mixer.o_size, mixer.num_heads))
    layout, key_heads = mixer.layout, mixer.num_key_heads
    sizes = mixer.key_dim, mixer.key_dim, of_values, of_values
    query, key, value, gate = _parts(wide, sizes, key_heads, is_grouped=layout.is_grouped)
    strength, decay = _parts(narrow, (of_heads,) * 2, key_heads, is_grouped=layout.has_grouped_heads)
    return DeltaInputs(torch.cat((query, key, value), dim=-1), gate, strength, decay)


def _parts(joined: Tensor, sizes: tuple[int, ...], num_key_heads: int, *, is_grouped: bool) -> list[Tensor]:
    """Parts of `sizes` for each key head."""
    if not is_grouped:
        return list(joined.split_with_sizes([size * num_key_heads for size in sizes], dim=-1))
    groups = torch.unflatten(joined, -1, (num_key_heads, -1))
    return [part.flatten(-2) for part in groups.split_with_sizes(sizes, dim=-1)]


def _convolved(rows: Tensor, kernel: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """SiLU of the causal convolution of `rows` [copies, n, channels]."""
    padded = pad(rows.transpose(1, 2), (kernel.shape[2] - 1, 0))
    return rounded(silu(rounded(conv1d(padded, kernel, groups=len(kernel))))).transpose(1, 2)


def _heads(mixed: Tensor, mixer: GatedDelta) -> tuple[Tensor, Tensor, Tensor]:
    """Unit queries and keys [copies, n, heads, key_dim], and values, of `mixed` [copies, n, channels]."""
    query, key, value = mixed.split_with_sizes((mixer.q_size, mixer.q_size, mixer.o_size), dim=-1)
    heads = torch.arange(mixer.num_heads)
    per_key = mixer.num_heads // mixer.num_key_heads
    key_heads = heads % mixer.num_key_heads if mixer.layout.is_tiled else heads // per_key
    query, key = (
        _unit(torch.unflatten(x, -1, (mixer.num_key_heads, -1)))[:, :, key_heads] for x in (query, key)
    )
    return query, key, torch.unflatten(value, -1, (mixer.num_heads, -1))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, strength: Tensor, kept: Tensor) -> Tensor:
    """Output [copies, n, heads, value_dim] of heads [copies, n, heads, width].

    `kept` is [copies, n, heads, key_dim or 1].
    """
    state = torch.zeros(*key[:, 0].shape, value.shape[-1])
    outputs = []
    for token in range(key.shape[1]):
        k, v = key[:, token], value[:, token]
        state = state * kept[:, token, ..., None]
        error = (v - torch.einsum("chkv,chk->chv", state, k)) * strength[:, token, :, None]
        state = state + torch.einsum("chk,chv->chkv", k, error)
        outputs.append(torch.einsum("chkv,chk->chv", state, query[:, token]) / query.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1)


def kimi_delta(layer: StreamedLayer, x: Tensor, lengths: Sequence[int], mixer: KimiDelta) -> Tensor:
    """The gated delta rule with a decay per channel, token by token."""
    model, places = layer.model, layer.places
    decays = (TensorRole.STATE_DECAY, DECAY_KIND), (TensorRole.STATE_DT, DT_KIND)
    decay, dt_bias = (model.exact(places[role, kind, None]) for role, kind in decays)
    kernels = (TensorRole.CONV_Q, TensorRole.CONV_K, TensorRole.CONV_V)
    kernel = torch.cat([model.kernel(places[role, "weight", None]) for role in kernels])
    inputs = KimiDeltaInputs(
        fresh=torch.cat(
            [layer.projected(x, role) for role in (TensorRole.Q, TensorRole.K, TensorRole.V)], -1
        ),
        strength=layer.projected(x, TensorRole.KDA_B),
        decay=layer.projected(layer.projected(x, TensorRole.KDA_DECAY_DOWN), TensorRole.KDA_DECAY_UP),
    )
    mixed = model.rounded(inputs.mixed_by(mixer, kernel, (decay, dt_bias), lengths, model.rounded))
    scaled = mixed * torch.rsqrt(mixed.square().mean(dim=-1, keepdim=True) + mixer.norm_eps)
    weight = model.vector(places[TensorRole.STATE_NORM, "weight", None])
    gate = layer.projected(layer.projected(x, TensorRole.KDA_GATE_DOWN), TensorRole.KDA_GATE_UP)
    gated = (scaled * weight).flatten(2) * gate.sigmoid()
    return layer.projected(model.rounded(gated), TensorRole.STATE_OUT)
