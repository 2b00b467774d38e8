"""Layers of a spare in memory: which ones, that a takeover reads none again, and when they are dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, DType, WeightFormat, stage_weight_bytes
from checkpoint.implementation import Implementation
from stage_worker.assignment import Prefetch, PrefetchedLayers
from stage_worker.backends.backend import LoadCancelled, LoadProgress, OtherCheckpoint, StageLoadError
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.loading.warm_spare import check_warm_spare, choose_parts, drop_warm, keep_warm
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeQueue
from tests.unit.stage_worker.test_reload import LAYERS, assigned

CPU = torch.device("cpu")
RESOURCES = WorkerResources(device=CPU, memory_bytes=1 << 30, model_directory=None)
PINNED_LIMIT = 100 * 1024 * 1024
ON_HOST = replace(RESOURCES, new_copies=lambda _: FakeQueue(), pinned_limit_bytes=PINNED_LIMIT)
"""A device that is a CPU, to which weights are copied like to a GPU."""
FIRST = PrefetchedLayers(layer_begin=0, layer_end=4, has_embeddings=True, has_head=False)
LAST = PrefetchedLayers(layer_begin=4, layer_end=LAYERS, has_embeddings=False, has_head=True)
MUCH = 1 << 30


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_checkpoint(path, "llama", num_layers=LAYERS, tie_word_embeddings=request.param)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each read of weights."""
    preadv, found = os.preadv, list[int]()

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(preadv(descriptor, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    yield found
    found.clear()


def order(directory: Path, *layers: PrefetchedLayers, **changes: Any) -> Prefetch:
    assignment = assigned(directory, 0, LAYERS)
    made = Prefetch(
        model=None,
        layers=layers,
        fingerprint=assignment.fingerprint,
        dtype=assignment.dtype,
        model_directory=assignment.model_directory,
    )
    return replace(made, **changes)


def warmed(
    wanted: Prefetch, limit_bytes: int = MUCH, resources: WorkerResources = RESOURCES
) -> tuple[StageCache, LoadProgress]:
    cache, progress = StageCache(), LoadProgress()
    keep_warm(wanted, resources, progress, cache, limit_bytes=limit_bytes)
    return cache, progress


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("begin", "end"), [(0, 4), (4, LAYERS), (0, LAYERS), (2, 6)])
def test_a_takeover_reads_no_weight_again(
    directory: Path, begin: int, end: int, read_bytes: list[int]
) -> None:
    cache, progress = warmed(order(directory, LAST, FIRST))
    assert sum(read_bytes) == progress.read_bytes > 0
    assert "all layers of 2 of 2 possible re-plans" in progress.fetch_detail
    layers = dict(cache.parts.layers)
    read_bytes.clear()
    taken_over = load_stage(assigned(directory, begin, end), RESOURCES, LoadProgress(), cache)
    assert taken_over.read_bytes == sum(read_bytes) == 0
    assert set(cache.parts.layers) == set(range(begin, end)), "other layers are dropped"
    assert all(cache.parts.layers[layer] is layers[layer] for layer in range(begin, end)), "no second copy"
    load_stage(assigned(directory, begin, end), RESOURCES, LoadProgress(), StageCache())
    assert sum(read_bytes) > 0, "the count notices a read"


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("begin", "end"), [(0, 4), (4, LAYERS), (0, LAYERS), (2, 6)])
def test_a_takeover_of_a_device_copies_from_the_host_and_reads_no_weight(
    directory: Path, begin: int, end: int, read_bytes: list[int]
) -> None:
    cache, progress = warmed(order(directory, LAST, FIRST), resources=ON_HOST)
    assert sum(read_bytes) == progress.read_bytes > 0
    assert "of the host (" in progress.fetch_detail
    assert "pinned), all layers of 2 of 2 possible re-plans" in progress.fetch_detail
    assert not cache.parts.layers and cache.parts.embeddings is None, "the device has none of them"
    read_bytes.clear()
    taken_over = load_stage(assigned(directory, begin, end), ON_HOST, LoadProgress(), cache)
    assert taken_over.read_bytes == sum(read_bytes) == 0
    assert set(cache.parts.layers) == set(range(begin, end))
    assert not cache.parts.on_host, "memory of the host is free again"
    load_stage(assigned(directory, begin, end), ON_HOST, LoadProgress(), StageCache())
    assert sum(read_bytes) > 0, "the count notices a read"


