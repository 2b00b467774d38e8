"""Where the reference of a self-check comes from, and how long it is kept."""

from __future__ import annotations

import asyncio
import logging
import stat
from array import array
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.cluster import self_check_references
from coordinator.cluster.self_check_references import (
    ReferenceQuestion,
    References,
    ReferenceSource,
)
from coordinator.cluster.self_check_verdict import NoReference
from coordinator.model import ServedModel, open_model
from stageline_rpc.v1 import stage_pb2
from tests.unit.coordinator.cluster.test_self_check import config
from wire.reference import (
    NUM_TEXTS,
    NUM_TOP,
    STATE_WIDTH,
    LayerReference,
    Reference,
    TextReference,
    check_text,
    encode_reference,
)
from wire.reference_file import read_references
from wire.steps import TokenLogprobs
from wire.wire_dtypes import ScaledDType

ROW = TokenLogprobs(7, -3.0, 0, ((1, -0.5), (2, -1.5)))
SOURCES = (ReferenceSource("small", "small:1", 10), ReferenceSource("large", "large:1", 20))
NUM_LAYERS = 2
QUESTION = ReferenceQuestion(DType.F32, DType.F32, ((3, 7), (4, 5, 6)))


def reference_of(texts: tuple[tuple[int, ...], ...]) -> Reference:
    num_tokens = sum(map(len, texts))
    layer = LayerReference(array("f", [1.0] * num_tokens * STATE_WIDTH), 0.25)
    found = tuple(TextReference(text, (ROW,) * len(text)) for text in texts)
    return Reference(found, (layer,) * NUM_LAYERS, 2.0, 0.5)


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    model = open_model(config())
    return replace(
        model, is_builtin=False, directory=tmp_path, config=replace(model.config, num_layers=NUM_LAYERS)
    )


