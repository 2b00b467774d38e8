"""A stage with n-grams on a GPU that does not exist reads rows of their table on the host by a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage_worker.model.kernels import by_triton
from tests.fake_cuda import fake_cuda
from tests.recorded_launches import record_launches
from tests.unit.stage_worker.test_fake_cuda_families import assigned, frames_of, loaded
from wire.frames import Frame

pytestmark = pytest.mark.kernels

FAMILY, LAST = "qwen4_exp_text", 2
NGRAM_KERNELS = ("lookup_kernel", "advance_kernel", "gates_kernel")


def test_a_step_copies_no_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators would copy numbers of rows back, and rows up. Of two layers, one has n-grams."""
    launches = record_launches(monkeypatch)
    assignment = assigned(tmp_path, FAMILY, LAST)
    frames: list[tuple[str, Frame]] = frames_of(assignment, FAMILY)
    with fake_cuda() as copies:
        executor = loaded(assignment, new_kernels=by_triton)
        executor.begin_epoch(1, stage=LAST)
        for kind, frame in frames:
            copies.counts.clear()
            launches.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
            assert [launches.names.count(name) for name in NGRAM_KERNELS] == [1, 1, 1], kind
            assert launches.names.count("convolution_kernel") == 3, kind
