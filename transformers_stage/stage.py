"""A stage computed by transformers' own modules.

The model runs as transformers runs it, with other layers in its list. The list has a module for each layer
of the whole model, as families choose masks and rotations by a layer's place: `_Skipped` for layers of other
stages. What the model does to embeddings before its first layer, and to hidden states after its last one,
stays in its own code:

* `embed`: no layer computes, and the first one takes down its input;
* `forward`: the stage's layers compute, and the first of them starts from the hidden states received;
* `logits`: no layer computes, and the last one hands the hidden states on to norm and head.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from checkpoint import Blueprint, Checkpoint, DType, UnsupportedModel
from checkpoint.implementation import Implementation
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable
from stage_worker.model.kernels import PLAIN, PRODUCTS
from stage_worker.model.operations import operations
from stage_worker.model.parts import LoadedParts, PartsRead, Prepare, nothing_to_prepare
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_layout import PagedLayers, StepLayout
from stage_worker.model.weight_reads import DeviceCopies
from stage_worker.model.weights import NO_PROGRESS, ReadProgress
from transformers_stage.attention import CurrentStep, PagedAttention, put_attention
from transformers_stage.empty_model import DecoderModel, refusal_of
from transformers_stage.probe import Probed, examine
from transformers_stage.row_check import check_rows
from transformers_stage.weights import StagePart, WeightReader, stage_parts


class _Passing:
    """Hidden states [1, n, hidden_size] that a list of layers is given, and those that it leaves."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.taken: Tensor | None = None

    def take(self) -> Tensor:
        """What was left, [n, hidden_size]."""
        found, self.given, self.taken = self.taken, None, None
        assert found is not None, "no layer was computed"
        return found[0]


class _Skipped(Module):
    """In the place of a layer of another stage: returns its input. Has the plain attributes of the layer."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return hidden_states


class _Taking(_Skipped):
    """Leaves its input in `passing`."""

    def __init__(self, layer: Module, passing: _Passing) -> None:
        super().__init__(layer)
        self._passing = passing

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        self._passing.taken = hidden_states
        return hidden_states


class _Giving(_Skipped):
    """Returns what `passing` was given."""

    def __init__(self, layer: Module, passing: _Passing) -> None:
        super().__init__(layer)
        self._passing = passing

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        assert self._passing.given is not None, "no hidden states"
        return self._passing.given


class _Lists:
    """The lists of layers that a stage's model runs with."""

    def __init__(self, model: DecoderModel, own: range, passing: _Passing) -> None:
        skipped = [_Skipped(layer) for layer in model.layers]
        first, last = model.layers[0], model.layers[-1]
        self.entering = ModuleList([_Taking(first, passing), *skipped[1:]])
        self.leaving = ModuleList([*skipped[:-1], _Giving(last, passing)])
        self.computing = ModuleList(
            [layer if index in own else skipped[index] for index, layer in enumerate(model.layers)]
        )

        def begin(_: Module, args: Any, keywords: Any) -> Any:
            assert passing.given is not None, "no hidden states"
            if args:
                return (passing.given, *args[1:]), keywords
            return args, keywords | {"hidden_states": passing.given}

        def end(_: Module, args: Any, output: Tensor) -> None:
            passing.taken = output

        self.computing[own.start].register_forward_pre_hook(begin, with_kwargs=True)
        self.computing[own.stop - 1].register_forward_hook(end)


