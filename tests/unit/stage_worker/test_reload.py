"""What a worker holds in memory while one stage follows another, and when a load does not get to its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, stage_tensor_names
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadCancelled, LoadedStage, LoadProgress, StageLoadError
from stage_worker.backends.contract import HandedOn
from stage_worker.loading import stage_loader
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.model.decoder_layer import DecoderLayer
from stage_worker.sampling.grammar_masks import GrammarMasks
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import Log, new_assignment
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import StageRole

LAYERS = 8
RESOURCES = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 30, model_directory=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=LAYERS)


def assigned(directory: Path, begin: int, end: int) -> Assignment:
    if (begin, end) == (0, LAYERS):
        stage, num_stages = 0, 1
    else:
        stage, num_stages = (0 if begin == 0 else 2 if end == LAYERS else 1), 3
    return replace(
        new_assignment(directory, stage=0),
        stage=stage,
        num_stages=num_stages,
        role=StageRole.of_stage(stage, num_stages),
        layer_begin=begin,
        layer_end=end,
    )


class Worker:
    """Loads one stage after another, and knows of every layer and all pages that are still in memory."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.cache = StageCache()
        self.layers: weakref.WeakSet[DecoderLayer] = weakref.WeakSet()
        self.pages: weakref.WeakSet[KvPages] = weakref.WeakSet()
        self.progress = LoadProgress()
        self.loaded: LoadedStage | None = None
        self.when_reading: Callable[[], None] = lambda: None
        self._watch(DecoderLayer, self.layers, monkeypatch)
        self._watch(KvPages, self.pages, monkeypatch)
        advance = LoadProgress.advance

        def watched(progress: LoadProgress, num_bytes: int) -> None:
            advance(progress, num_bytes)
            if num_bytes:
                self.when_reading()

        monkeypatch.setattr(LoadProgress, "advance", watched)

    def load(self, begin: int, end: int, **changes: object) -> LoadedStage:
        """As StageManager does: without a reference to the stage before."""
        self.loaded = None
        self.progress = LoadProgress()
        assignment = replace(assigned(self.directory, begin, end), **changes)  # type: ignore[arg-type]
        self.loaded = load_stage(assignment, RESOURCES, self.progress, self.cache)
        return self.loaded

    @staticmethod
    def _watch(made: type, seen: weakref.WeakSet[object], monkeypatch: pytest.MonkeyPatch) -> None:
        initialise = made.__init__  # type: ignore[misc]

        def noted(self: object, *args: object, **kwargs: object) -> None:
            initialise(self, *args, **kwargs)
            seen.add(self)

        monkeypatch.setattr(made, "__init__", noted)


@pytest.fixture
def worker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(directory, monkeypatch)


def layer_bytes(directory: Path, count: int) -> int:
    checkpoint = Checkpoint.open(directory)
    names = stage_tensor_names(checkpoint.config, 1, 1 + count, has_embeddings=False, has_head=False)
    return sum(checkpoint.tensors[name].end - checkpoint.tensors[name].begin for name in names)


def test_only_layers_that_moved_are_read(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.load(0, 6)
    caplog.set_level("DEBUG", logger="stage_worker.loading.stage_loader")
    loaded = worker.load(0, 7)
    assert loaded.read_bytes == worker.progress.read_bytes == layer_bytes(worker.directory, 1)
    assert worker.progress.fraction == 1.0
    assert f"layers 6 loaded, 0-5 kept; embeddings kept; read_bytes={loaded.read_bytes}" in caplog.messages
    assert len(worker.layers) == 7


def test_progress_counts_only_read_bytes(worker: Worker) -> None:
    worker.load(1, 6)
    seen: list[float] = []
    worker.when_reading = lambda: seen.append(worker.progress.fraction)
    loaded = worker.load(3, 7)
    assert loaded.read_bytes == layer_bytes(worker.directory, 1)
    assert 0 < seen[0] < 0.5
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    nothing = worker.load(4, 6)
    assert (nothing.read_bytes, worker.progress.fraction) == (0, 1.0)


@pytest.mark.full
def test_pages_and_unneeded_layers_are_freed_before_reading(worker: Worker) -> None:
    worker.load(0, 5)
    held: list[tuple[int, int]] = []
    worker.when_reading = lambda: held.append((len(worker.layers), len(worker.pages)))
    worker.load(3, 7)
    assert held[0] == (2, 0)
    assert max(held) <= (4, 0)
    assert (len(worker.layers), len(worker.pages)) == (4, 1)


def test_pages_are_freed_even_if_a_failed_step_refers_to_the_stage(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="stage_worker.executor")  # records would keep the exception
    loaded = worker.load(0, 5)
    executor = loaded.executor
    executor.begin_epoch(1, stage=0)
    log = Log(loaded.assignment)
    log.begin(1)
    log.add((1, 2, 3))
    step = log.step()

    def fails(*args: object) -> Tensor:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLayer, "forward", fails)
        with pytest.raises(StepFault) as fault:
            executor.run(Frame(step, ()))
    assert fault.value.kind is StepFaultKind.INTERNAL
    del fault
    held: list[tuple[int, int]] = []
    worker.when_reading = lambda: held.append((len(worker.layers), len(worker.pages)))
    worker.load(3, 7)
    assert held[0] == (2, 0)
    with pytest.raises(StepFault):
        executor.run(Frame(step, ()))


