"""Attention that transformers' layers call: keys and values go to Stageline's pages and come from there.

transformers looks functions up by name, for all models of a process. Ours finds the attention of its layer
at the module that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface

from checkpoint import Attention
from stage_worker.model.decoder_layer import attend
from stage_worker.model.operations import Operations
from stage_worker.model.step_layout import LayerKv, PagedLayers, StepLayout

ATTENTION = "stageline"
"""Our attention, for which transformers makes no masks: each slice sees its own pages."""
PROBED_ATTENTION = "stageline_probe"
"""The same function with descriptions of masks, for `probe`."""
_PLACE = "stageline_attention"


class LayerAttention(Protocol):
    """Attention of one layer: `query` [1, heads, n, width], `key` and `value` [1, kv_heads, n, width]."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, keywords: Mapping[str, Any]
    ) -> Tensor:
        """The output, [1, n, heads, width of a value]."""


def put_attention(layer: Module, attention: LayerAttention) -> None:
    """Let `attention` compute whatever module of `layer` calls transformers' attention interface."""
    for module in layer.modules():
        setattr(module, _PLACE, attention)


def _dispatch(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **keywords: Any
) -> tuple[Tensor, None]:
    attention: LayerAttention = getattr(module, _PLACE)
    return attention(query, key, value, attention_mask, keywords), None


@dataclass(frozen=True, slots=True)
class SeenMask:
    """What transformers would mask: `visible` (batch, head, query, key) tells which keys a query sees."""

    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    local_size: int | None


def _seen_mask(*, mask_function: Callable[..., Tensor], **keywords: Any) -> SeenMask:
    return SeenMask(mask_function, keywords.get("local_size"))


AttentionInterface.register(ATTENTION, _dispatch)
AttentionInterface.register(PROBED_ATTENTION, _dispatch)
AttentionMaskInterface.register(PROBED_ATTENTION, _seen_mask)


@dataclass(slots=True)
class CurrentStep:
    """The step that a stage computes, shared by the attention of its layers."""

    layout: StepLayout | None = None
    pages: PagedLayers | None = None

    def kv(self, layer: int) -> LayerKv:
        """Keys and values of the stage's layer number `layer`, from its first."""
        assert self.layout is not None and self.pages is not None, "no step is being computed"
        group, index = self.pages.places[layer]
        assert group is not None, "a recurrent layer"
        return LayerKv(self.layout.groups[group], self.pages.groups[group], index)


class PagedAttention:
    """Attention of the stage's layer number `layer` over the pages of the current step."""

    def __init__(self, layer: int, mixer: Attention, step: CurrentStep, operations: Operations) -> None:
        self._layer, self._mixer = layer, mixer
        self._step, self._operations = step, operations

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, keywords: Mapping[str, Any]
    ) -> Tensor:
        kv, num_heads = self._step.kv(self._layer), query.shape[1]
        heads = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).contiguous()
        # All slices are written before any attends, since slices may share pages.
        kv.write(heads[:, num_heads:])
        output = heads.new_empty(len(heads), num_heads, value.shape[3])
        sinks = keywords.get("s_aux")
        attend(
            heads[:, :num_heads],
            heads,
            output,
            operations=self._operations,
            mixer=self._mixer,
            kv=kv,
            sinks=None if sinks is None else sinks.float(),
        )
        return output[None]
