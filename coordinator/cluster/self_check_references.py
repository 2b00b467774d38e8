"""Where the reference of a self-check comes from: recorded with the built-in model, or asked of a worker."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf import json_format

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.model import ServedModel
from stageline_rpc.v1 import stage_pb2
from wire.reference import NUM_TOP, Reference, decode_reference
from wire.reference_call import compute_reference
from wire.tensors import DTYPE_TO_MESSAGE

REFERENCE_TIMEOUT_S = 120.0
"""For all workers that are asked together: a checkpoint of 140 GB is read at 1.2 GB/s."""
MOST_OTHERS = 2
"""Workers that are asked beside the first, where a plan and a reference differ: three can outvote one."""


class NoReference(Exception):
    """There is nothing to compare with; the text says why."""


@dataclass(frozen=True, slots=True)
class ReferenceSource:
    """A worker that can be asked, with the secret that it answers to."""

    worker: str
    address: str
    free_bytes: int
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class KnownReference:
    """`origin`, as in "the recorded reference"; `worker` is who has computed it, if one has."""

    reference: Reference
    origin: str
    worker: str = ""


class References:
    """Those of one model, each computed once."""

    def __init__(
        self,
        model: ServedModel,
        *,
        recorded: Path = SELF_CHECK_FILE,
        timeout_s: float = REFERENCE_TIMEOUT_S,
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._known: dict[tuple[DType, tuple[int, ...]], KnownReference] = {}
        if model.is_builtin:
            for dtype, reference in read_recorded(recorded, model.fingerprint).items():
                self._known[dtype, reference.tokens] = KnownReference(reference, "the recorded reference")

    async def get(
        self, dtype: DType, tokens: tuple[int, ...], sources: Sequence[ReferenceSource]
    ) -> KnownReference:
        """For this prompt, asked of the worker with the most free memory, or else of the next. Raises
        NoReference when none can say it in time.
        """
        known = self._known.get((dtype, tokens))
        if known is None:
            known = self._known[dtype, tokens] = await self._ask(dtype, tokens, sources)
        return known

    async def others(
        self, dtype: DType, known: KnownReference, sources: Sequence[ReferenceSource]
    ) -> list[KnownReference]:
        """What other workers than the one of `known` say to the same prompt: two of them at most, as many as
        answer.
        """
        found: list[KnownReference] = []
        rest = [source for source in sources if source.worker != known.worker]
        while rest and len(found) < MOST_OTHERS:
            try:
                found.append(await self._ask(dtype, known.reference.tokens, rest))
            except NoReference:
                break
            rest = [source for source in rest if source.worker not in (each.worker for each in found)]
        return found

    def settle(self, dtype: DType, known: KnownReference) -> None:
        """This one is taken from now on."""
        self._known[dtype, known.reference.tokens] = known

    async def _ask(
        self, dtype: DType, tokens: tuple[int, ...], sources: Sequence[ReferenceSource]
    ) -> KnownReference:
        refusals: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                for source in sorted(sources, key=lambda each: (-each.free_bytes, each.worker)):
                    try:
                        reference = await self._compute(source, dtype, tokens)
                    except (grpc.aio.AioRpcError, ValueError) as error:
                        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                        refusals.append(f"worker {source.worker}: {reason}")
                    else:
                        origin = f"the reference of worker {source.worker}"
                        return KnownReference(reference, origin, source.worker)
        except TimeoutError:
            refusals.append(f"no reference within {self._timeout_s:g} s")
        raise NoReference("; ".join(refusals) or "no worker can be asked")

    async def _compute(self, source: ReferenceSource, dtype: DType, tokens: tuple[int, ...]) -> Reference:
        request = stage_pb2.ReferenceRequest(
            fingerprint=self._model.fingerprint,
            dtype=DTYPE_TO_MESSAGE[dtype],
            tokens=tokens,
            num_top=NUM_TOP,
            secret=source.secret,
        )
        response = await compute_reference(source.address, request, timeout_s=self._timeout_s)
        return decode_reference(response, tokens)


def read_recorded(path: Path, fingerprint: str) -> dict[DType, Reference]:
    """What is recorded for this fingerprint; empty for another. Raises OSError or ValueError."""
    recorded = json.loads(path.read_text())
    if recorded["fingerprint"] != fingerprint:
        return {}
    tokens = tuple(recorded["tokens"])
    return {
        DType.from_name(name): decode_reference(
            json_format.ParseDict(reference, stage_pb2.ReferenceResponse()), tokens
        )
        for name, reference in recorded["references"].items()
    }
