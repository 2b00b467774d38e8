"""Self-check of a plan against a reference, before it serves and when idle."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.self_check_script import Script, texts_for, write_script
from coordinator.recovery.self_check_verdict import CheckOutcome, KnownReference, NoReference, Verdict, judge
from coordinator.scheduler.kv_manager import KvCacheManager
from stageline_rpc.internal.v1 import forward_pb2, step_pb2
from wire.clock import wall_clock_us
from wire.reference import (
    NUM_TOP,
    Reference,
    Text,
    decode_reference,
    decode_states,
    read_references,
    reference_key,
    write_references,
)
from wire.stage_calls import compute_reference
from wire.steps import Step, StepResult
from wire.tensors import DTYPE_TO_MESSAGE, WIRE_DTYPE_TO_MESSAGE, WireDType

log = logging.getLogger(__name__)


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
        policy: RecoveryPolicy,
    ) -> None:
        """Those that a plan has passed with are kept in `cache_directory`, if given."""
        self._model = model
        self._num_layers = model.config.num_layers
        self._policy = policy
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
            async with asyncio.timeout(self._policy.reference_wait_s):
                return await asyncio.shield(task)
        except TimeoutError:
            reason = (
                f"it was not computed within {self._policy.reference_wait_s:g} s, and still is being computed"
            )
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
            found |= {key: KnownReference(reference, origin) for key, reference in references.items()}
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
        request = forward_pb2.ComputeReferenceRequest(
            fingerprint=self._model.fingerprint,
            dtype=DTYPE_TO_MESSAGE[question.dtype],
            wire_dtype=WIRE_DTYPE_TO_MESSAGE[question.wire_dtype],
            texts=[step_pb2.TokenSequence(tokens=text) for text in question.texts],
            num_top=NUM_TOP,
            secret=source.secret,
        )
        response = await compute_reference(
            source.address, request, timeout_s=self._policy.reference_timeout_s
        )
        reference = decode_reference(response)
        if tuple(text.tokens for text in reference.texts) != question.texts:
            raise ValueError("a reference of other texts")
        if len(reference.layers) != self._num_layers:
            raise ValueError(f"a reference of {len(reference.layers)} layers")
        return reference


def _take_exception(task: asyncio.Task[KnownReference]) -> None:
    """Where nobody waits any more, nobody else does."""
    if not task.cancelled():
        task.exception()


def _kept_file(cache_directory: Path, fingerprint: str) -> Path:
    return cache_directory / "references" / f"{fingerprint}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEpoch:
    """What a check needs of the epoch that it runs in: its empty or idle ledger, and the way in.

    `ask_states` has all stages tell what they have handed on, of which `SelfCheck.take_states` is told; None
    where they have not kept it. With `is_watched`, the caller gives up overdue steps and cancels the check;
    without, `SelfCheck.run` raises TimeoutError.
    """

    epoch: int
    plan: Plan
    kv: KvCacheManager
    first_step_id: int
    send: Callable[[Step], None]
    ask_states: Callable[[], None] | None
    is_watched: bool = False


class SelfCheck:
    """One per coordinator; checks one epoch at a time. `verdict` is that of the last check."""

    def __init__(
        self,
        references: References,
        *,
        vocab_size: int,
        interval_s: float = 0.0,
        policy: RecoveryPolicy,
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """A check is due again after `interval_s`; never, if that is 0. `now_us`: microseconds since 1970."""
        self.verdict = Verdict(outcome=CheckOutcome.NOT_RUN)
        self._references = references
        self._vocab_size = vocab_size
        self._interval_s = interval_s
        self._policy = policy
        self._now_us = now_us
        self._question: ReferenceQuestion | None = None
        self._passed: ReferenceQuestion | None = None
        self._results = asyncio.Queue[StepResult]()
        self._states = asyncio.Queue[tuple[int, bytes]]()
        self._checked_at_s = 0.0

    async def reference(
        self, plan: Plan, wire_dtype: WireDType, sources: Sequence[ReferenceSource]
    ) -> KnownReference | NoReference:
        """What the next `run` compares with."""
        texts = texts_for(plan, self._vocab_size)
        self._question = ReferenceQuestion(plan.dtype, wire_dtype, texts)
        try:
            return await self._references.get(self._question, sources)
        except NoReference as error:
            return error

    async def run(self, epoch: CheckedEpoch, known: KnownReference | NoReference) -> Verdict:
        """Sends the steps of a check, and judges what is answered. Raises TimeoutError where an answer does
        not come. After it, `keep_reference` is due.
        """
        script, results = await self._play(epoch)
        states = None
        if epoch.ask_states is not None and isinstance(known, KnownReference):
            states = await self._all_states(len(epoch.plan.stages) - 1, script, epoch.ask_states)
        verdict = judge(script, epoch.plan, results, states, known)
        if isinstance(known, KnownReference) and self._question is not None:
            if verdict.is_good:
                self._passed = self._question
            else:
                self._references.distrust(self._question)
        self._checked_at_s = asyncio.get_running_loop().time()
        self.verdict = replace(verdict, at_us=self._now_us())
        return self.verdict

    async def keep_reference(self) -> None:
        """Keeps the reference that the last check has passed with, if it has. Writes to disk: no request
        should wait for it.
        """
        question, self._passed = self._passed, None
        if question is not None:
            await self._references.confirm(question)

    def begin(self) -> None:
        """The first check is about to run."""
        if self.verdict.outcome is CheckOutcome.NOT_RUN:
            self.verdict = Verdict(outcome=CheckOutcome.RUNNING)

    def is_due(self) -> bool:
        """The last check is long ago, or what it could not be compared with is here by now."""
        if not self._interval_s or self.verdict.at_us == 0:
            return False
        is_incomplete = self.verdict.outcome is CheckOutcome.FINITE_ONLY
        if is_incomplete and self._question is not None and self._references.has(self._question):
            return True
        return asyncio.get_running_loop().time() - self._checked_at_s >= self._interval_s

    def take(self, result: StepResult) -> None:
        """What the pipeline answers."""
        self._results.put_nowait(result)

    def take_states(self, stage: int, states: bytes) -> None:
        """What a stage has handed on."""
        self._states.put_nowait((stage, states))

    def close(self) -> None:
        """Nobody waits for references any more."""
        self._references.close()

    async def _play(self, epoch: CheckedEpoch) -> tuple[Script, list[StepResult]]:
        self._results = asyncio.Queue()
        texts = texts_for(epoch.plan, self._vocab_size)
        script = write_script(epoch.plan, epoch.epoch, texts, epoch.kv, first_step_id=epoch.first_step_id)
        for checked_step in script.steps:
            epoch.send(checked_step.step)
        results = []
        timeout_s = None if epoch.is_watched else self._policy.check_answer_timeout_s
        for _ in script.steps:
            async with asyncio.timeout(timeout_s):
                results.append(await self._results.get())
        return script, results

    async def _all_states(
        self, num_stages: int, script: Script, ask: Callable[[], None]
    ) -> dict[int, Sequence[float]]:
        """Those that come in time and are of the right size."""
        num_tokens = sum(checked_step.step.num_tokens for checked_step in script.steps)
        self._states = asyncio.Queue()
        states: dict[int, Sequence[float]] = {}
        if num_stages:
            ask()
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(self._policy.check_states_timeout_s):
                for _ in range(num_stages):
                    stage, data = await self._states.get()
                    states[stage] = decode_states(data, num_tokens)
        return states