class Workers:
    """Answers for every worker but `refusing`; those that are `held` wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusing: str = "") -> None:
        self.asked: list[str] = []
        self.is_held = asyncio.Event()
        self.is_held.set()
        self._refusing = refusing
        monkeypatch.setattr(self_check_references, "compute_reference", self._compute)

    async def _compute(
        self, address: str, request: stage_pb2.ReferenceRequest, *, timeout_s: float
    ) -> stage_pb2.ReferenceResponse:
        name = address.partition(":")[0]
        self.asked.append(name)
        assert request.num_top == NUM_TOP
        await self.is_held.wait()
        if name == self._refusing:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "too large"
            )
        return encode_reference(reference_of(tuple(tuple(text.tokens) for text in request.texts)))


async def test_the_worker_with_the_most_free_memory_is_asked_once(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served)
    for _ in range(2):
        known = await references.get(QUESTION, SOURCES)
    assert known.origin == "the reference of worker large"
    assert known.reference == reference_of(QUESTION.texts)
    assert workers.asked == ["large"]
    await references.get(replace(QUESTION, dtype=DType.BF16, wire_dtype=ScaledDType.I8), SOURCES)
    assert workers.asked == ["large", "large"]


async def test_a_reference_of_longer_texts_holds_for_shorter_ones(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served)
    await references.get(QUESTION, SOURCES)
    await references.get(replace(QUESTION, texts=((3,), (4, 5))), SOURCES)
    assert workers.asked == ["large"]
    await references.get(replace(QUESTION, texts=((3, 7, 9), (4, 5, 6))), SOURCES)
    assert workers.asked == ["large", "large"]


async def test_another_worker_is_asked_when_one_refuses(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(monkeypatch, refusing="large")
    known = await References(served).get(QUESTION, SOURCES)
    assert known.origin == "the reference of worker small"
    assert workers.asked == ["large", "small"]


async def test_a_refusal_by_all_says_what_each_said_and_is_not_kept(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References(served)
    Workers(monkeypatch, refusing="large")
    with pytest.raises(NoReference, match=r"^worker large: too large$"):
        await references.get(QUESTION, SOURCES[1:])
    with pytest.raises(NoReference, match=r"^no worker can be asked$"):
        await references.get(QUESTION, ())
    Workers(monkeypatch)
    assert (await references.get(QUESTION, SOURCES)).origin == "the reference of worker large"


async def test_a_reference_of_another_model_is_a_refusal(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Workers(monkeypatch)
    other = replace(served, config=replace(served.config, num_layers=3))
    with pytest.raises(NoReference, match="worker large: a reference of 2 layers"):
        await References(other).get(QUESTION, SOURCES[1:])


async def test_what_takes_too_long_goes_on_and_is_there_later(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served, wait_s=0.01)
    workers.is_held.clear()
    for _ in range(2):
        with pytest.raises(NoReference, match=r"within 0\.01 s, and still is being computed$"):
            await references.get(QUESTION, SOURCES)
    assert workers.asked == ["large"] and not references.has(QUESTION)
    workers.is_held.set()
    while not references.has(QUESTION):
        await asyncio.sleep(0)
    assert (await references.get(QUESTION, ())).worker == "large"


async def test_a_reference_that_failed_a_plan_comes_from_another_worker_next(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served)
    await references.get(QUESTION, SOURCES)
    references.distrust(QUESTION)
    await references.get(QUESTION, SOURCES)
    assert workers.asked == ["large", "small"]


async def test_a_confirmed_reference_is_kept_for_the_next_coordinator(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers = Workers(monkeypatch)
    first = References(served, cache_directory=tmp_path / "cache")
    await first.get(QUESTION, SOURCES)
    assert not (tmp_path / "cache").exists(), "before a plan has passed, nothing is kept"
    await first.confirm(QUESTION)
    first.distrust(QUESTION)
    assert (await first.get(QUESTION, SOURCES)).origin == "the reference of worker large"
    (file,) = (tmp_path / "cache" / "references").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = References(served, cache_directory=tmp_path / "cache")
    known = await second.get(QUESTION, SOURCES)
    assert (known.origin, known.reference) == ("the kept reference", reference_of(QUESTION.texts))
    assert workers.asked == ["large"]
    other = References(replace(served, fingerprint="another"), cache_directory=tmp_path / "cache")
    await other.get(QUESTION, SOURCES)
    assert workers.asked == ["large", "large"]


@pytest.mark.parametrize("spoil", [b"", b"{", b"[1]", b'{"version": 2}', None])
async def test_a_corrupt_file_is_computed_again_with_a_line_in_the_log(
    served: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: bytes | None,
) -> None:
    workers = Workers(monkeypatch)
    for _ in range(2):
        references = References(served, cache_directory=tmp_path)
        await references.get(QUESTION, SOURCES)
        await references.confirm(QUESTION)
    assert workers.asked == ["large"]
    (file,) = (tmp_path / "references").iterdir()
    # One character of the data, which no longer matches its checksum.
    file.write_bytes(file.read_bytes().replace(b'"data": "A', b'"data": "B') if spoil is None else spoil)
    if spoil is None:
        text = file.read_text()
        place = text.index('"data": "') + 20
        file.write_text(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
    references = References(served, cache_directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        await references.get(QUESTION, SOURCES)
        await references.confirm(QUESTION)
    assert workers.asked == ["large", "large"]
    assert "the kept reference is not used" in caplog.text
    assert read_references(file, served.fingerprint).keys() == {"f32"}


async def test_a_cache_that_cannot_be_written_is_done_without(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Workers(monkeypatch)
    (tmp_path / "file").write_text("")
    references = References(served, cache_directory=tmp_path / "file")
    for _ in range(2):
        await references.get(QUESTION, SOURCES)
        with caplog.at_level(logging.WARNING):
            await references.confirm(QUESTION)
    assert caplog.text.count("is not kept for the next start") == 1


async def test_what_is_recorded_is_for_the_built_in_model_and_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(monkeypatch)
    model = open_model(config())
    texts = tuple(check_text(number, 20, model.config.vocab_size) for number in range(NUM_TEXTS))
    for dtype in DType:
        question = ReferenceQuestion(dtype, dtype, texts)
        assert (await References(model).get(question, ())).origin == "the recorded reference"
    assert workers.asked == []
    assert read_references(SELF_CHECK_FILE, "another") == {}
    with pytest.raises(NoReference):
        await References(replace(model, is_builtin=False)).get(question, ())
