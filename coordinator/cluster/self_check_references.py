"""Where the reference of a self-check comes from: recorded with the built-in model, kept in the user's cache,
or computed by a worker that has the whole checkpoint.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.cluster.self_check_verdict import KnownReference, NoReference
from coordinator.model import ServedModel
from stageline_rpc.v1 import stage_pb2
from wire.reference import NUM_TOP, Reference, Text, decode_reference
from wire.reference_call import compute_reference
from wire.reference_file import read_references, reference_key, write_references
from wire.tensors import DTYPE_TO_MESSAGE
from wire.wire_dtypes import WIRE_DTYPE_TO_MESSAGE, WireDType

log = logging.getLogger(__name__)

WAIT_S = 120.0
"""Plans wait so long for a reference: a checkpoint of 140 GB is read at 1.2 GB/s."""
COMPUTE_TIMEOUT_S = 3600.0
"""For one worker; what comes after WAIT_S is for the next check."""


@dataclass(frozen=True, slots=True)
class ReferenceSource:
    """A worker that can be asked, with the secret that it answers to."""

    worker: str
    address: str
    free_bytes: int
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ReferenceQuestion:
    """What a reference is wanted for."""

    dtype: DType
    wire_dtype: WireDType
    texts: tuple[Text, ...]

    @property
    def key(self) -> str:
        return reference_key(self.dtype, self.wire_dtype)


class References:
    """Those of one model, each computed once."""

    def __init__(
        self,
        model: ServedModel,
        *,
        recorded: Path = SELF_CHECK_FILE,
        cache_directory: Path | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """Those that a plan has passed with are kept in `cache_directory`, if given."""
        self._model = model
        self._wait_s = wait_s
        self._recorded = recorded if model.is_builtin else None
        self._kept = None if cache_directory is None else _kept_file(cache_directory, model.fingerprint)
        self._known: dict[str, KnownReference] = {}
        self._has_read = False
        self._computing: dict[ReferenceQuestion, asyncio.Task[KnownReference]] = {}
        self._distrusted: set[str] = set()

    async def get(self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]) -> KnownReference:
        """A known one, or that of the worker with the most free memory, or else of the next.

        Raises NoReference when none can compute it, or not in time; then it is still being computed.
        """
        if not self._has_read:
            self._has_read = True
            self._known |= await asyncio.to_thread(self._read)
        if (known := self._find(question)) is not None:
            return known
        task = self._computing.get(question)
        if task is None:
            task = self._computing[question] = asyncio.create_task(self._compute(question, sources))
            task.add_done_callback(_take_exception)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(task)
        except TimeoutError:
            reason = f"it was not computed within {self._wait_s:g} s, and still is being computed"
            raise NoReference(reason) from None

    def has(self, question: ReferenceQuestion) -> bool:
        """It is known by now."""
        return self._find(question) is not None

    async def confirm(self, question: ReferenceQuestion) -> None:
        """A plan has passed with it: it is kept from now on."""
        known = self._find(question)
        if known is None or not known.worker or self._kept is None:
            return
        self._known[question.key] = KnownReference(known.reference, known.origin)
        try:
            await asyncio.to_thread(self._keep, self._kept, question.key, known.reference)
        except OSError as error:
            log.warning("the reference of the self-check is not kept for the next start: %s", error)

    def distrust(self, question: ReferenceQuestion) -> None:
        """A plan has failed with it. One that no plan has passed with may be wrong itself: the next is that
        of another worker, if there is one.
        """
        known = self._find(question)
        if known is not None and known.worker:
            self._distrusted.add(known.worker)
            del self._known[question.key]

    def close(self) -> None:
        """Nobody waits for any more."""
        for task in self._computing.values():
            task.cancel()

    def _find(self, question: ReferenceQuestion) -> KnownReference | None:
        known = self._known.get(question.key)
        return known if known is not None and known.reference.covers(question.texts) else None

    def _read(self) -> dict[str, KnownReference]:
        """What is recorded and kept; the longer of two."""
        found: dict[str, KnownReference] = {}
        for path, origin in ((self._recorded, "the recorded reference"), (self._kept, "the kept reference")):
            if path is None:
                continue
            try:
                references = read_references(path, self._model.fingerprint)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning("%s is not used, and is computed again: %s: %s", origin, path, error)
                continue
            found |= {key: KnownReference(each, origin) for key, each in references.items()}
        return found

    def _keep(self, path: Path, key: str, reference: Reference) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            others = read_references(path, self._model.fingerprint)
        except (FileNotFoundError, ValueError):
            others = {}
        write_references(path, self._model.fingerprint, others | {key: reference})

    async def _compute(
        self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]
    ) -> KnownReference:
        """Also where nobody waits for it any more."""
        try:
            known = await self._ask(question, sources)
            self._known[question.key] = known
            return known
        finally:
            del self._computing[question]

    async def _ask(self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]) -> KnownReference:
        refusals: list[str] = []
        for source in sorted(sources, key=self._rank):
            try:
                reference = await self._ask_one(source, question)
            except (grpc.aio.AioRpcError, ValueError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                refusals.append(f"worker {source.worker}: {reason}")
            else:
                return KnownReference(reference, f"the reference of worker {source.worker}", source.worker)
        raise NoReference("; ".join(refusals) or "no worker can be asked")

    def _rank(self, source: ReferenceSource) -> tuple[object, ...]:
        return (source.worker in self._distrusted, -source.free_bytes, source.worker)

    async def _ask_one(self, source: ReferenceSource, question: ReferenceQuestion) -> Reference:
        request = stage_pb2.ReferenceRequest(
            fingerprint=self._model.fingerprint,
            dtype=DTYPE_TO_MESSAGE[question.dtype],
            wire_dtype=WIRE_DTYPE_TO_MESSAGE[question.wire_dtype],
            texts=[stage_pb2.TokenSequence(tokens=text) for text in question.texts],
            num_top=NUM_TOP,
            secret=source.secret,
        )
        response = await compute_reference(source.address, request, timeout_s=COMPUTE_TIMEOUT_S)
        reference = decode_reference(response)
        if tuple(text.tokens for text in reference.texts) != question.texts:
            raise ValueError("a reference of other texts")
        if len(reference.layers) != self._model.config.num_layers:
            raise ValueError(f"a reference of {len(reference.layers)} layers")
        return reference


def _take_exception(task: asyncio.Task[KnownReference]) -> None:
    """Where nobody waits any more, nobody else does."""
    if not task.cancelled():
        task.exception()


def _kept_file(cache_directory: Path, fingerprint: str) -> Path:
    return cache_directory / "references" / f"{fingerprint}.json"
