"""Places of experts' tensors in stacked parameters, so that they are read into them and not copied.

transformers stacks matrices of experts, and then gates and ups side by side: with the tensors of a file, a
layer of experts would be in memory up to three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A parameter [experts, rows, columns], and rows [begin, end) of an expert for each tensor."""

    parameter: Parameter
    places: Mapping[str, tuple[int, int, int]]

    def destinations(self) -> dict[str, Tensor]:
        """The part of the parameter for each tensor."""
        return {name: self.parameter[expert, begin:end] for name, (expert, begin, end) in self.places.items()}


class ExpertPlaces:
    """Finds tensors that transformers only stacks, by its own conversions."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> None:
        """`model` has the modules that are going to be filled, which run in `dtype`."""
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        stacks = [one for one in self._converters if _only_stacks(one)]
        self._patterns = {pattern: one.source_patterns for one in stacks for pattern in one.source_patterns}
        self._state, self._prefix = model.state_dict(), model.base_model_prefix
        self._dtype, self._device = dtype, device
        others = list(model._get_dtype_plan(dtype))
        self._of_other_dtype = build_glob_alternation(others)[0] if others else None

    def stacks(self, tensors: Mapping[str, Shape]) -> dict[str, StackedExperts]:
        """Parameters, by name, that consist of tensors with these names and shapes; they are allocated."""
        found: dict[str, dict[str, list[str]]] = {}
        for name in sorted(tensors, key=dot_natural_key) if self._patterns else ():
            target, pattern = rename_source_key(
                name, self._renamings, self._converters, self._prefix, self._state
            )
            if pattern in self._patterns and target in self._state:
                found.setdefault(target, {}).setdefault(pattern, []).append(name)
        stacks: dict[str, StackedExperts] = {}
        for target, by_pattern in found.items():
            order = self._patterns[next(iter(by_pattern))]
            parts = [by_pattern[pattern] for pattern in order if pattern in by_pattern]
            shape, places = tuple(self._state[target].shape), _places(parts, tensors)
            is_whole = len(parts) == len(order) and _stacked_shape(parts, tensors) == shape
            if is_whole and not (self._of_other_dtype and self._of_other_dtype.search(target)):
                values = torch.empty(shape, dtype=self._dtype, device=self._device)
                stacks[target] = StackedExperts(Parameter(values, requires_grad=False), places)
        return stacks


def _only_stacks(converter: WeightConverter) -> bool:
    """Whether it stacks the tensors of a pattern, and then puts the stacks of several side by side."""
    stack, *others = converter.operations
    if not (type(stack) is MergeModulelist and stack.dim == 0 and len(converter.target_patterns) == 1):
        return False
    is_one = not others and len(converter.source_patterns) == 1
    return is_one or (len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1)


def _stacked_shape(parts: Iterable[list[str]], tensors: Mapping[str, Shape]) -> Shape | None:
    """The shape of the stack; None for tensors that cannot be stacked."""
    rows, counts, columns = 0, set(), set()
    for names in parts:
        shapes = {tensors[name] for name in names}
        if len(shapes) != 1 or len(shape := shapes.pop()) != 2:
            return None
        rows += shape[0]
        counts.add(len(names))
        columns.add(shape[1])
    return (counts.pop(), rows, columns.pop()) if len(counts) == len(columns) == 1 else None


def _places(parts: Iterable[list[str]], tensors: Mapping[str, Shape]) -> dict[str, tuple[int, int, int]]:
    places: dict[str, tuple[int, int, int]] = {}
    begin = 0
    for names in parts:
        rows = math.prod(tensors[names[0]][:1])
        places |= {name: (expert, begin, begin + rows) for expert, name in enumerate(names)}
        begin += rows
    return places
