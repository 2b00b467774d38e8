"""Reads a stage's tensors into transformers' modules, through transformers' own conversions of names.

One part is read at a time, a layer or a tensor outside the layers, in the dtype of its file. Conversion to
the run dtype copies it once: at most one part is in memory twice, without stacked experts, which are read
where they stay. Parts that an earlier load has read are put into the new modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from checkpoint import Blueprint, Checkpoint, MissingTensor, UnexpectedTensor, WrongShape, stage_tensor_shapes
from checkpoint.dtypes import DType
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.weight_reads import DeviceCopies, WeightReads
from stage_worker.model.weights import ReadProgress, load_tensors
from transformers_stage.empty_model import DecoderModel, compute_buffers, is_buffer_owner, refusal_of
from transformers_stage.expert_places import ExpertPlaces


@dataclass(frozen=True, slots=True)
class StagePart:
    """Tensors of a layer (its number), or one outside the layers (None), by their names in files."""

    layer: int | None
    tensors: tuple[str, ...]


def stage_parts(config: Blueprint, layers: range, *, has_embeddings: bool, has_head: bool) -> list[StagePart]:
    """The parts of a stage, each with all of its tensors."""
    parts = []
    known: set[str] = set()
    for layer in layers:
        names = stage_tensor_shapes(config, layer, layer + 1, has_embeddings=False, has_head=False)
        parts.append(StagePart(layer, tuple(names)))
        known |= names.keys()
    every = stage_tensor_shapes(
        config, layers.start, layers.stop, has_embeddings=has_embeddings, has_head=has_head
    )
    return [*(StagePart(None, (name,)) for name in every if name not in known), *parts]


KeptModules = dict[tuple[str, ...], Mapping[str, Tensor]]
"""Parameters and buffers of parts that are loaded, by the part's tensors and then by transformers' names."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Tensors of a part that are in their places, and the parameters that they fill, by name."""

    tensors: frozenset[str]
    values: dict[str, Tensor]


class WeightReader:
    """Fills the modules of one stage in `model`, whose other modules were removed."""

    def __init__(
        self, model: DecoderModel, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._causal, self._checkpoint = model, model.causal, checkpoint
        self._model_type = checkpoint.config.model_type
        self._dtype, self._device = dtype, device
        self._missing: set[str] = set(model.causal.state_dict())
        self._places = ExpertPlaces(model.causal, dtype=dtype, device=device)

    def read(
        self,
        parts: Iterable[StagePart],
        kept: KeptModules,
        progress: ReadProgress,
        copies: DeviceCopies | None = None,
    ) -> None:
        """Fill the modules from `kept` parts, read the others, which `kept` then has, and compute buffers.

        Stacks of experts reach a device by `copies`, which is None for a CPU.

        Raises MissingTensor, UnexpectedTensor and WrongShape by transformers' names, and like `load_tensors`;
        `kept` has the complete parts then.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with WeightReads() as reads, WeightReads(copies) as placed_reads:
            for part in parts:
                if (values := kept.get(part.tensors)) is None:
                    placed = self._read_stacks(part, placed_reads, progress)
                    kept[part.tensors] = placed.values | self._read_others(part, placed, reads, progress)
                else:
                    self._restore(values)
        self._tie()
        if self._missing:
            raise MissingTensor(f"checkpoint lacks {_listed(self._missing)} of {self._model_type}")
        for module in self._causal.modules():
            if is_buffer_owner(module):
                compute_buffers(self._model, module, self._device)

    def _restore(self, values: Mapping[str, Tensor]) -> None:
        for name in values.keys() & self._missing:
            _put(self._causal, name, values[name])
        self._missing -= values.keys()

    def _read_stacks(self, part: StagePart, reads: WeightReads, progress: ReadProgress) -> _Placed:
        """Read tensors of experts into their places in the stacks of all experts."""
        checkpoint = self._checkpoint
        shapes = {self._plain(name): checkpoint.shape_of(name) for name in part.tensors}
        stacks = self._places.stacks(shapes)
        destinations = {
            name: place for stack in stacks.values() for name, place in stack.destinations().items()
        }
        own = {
            name: destinations[plain] for name in part.tensors if (plain := self._plain(name)) in destinations
        }
        load_tensors(checkpoint, own, reads=reads, progress=progress)
        for name, stack in stacks.items():
            _put(self._causal, name, stack.parameter)
            self._missing.discard(name)
        return _Placed(frozenset(own), {name: stack.parameter for name, stack in stacks.items()})

    def _read_others(
        self, part: StagePart, placed: _Placed, reads: WeightReads, progress: ReadProgress
    ) -> dict[str, Tensor]:
        """Read the other tensors of a part, and return what they have filled."""
        checkpoint = self._checkpoint
        tensors = {
            name: torch.empty(checkpoint.shape_of(name), dtype=self._stored(name))
            for name in part.tensors
            if name not in placed.tensors
        }
        load_tensors(checkpoint, tensors, reads=reads, progress=progress)
        named = {self._plain(name): tensor for name, tensor in tensors.items()}
        del tensors
        return self._convert(named)

    def _convert(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Let transformers convert tensors by their names, and put them into modules."""
        causal = self._causal
        info, _ = convert_and_load_state_dict_in_model(
            causal,
            named,
            LoadStateDictConfig(
                dtype=self._dtype,
                dtype_plan=causal._get_dtype_plan(self._dtype),
                device_map={"": self._device},
                weight_mapping=cast("Any", get_model_conversion_mapping(causal)),
            ),
        )
        if info.conversion_errors:
            raise refusal_of(self._model, next(iter(info.conversion_errors.values())))
        if info.mismatched_keys:
            name, got, expected = min(info.mismatched_keys)
            raise WrongShape(
                f"tensor {name} has shape {tuple(got)}, {self._model_type} requires {tuple(expected)}"
            )
        if info.unexpected_keys:
            raise UnexpectedTensor(
                f"checkpoint has {_listed(info.unexpected_keys)}, unknown to {self._model_type}"
            )
        filled = self._missing - info.missing_keys
        self._missing -= filled
        return {name: _value(causal, name) for name in filled}

    def _stored(self, name: str) -> torch.dtype:
        """The dtype of the file; quantised tensors are unpacked to the run dtype."""
        if name in self._checkpoint.packed:
            return self._dtype
        dtype = self._checkpoint.tensors[name].dtype
        assert isinstance(dtype, DType), "a plain tensor"
        return TORCH_DTYPES[dtype]

    def _plain(self, name: str) -> str:
        """The name in a checkpoint of the text model alone."""
        config = self._checkpoint.config
        if not config.has_row:
            return name
        if name == config.names.head:
            return "lm_head.weight"
        return f"model.{name.removeprefix(config.names.prefix)}"

    def _tie(self) -> None:
        """Let a head without a tensor of its own use the embeddings."""
        causal = self._causal
        tied = causal.all_tied_weights_keys
        for target, source in tied.items():
            if target in self._missing and source not in self._missing:
                _put(causal, target, causal.get_parameter(source))
                self._missing.discard(target)


def _value(model: Module, name: str) -> Tensor:
    """A parameter or buffer."""
    path, _, own = name.rpartition(".")
    value: Tensor = getattr(model.get_submodule(path), own)
    return value


def _put(model: Module, name: str, value: Tensor) -> None:
    path, _, parameter = name.rpartition(".")
    setattr(model.get_submodule(path), parameter, value)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 5} more tensors" if len(shown) > 5 else ""
    return ", ".join(shown[:5]) + more