class TransformersStage(PipelineStage):
    """Layers [layer_begin, layer_end) of any family that transformers' attention interface serves."""

    IMPLEMENTATION: ClassVar[Implementation] = Implementation.TRANSFORMERS

    def __init__(
        self,
        config: Blueprint,
        *,
        layer_begin: int,
        layer_end: int,
        has_embeddings: bool,
        has_head: bool,
        dtype: DType,
        device: torch.device | str = "cpu",
        choice: KernelChoice = KernelChoice.AUTO,
    ) -> None:
        """Describe the stage; `load` fills it. Raises ValueError for bad layers, and KernelsUnavailable."""
        if choice is KernelChoice.COMPILED:
            raise KernelsUnavailable("--kernels compiled is not possible: transformers computes the layers")
        super().__init__(
            config,
            layer_begin=layer_begin,
            layer_end=layer_end,
            has_embeddings=has_embeddings,
            has_head=has_head,
            dtype=dtype,
            device=device,
            kernels=PLAIN,
            ropes={},
        )
        if config.weight_format is not None:
            raise UnsupportedModel(
                f"--quantize {config.weight_format.value} is for native layers, transformers computes these"
            )
        self._step, self._passing = CurrentStep(), _Passing()
        # Prompts are scored on another thread than steps are begun, and the modules have state.
        self._turn = Lock()
        self._model: DecoderModel | None = None
        self._lists: _Lists | None = None

    @torch.inference_mode()
    def load(
        self,
        checkpoint: Checkpoint,
        *,
        parts: LoadedParts | None = None,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
        copies: DeviceCopies | None = None,
    ) -> PartsRead:
        """Build transformers' modules of this stage, and read the tensors that are missing in `parts`.

        transformers moves them to the device, but for experts that it stacks.

        Raises like `PipelineStage.load`, and UnsupportedModel for layers that cannot be cut or cached.
        """
        self._check_config(checkpoint)
        parts = LoadedParts() if parts is None else parts
        model, found = examine(checkpoint, self.torch_dtype)
        if any(mixer.softcap is not None or mixer.has_sinks for mixer in found.mixers):
            self.kernels = PRODUCTS
        self._cut(model, found)
        report = self._read(model, checkpoint, parts, progress, prepare, copies)
        self._model = model
        check_rows(self, model, self.compute)
        self._check_embeddings(model)
        return report

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.has_embeddings, "embed() on a stage without embeddings"
        self._check_ids(token_ids)
        return self._embedded(token_ids.to(self.device), 0)

    def _embedded(self, token_ids: Tensor, position: int) -> Tensor:
        model, lists = self._loaded()
        positions = torch.full_like(token_ids, position)[None]
        with self._turn:
            model.place_layers(lists.entering)
            model.base(input_ids=token_ids[None], position_ids=positions, use_cache=False)
            return self._passing.take()

    def _check_embeddings(self, model: DecoderModel) -> None:
        """Raise UnsupportedModel for embeddings that depend on positions."""
        if self.has_embeddings:
            ids = torch.zeros(1, dtype=torch.int64, device=self.device)
            first, later = (self._embedded(ids, position).nan_to_num() for position in (0, 1))
            if not torch.equal(first, later):
                raise refusal_of(model, "embeddings depend on positions")

    @torch.inference_mode()
    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedLayers) -> Tensor:
        self._check_input(hidden, step)
        for layout, part in zip(step.groups, pages.groups, strict=True):
            if layout.writes.begun is not None:
                part.clear(layout.writes.begun)
        return self.compute(hidden, hidden, step, pages)

    def compute(self, embedded: Tensor, hidden: Tensor, step: StepLayout, pages: PagedLayers) -> Tensor:
        """`forward`, where the model takes `embedded` for the embeddings."""
        model, lists = self._loaded()
        with self._turn:
            self._step.layout, self._step.pages, self._passing.given = step, pages, hidden[None]
            model.place_layers(lists.computing)
            try:
                model.base(inputs_embeds=embedded[None], position_ids=step.positions[None], use_cache=False)
            finally:
                self._step.layout = self._step.pages = None
            return self._passing.take()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        model, lists = self._loaded()
        assert self.has_head, "logits() on a stage without output head"
        positions = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
        with self._turn:
            self._passing.given = hidden[None]
            model.place_layers(lists.leaving)
            output = model.causal(inputs_embeds=hidden[None], position_ids=positions, use_cache=False)
            self._passing.given = None
        logits: Tensor = output.logits[0]
        return logits.to(torch.float32)

    def _cut(self, model: DecoderModel, found: Probed) -> None:
        """Remove the modules of other stages, and let ours attend over the pages."""
        compute = operations(self.kernels)
        for index, layer in enumerate(self.layers):
            attention = PagedAttention(index, found.mixers[layer], self._step, compute)
            put_attention(model.layers[layer], attention)
        self._lists = _Lists(model, self.layers, self._passing)
        model.place_layers(self._lists.computing)
        is_tied = self.has_head and self.config.tie_word_embeddings
        model.drop_ends(
            [] if self.has_embeddings else found.before,
            [] if self.has_head else found.after,
            keeps_embeddings=self.has_embeddings or is_tied,
            keeps_head=self.has_head,
        )

    def _read(
        self,
        model: DecoderModel,
        checkpoint: Checkpoint,
        parts: LoadedParts,
        progress: ReadProgress,
        prepare: Prepare,
        copies: DeviceCopies | None,
    ) -> PartsRead:
        """Drop parts that the stage does not need, and read those that it lacks."""
        needed = stage_parts(
            self.config, self.layers, has_embeddings=self.has_embeddings, has_head=self.has_head
        )
        parts.retain_in_modules({part.tensors for part in needed}, self._origin(checkpoint))
        missing = [part for part in needed if part.tensors not in parts.in_modules]
        names = [
            name for part in missing for tensor in part.tensors for name in checkpoint.stored_names(tensor)
        ]
        prepare(names)
        num_bytes = sum(checkpoint.tensors[name].num_bytes for name in names)
        progress.expect(num_bytes)
        reader = WeightReader(model, checkpoint, dtype=self.torch_dtype, device=self.device)
        reader.read(needed, parts.in_modules, progress, copies)
        return _report(needed, missing, num_bytes)

    def _loaded(self) -> tuple[DecoderModel, _Lists]:
        assert self._model is not None and self._lists is not None, "the stage's weights are not loaded"
        return self._model, self._lists


def _report(needed: list[StagePart], missing: list[StagePart], num_bytes: int) -> PartsRead:
    kept = [part for part in needed if part not in missing]
    return PartsRead(
        read_layers=tuple(part.layer for part in missing if part.layer is not None),
        kept_layers=tuple(part.layer for part in kept if part.layer is not None),
        read_others=tuple(part.tensors[0] for part in missing if part.layer is None),
        kept_others=tuple(part.tensors[0] for part in kept if part.layer is None),
        num_bytes=num_bytes,
    )