def refused(worker: Worker, begin: int, end: int, **changes: object) -> StageLoadError:
    with pytest.raises(StageLoadError) as error:
        worker.load(begin, end, **changes)
    return error.value


@pytest.mark.full
@pytest.mark.parametrize(
    "cause", ["a tensor that cannot be read", "too little memory", "another fingerprint", "the warm-up"]
)
def test_a_load_that_fails_leaves_nothing_in_memory(
    cause: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.load(0, 5)

    def breaks(*args: object, **kwargs: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        match cause:
            case "a tensor that cannot be read":
                pieces = iter(range(12))  # the second layer is under way
                worker.when_reading = lambda: breaks() if next(pieces, None) is None else None
                error = refused(worker, 2, 7)
            case "too little memory":
                error = refused(worker, 2, 7, num_blocks=1 << 24)
            case "another fingerprint":
                error = refused(worker, 2, 7, fingerprint="0" * 32)
            case "the warm-up":
                patched.setattr(stage_loader, "warm_up", breaks)
                error = refused(worker, 2, 7)
    assert not isinstance(error, LoadCancelled)
    del error
    gc.collect()
    assert (len(worker.layers), len(worker.pages)) == (0, 0)
    worker.when_reading = lambda: None
    assert worker.load(1, 3).read_bytes == layer_bytes(worker.directory, 2)


@pytest.mark.full
def test_an_abandoned_load_leaves_whole_layers_for_the_next(worker: Worker) -> None:
    worker.load(1, 4)

    def cancel_within_the_second_layer() -> None:
        if worker.progress.read_bytes > 1.5 * layer_bytes(worker.directory, 1):
            worker.progress.cancel()

    worker.when_reading = cancel_within_the_second_layer
    assert isinstance(refused(worker, 2, 7), LoadCancelled)
    gc.collect()
    assert (len(worker.layers), len(worker.pages)) == (3, 0)
    worker.when_reading = lambda: None
    assert worker.load(2, 6).read_bytes == layer_bytes(worker.directory, 1)
    assert len(worker.layers) == 4


@pytest.mark.full
def test_a_load_of_present_layers_can_be_abandoned(worker: Worker) -> None:
    worker.load(1, 4)
    cancelled = LoadProgress()
    cancelled.cancel()
    with pytest.raises(LoadCancelled, match="load cancelled at"):
        load_stage(assigned(worker.directory, 1, 3), RESOURCES, cancelled, worker.cache)


@pytest.mark.full
def test_changed_files_are_noticed_and_missing_files_are_not(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=LAYERS)
    cache = StageCache()
    assert not cache.is_of(directory), "nothing was loaded"
    load_stage(assigned(directory, 1, 3), RESOURCES, None, cache)
    assert cache.is_of(directory)
    assert cache.is_of(tmp_path / "nowhere")
    make_checkpoint(directory, "llama", num_layers=LAYERS, seed=1)
    assert not cache.is_of(directory)


@pytest.mark.full
def test_tables_of_grammars_are_built_once_for_one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the interpreter, which a worker that recovers has no time for."""
    built: list[GrammarMasks] = []
    load = GrammarMasks.load

    def noted(self: GrammarMasks) -> str | None:
        built.append(self)
        return load(self)

    monkeypatch.setattr(GrammarMasks, "load", noted)
    cache = StageCache()
    num_layers = Checkpoint.open(MODEL_DIRECTORY).config.num_layers
    assignment = replace(
        assigned(MODEL_DIRECTORY, 1, LAYERS), dtype=Checkpoint.open(MODEL_DIRECTORY).config.dtype
    )
    for begin in (1, 2, 1):
        last = replace(assignment, layer_begin=begin, layer_end=num_layers)
        load_stage(last, RESOURCES, None, cache)
    assert len(built) == 1
    middle = replace(assignment, stage=1, role=StageRole.MIDDLE, layer_begin=1, layer_end=num_layers - 1)
    load_stage(middle, RESOURCES, None, cache)
    held = weakref.ref(built.pop())
    gc.collect()
    assert held() is None


@pytest.mark.full
def test_a_stage_of_kept_layers_produces_the_output_of_a_fresh_one(worker: Worker) -> None:
    def hidden(loaded: LoadedStage) -> bytes:
        log = Log(loaded.assignment)
        loaded.executor.begin_epoch(1, stage=0)
        log.begin(1)
        log.add(tuple(range(1, 30)))
        step = log.step()
        output = loaded.executor.run(Frame(step, ()))
        assert isinstance(output, HandedOn)
        return bytes(output.hidden[0].data)

    worker.load(2, 8)
    kept = hidden(worker.load(0, 6))
    fresh = load_stage(assigned(worker.directory, 0, 6), RESOURCES)
    assert kept == hidden(fresh)
