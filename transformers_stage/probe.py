"""What transformers' layers compute, found by running them on the meta device, and compared with the plan.

Nothing here knows a family: a model whose layers do other things than those that Stageline's pages and cuts
carry is refused by the name of what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.integrations.moe import ExpertsInterface

from checkpoint import Attention, Blueprint, Checkpoint, UnsupportedModel
from transformers_stage.attention import ATTENTION, PROBED_ATTENTION, SeenMask, put_attention
from transformers_stage.empty_model import (
    DecoderModel,
    compute_buffers,
    empty_model,
    is_buffer_owner,
    refusal_of,
)

_NUM_TOKENS = 4
_KNOWN_KEYWORDS = frozenset(
    (
        *("scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"),
        *("position_embeddings", "use_cache", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "layer_idx", "past_key_values"),
    )
)
"""Keywords of attention that `PagedAttention` obeys, or that change nothing without a cache and in a causal
decoder. Windows come from the masks, which are what transformers itself obeys.
"""
_UNSET = (None, False, 0, 0.0)


@dataclass(slots=True)
class _Call:
    """One call of attention."""

    key: Tensor
    mixer: Attention


class _Recorder:
    """Stands in for the attention of a layer and records its calls."""

    def __init__(self, model: DecoderModel, layer: int) -> None:
        self._model, self._layer = model, layer
        self.calls: list[_Call] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, keywords: Mapping[str, Any]
    ) -> Tensor:
        if unknown := sorted(
            name for name, value in keywords.items() if name not in _KNOWN_KEYWORDS and not _is_unset(value)
        ):
            raise self._refusal(f"attention takes {unknown[0]!r}, which Stageline's does not know")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise self._refusal(
                f"queries of {query.shape[3]}, keys of {key.shape[3]} and values of {value.shape[3]}"
                " elements, pages hold one width"
            )
        scale, softcap = keywords.get("scaling"), keywords.get("softcap")
        if not isinstance(scale, int | float | None):
            raise self._refusal("the scale of scores is no constant")
        mixer = Attention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            rope=None,
            scale=key.shape[3] ** -0.5 if scale is None else float(scale),
            window=self._window(mask),
            softcap=float(softcap) if softcap else None,
            has_sinks=keywords.get("s_aux") is not None,
        )
        self.calls.append(_Call(key, mixer))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def _window(self, mask: object) -> int | None:
        """The window of a mask, which must be causal and have no other holes."""
        if not isinstance(mask, SeenMask):
            raise self._refusal("attention has a mask of its own, or none")
        last = 2 * (mask.local_size or 8) + 3
        for query in {0, last // 2, last}:
            keys = torch.arange(last + 2)
            zero = torch.zeros((), dtype=torch.int64)
            visible = mask.visible(zero, zero, torch.tensor(query), keys)
            first = 0 if mask.local_size is None else max(0, query - mask.local_size + 1)
            if not torch.equal(visible.expand(len(keys)).bool(), (keys >= first) & (keys <= query)):
                raise self._refusal("its mask is neither causal nor a sliding window")
        return mask.local_size

    def _refusal(self, reason: str) -> UnsupportedModel:
        return refusal_of(self._model, f"layer {self._layer}: {reason}")


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and value in _UNSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What attention of each layer computes, without rotation.

    Modules `before` and `after` the layers have weights of their own, beside the embeddings.
    """

    mixers: tuple[Attention, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


def probe(model: DecoderModel) -> Probed:
    """Run the layers of an empty model, and return what they compute.

    Raises UnsupportedModel for layers that do anything that neither pages nor cuts carry.
    """
    recorders = [_Recorder(model, layer) for layer in range(len(model.layers))]
    order: list[str] = []
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        for layer, recorder in zip(model.layers, recorders, strict=True):
            put_attention(layer, recorder)
            stack.callback(layer.register_forward_hook(_collecting(model, outputs)).remove)
        for name, module in model.base.named_children():
            if name != model.layers_name and next(module.parameters(), None) is not None:
                stack.callback(module.register_forward_hook(_noting(name, order, outputs)).remove)
        for module in model.base.modules():
            if is_buffer_owner(module):
                _compute_on_host(model, module, stack)
        _run(model)
    if len(outputs) != len(recorders):
        raise refusal_of(model, f"its {len(recorders)} layers are computed {len(outputs)} times")
    return Probed(
        mixers=tuple(_only_call(model, index, recorder) for index, recorder in enumerate(recorders)),
        before=tuple(name.removeprefix(_BEFORE) for name in order if name.startswith(_BEFORE)),
        after=tuple(name for name in order if not name.startswith(_BEFORE)),
    )


_BEFORE = "before "


def _collecting(model: DecoderModel, outputs: list[Tensor]) -> Callable[..., None]:
    """A hook that collects what layers return, which must be hidden states and nothing else."""

    def collect(module: Module, args: object, output: object) -> None:
        if not isinstance(output, Tensor) or output.shape != _input_of(model).shape:
            raise refusal_of(model, f"layer {len(outputs)} returns more than hidden states")
        outputs.append(output)

    return collect


def _noting(name: str, order: list[str], outputs: list[Tensor]) -> Callable[..., None]:
    """A hook that notes whether the module `name` is called before the first layer or after it."""

    def note(module: Module, args: object, output: object) -> None:
        order.append(name if outputs else _BEFORE + name)

    return note


def _run(model: DecoderModel) -> None:
    config = model.base.config
    before = config._experts_implementation
    config._attn_implementation, config._experts_implementation = PROBED_ATTENTION, PROBED_ATTENTION
    try:
        with torch.inference_mode():
            model.base(
                inputs_embeds=_input_of(model),
                position_ids=torch.arange(_NUM_TOKENS, device="meta")[None],
                attention_mask=torch.ones(1, _NUM_TOKENS, dtype=torch.int64, device="meta"),
                use_cache=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # any code of any family
        reason = str(error).splitlines()[0] if str(error) else ""
        raise refusal_of(model, f"its layers cannot be examined: {type(error).__name__}: {reason}") from error
    finally:
        config._attn_implementation, config._experts_implementation = ATTENTION, before


def _compute_on_host(model: DecoderModel, module: Module, stack: ExitStack) -> None:
    """Give `module`, such as rotary embeddings, real values: it may decide by them."""
    compute_buffers(model, module, torch.device("cpu"))

    def to_host(value: object) -> object:
        if not isinstance(value, Tensor) or value.device.type != "meta":
            return value
        if value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype)
        return torch.arange(value.numel()).view(value.shape)

    def before(_: Module, args: Any, keywords: Any) -> Any:
        return tuple(map(to_host, args)), {name: to_host(value) for name, value in keywords.items()}

    def after(_: Module, args: Any, output: Any) -> Any:
        return output.to("meta") if isinstance(output, Tensor) else tuple(part.to("meta") for part in output)

    for hook in (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ):
        stack.callback(hook.remove)


def _input_of(model: DecoderModel) -> Tensor:
    config = model.base.config
    return torch.empty(1, _NUM_TOKENS, config.hidden_size, dtype=model.base.dtype, device="meta")


def _only_call(model: DecoderModel, layer: int, recorder: _Recorder) -> Attention:
    if len(recorder.calls) != 1:
        raise refusal_of(
            model,
            f"layer {layer} calls transformers' attention interface {len(recorder.calls)} times, not once",
        )
    return recorder.calls[0].mixer


def _unexpert(module: Module, hidden_states: Tensor, *chosen: Tensor) -> Tensor:
    """Which experts are chosen depends on values, which the meta device has not."""
    return torch.empty_like(hidden_states)


ExpertsInterface.register(PROBED_ATTENTION, _unexpert)


def examine(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[DecoderModel, Probed]:
    """Build the model of a checkpoint without weights, and compare its layers with the plan.

    Raises UnsupportedModel for a model that transformers' layers cannot serve.
    """
    model = empty_model(checkpoint.directory, dtype)
    found = probe(model)
    check_plan(model, found.mixers, checkpoint.config)
    return model, found


def check_plan(model: DecoderModel, found: tuple[Attention, ...], config: Blueprint) -> None:
    """Raise UnsupportedModel where the layers keep other keys or see other windows than the plan counts."""
    for layer, (mixer, plan) in enumerate(zip(found, config.layers, strict=True)):
        planned = plan.mixer
        if not isinstance(planned, Attention):
            raise refusal_of(model, f"layer {layer}: latents are kept by native layers only")
        kept, counted = mixer.page_shape, planned.page_shape
        if kept != counted:
            raise refusal_of(
                model,
                f"layer {layer} keeps {kept.heads} heads of {kept.width}, its config says {counted.heads} of"
                f" {counted.width}: set num_key_value_heads and head_dim in config.json",
            )
        if mixer.window != planned.window:
            raise refusal_of(
                model,
                f"layer {layer} has window {mixer.window}, its config says {planned.window}: set"
                " sliding_window and layer_types in config.json",
            )