@pytest.mark.matrix(1)
def test_what_is_on_the_host_is_counted_and_kept_while_it_is_wanted(
    directory: Path, read_bytes: list[int]
) -> None:
    cache, _ = warmed(order(directory, LAST, FIRST), resources=ON_HOST)
    held = cache.parts.on_host
    whole = sum(weights.num_bytes for weights in held.values())
    assert (
        whole
        == cache.parts.pinned_bytes
        == load_stage(assigned(directory, 0, LAYERS), RESOURCES).weight_bytes
    )
    read_bytes.clear()
    for wanted, num_layers in ((FIRST, 4), (LAST, LAYERS - 4)):
        keep_warm(order(directory, wanted), ON_HOST, LoadProgress(), cache, limit_bytes=MUCH)
        assert sum(name[0].startswith("model.layers") for name in cache.parts.on_host) == num_layers
        assert bool(read_bytes) is (wanted is LAST), "what was dropped is read again, nothing else"
    drop_warm(ON_HOST, cache)
    assert not cache.parts.on_host and cache.parts.origin is None


@pytest.mark.matrix(1)
def test_layers_on_the_host_in_another_form_are_read_again(directory: Path, read_bytes: list[int]) -> None:
    cache, _ = warmed(order(directory, FIRST), resources=ON_HOST)
    read_bytes.clear()
    wanted = order(directory, FIRST, dtype=DType.BF16)
    keep_warm(wanted, ON_HOST, LoadProgress(), cache, limit_bytes=MUCH)
    assert sum(read_bytes) > 0
    assignment = replace(assigned(directory, 0, 4), dtype=DType.BF16)
    assert load_stage(assignment, ON_HOST, LoadProgress(), cache).read_bytes == 0


@pytest.mark.matrix(1)
def test_a_stage_that_became_a_spare_leaves_its_device(directory: Path, read_bytes: list[int]) -> None:
    cache = StageCache()
    load_stage(assigned(directory, 0, 4), ON_HOST, LoadProgress(), cache)
    keep_warm(order(directory, FIRST), ON_HOST, LoadProgress(), cache, limit_bytes=MUCH)
    assert not cache.parts.layers and len(cache.parts.on_host) >= 4
    read_bytes.clear()
    assert load_stage(assigned(directory, 0, 4), ON_HOST, LoadProgress(), cache).read_bytes == 0


@pytest.mark.matrix(1)
def test_a_takeover_is_cancelled_between_two_copies(directory: Path) -> None:
    cache, _ = warmed(order(directory, LAST), resources=ON_HOST)
    num_parts, progress = len(cache.parts.on_host), LoadProgress()
    progress.expect = lambda _: progress.cancel()  # type: ignore[method-assign]
    with pytest.raises(LoadCancelled):
        load_stage(assigned(directory, 4, LAYERS), ON_HOST, progress, cache)
    assert len(cache.parts.on_host) == num_parts and not cache.parts.layers
    assert load_stage(assigned(directory, 4, LAYERS), ON_HOST, LoadProgress(), cache).read_bytes == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize("resources", [RESOURCES, ON_HOST], ids=["in place", "on the host"])
def test_layers_that_are_not_warm_are_read(directory: Path, resources: WorkerResources) -> None:
    cache, _ = warmed(order(directory, LAST), resources=resources)
    taken_over = load_stage(assigned(directory, 2, LAYERS), resources, LoadProgress(), cache)
    alone = load_stage(assigned(directory, 2, 4), RESOURCES, LoadProgress(), StageCache())
    assert taken_over.read_bytes == alone.read_bytes > 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "changes",
    [{"dtype": DType.BF16}, {"weights": WeightFormat.INT8}],
    ids=["dtype", "weight format"],
)
@pytest.mark.parametrize("resources", [RESOURCES, ON_HOST], ids=["in place", "on the host"])
def test_layers_in_another_form_are_not_used(
    directory: Path, changes: dict[str, Any], resources: WorkerResources
) -> None:
    cache, _ = warmed(order(directory, FIRST), resources=resources)
    assignment = replace(assigned(directory, 0, 4), **changes)
    assert load_stage(assignment, resources, LoadProgress(), cache).read_bytes > 0
    cache, _ = warmed(order(directory, FIRST, **changes), resources=resources)
    assert load_stage(assignment, resources, LoadProgress(), cache).read_bytes == 0


def test_layers_of_changed_files_are_not_used(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=LAYERS)
    cache, _ = warmed(order(directory, FIRST))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes())
    assert load_stage(assigned(directory, 0, 4), RESOURCES, LoadProgress(), cache).read_bytes > 0


@pytest.mark.matrix(1)
def test_another_checkpoint_is_refused_and_frees_the_memory(directory: Path) -> None:
    cache, progress = warmed(order(directory, FIRST))
    wanted = order(directory, FIRST, fingerprint="1-2-3")
    with pytest.raises(OtherCheckpoint, match="expected 1-2-3"):
        keep_warm(wanted, RESOURCES, progress, cache, limit_bytes=MUCH)
    assert cache.parts.origin is None and not cache.parts.layers


@pytest.mark.matrix(1)
def test_other_plans_free_what_they_do_not_want(directory: Path, read_bytes: list[int]) -> None:
    cache, progress = warmed(order(directory, LAST, FIRST))
    read_bytes.clear()
    keep_warm(order(directory, FIRST), RESOURCES, progress, cache, limit_bytes=MUCH)
    assert set(cache.parts.layers) == set(range(4)) and cache.parts.final_norm is None
    assert not read_bytes
    drop_warm(RESOURCES, cache)
    assert cache.parts.origin is None and not cache.parts.layers


def test_the_limit_cuts_behind_the_most_needed_layers(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    config, dtype = checkpoint.config, assigned(directory, 0, LAYERS).dtype

    def size(begin: int, end: int, *, has_embeddings: bool = False, has_head: bool = False) -> int:
        return stage_weight_bytes(config, dtype, begin, end, has_embeddings=has_embeddings, has_head=has_head)

    last = size(4, LAYERS, has_head=True)
    whole = size(0, LAYERS, has_embeddings=True, has_head=True)
    for limit, layers, num_complete in (
        (whole, range(LAYERS), 2),
        (whole - 1, [*range(4 - config.tie_word_embeddings), *range(4, LAYERS)], 1),
        (last, range(4, LAYERS), 1),
        (last - 1, range(4, LAYERS), 0),
        (size(4, 6), range(4, 6), 0),
    ):
        warm = choose_parts(config, dtype, [LAST, FIRST], limit_bytes=limit)
        assert warm is not None and (warm.num_bytes <= limit, warm.num_complete) == (True, num_complete)
        assert list(warm.needed.layers) == list(layers)
    assert warm.num_bytes == size(4, 6)
    assert choose_parts(config, dtype, [LAST], limit_bytes=size(4, 5) - 1) is None


def test_a_limit_below_one_layer_keeps_nothing(directory: Path) -> None:
    cache, progress = warmed(order(directory, LAST), limit_bytes=10)
    assert progress.fetch_detail == "no layer is kept in memory: --warm-spare is 10 B"
    assert cache.parts.origin is None


class _Cancelled(LoadProgress):
    """Cancelled once it has read some bytes."""

    def advance(self, num_bytes: int) -> None:
        if self.read_bytes > 300_000:
            self.cancel()
        super().advance(num_bytes)


@pytest.mark.matrix(1)
def test_a_takeover_uses_what_was_read_before_it(directory: Path) -> None:
    cache = StageCache()
    with pytest.raises(LoadCancelled):
        keep_warm(order(directory, LAST), RESOURCES, _Cancelled(), cache, limit_bytes=MUCH)
    kept = set(cache.parts.layers)
    assert kept and kept < set(range(4, LAYERS))
    load_stage(assigned(directory, 4, LAYERS), RESOURCES, LoadProgress(), cache)
    assert set(cache.parts.layers) == set(range(4, LAYERS))


def test_what_was_cancelled_before_it_began_leaves_a_loaded_stage(directory: Path) -> None:
    cache, progress = StageCache(), LoadProgress()
    load_stage(assigned(directory, 0, 4), RESOURCES, LoadProgress(), cache)
    compute = cache._compute
    progress.cancel()
    with pytest.raises(LoadCancelled):
        keep_warm(order(directory, LAST), RESOURCES, progress, cache, limit_bytes=MUCH)
    assert compute is not None and cache._compute is compute
    assert set(cache.parts.layers) == set(range(4))


@pytest.mark.matrix(1)
def test_layers_of_transformers_are_not_kept(directory: Path) -> None:
    wanted = order(directory, LAST, implementation=Implementation.TRANSFORMERS)
    with pytest.raises(StageLoadError, match="layers of transformers are not kept"):
        warmed(wanted)


def test_a_limit_above_the_budget_or_above_the_host_of_a_gpu_is_refused() -> None:
    check_warm_spare(10, 10, CPU)
    with pytest.raises(ValueError, match="--warm-spare is 11 bytes, of a budget of 10: lower it"):
        check_warm_spare(11, 10, CPU)
    gpu = torch.device("cuda:1")
    check_warm_spare(11, 10, gpu)
    with pytest.raises(ValueError, match=r"of memory of the host, which has \d+: lower it"):
        check_warm_spare(1 << 60, 10, gpu)
