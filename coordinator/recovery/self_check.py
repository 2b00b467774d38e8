"""Self-check of a plan against a reference, before it serves and when idle."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.self_check_script import Script, texts_for, write_script
from coordinator.recovery.self_check_verdict import (
    CheckOutcome,
    KnownReference,
    NoReference,
    Verdict,
    judge,
    remedy_of_changes,
)
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
from wire.tensors import (
    DTYPE_TO_MESSAGE,
    WEIGHT_FORMAT_TO_MESSAGE,
    WIRE_DTYPE_TO_MESSAGE,
    WireDType,
    number_of,
)
from wire.transport import PLAIN, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReferenceSource:
    """A worker that can compute references, with the secret that it requires."""

    worker: str
    address: str
    free_bytes: int
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ReferenceQuestion:
    """Identifies a reference: dtypes and texts."""

    dtype: DType
    wire_dtype: WireDType
    texts: tuple[Text, ...]

    @property
    def key(self) -> str:
        return reference_key(self.dtype, self.wire_dtype)


class References:
    """References of one model, each computed once.

    An unconfirmed reference of a worker stays while all plans that fail against it blame one and the same
    other worker. Otherwise it may be wrong itself and is dropped, once per worker, so that retries end.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        recorded: Path = SELF_CHECK_FILE,
        cache_directory: Path | None = None,
        policy: RecoveryPolicy,
        transport: Transport = PLAIN,
    ) -> None:
        """Confirmed references are kept in `cache_directory`, unless that is None."""
        self._model = model
        self._num_layers = model.config.num_layers
        self._policy, self._transport = policy, transport
        is_exact = model.weight_format is None and model.kv_dtype is None
        self._recorded = recorded if model.is_builtin and is_exact else None
        self._of_manifest = model.references if is_exact and not model.has_long_rope else {}
        self._kept = None if cache_directory is None else _kept_file(cache_directory, model)
        self._known: dict[str, KnownReference] = {}
        self._has_read = False
        self._computing: dict[ReferenceQuestion, asyncio.Task[KnownReference]] = {}
        self._blamed: dict[str, str] = {}
        """The worker that failed plans blame, by the worker that computed their reference."""
        self._dropped: set[str] = set()
        """Workers whose reference was dropped."""

    async def get(self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]) -> KnownReference:
        """Return a known reference, or compute one on the first of the ranked `sources` that can.

        Raises:
            NoReference: No source can compute it, or not in time; the computation then continues.
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
                f"it was not computed within {self._policy.reference_wait_s:g} s; the computation continues"
            )
            raise NoReference(reason) from None

    def has(self, question: ReferenceQuestion) -> bool:
        """Return whether it is known."""
        return self._find(question) is not None

    async def confirm(self, question: ReferenceQuestion) -> None:
        """Mark a reference as confirmed by a plan that passed, and keep it on disk."""
        known = self._find(question)
        if known is None or known.is_confirmed:
            return
        self._known[question.key] = replace(known, is_confirmed=True)
        if self._kept is None:
            return
        try:
            await asyncio.to_thread(self._keep, self._kept, {question.key: known.reference})
        except OSError as error:
            log.warning("the reference of the self-check is not kept for the next start: %s", error)

    def record_failure(self, question: ReferenceQuestion, worker: str) -> bool:
        """Record a plan that failed against this reference and blames `worker`, "" if unknown.

        Returns:
            Whether the reference was dropped.
        """
        known = self._find(question)
        if known is None or known.is_confirmed or known.worker in self._dropped:
            return False
        source = known.worker
        if worker and worker != source and self._blamed.setdefault(source, worker) == worker:
            return False
        self._drop(source)
        return True

    def source_left(self, worker: str) -> bool:
        """Drop the reference of a lost worker if plans have failed against it.

        Which of the two workers is wrong can no longer be decided.

        Returns:
            Whether the reference was dropped.
        """
        unconfirmed = (known for known in self._known.values() if not known.is_confirmed)
        is_doubtful = worker in self._blamed and any(known.worker == worker for known in unconfirmed)
        if is_doubtful:
            self._drop(worker)
        return is_doubtful

    async def discard(self, worker: str) -> None:
        """Drop all references of a worker with wrong weights, confirmed and kept ones too."""
        kept = [key for key, known in self._known.items() if known.worker == worker and known.is_confirmed]
        self._drop(worker, unconfirmed_only=False)
        if kept and self._kept is not None:
            try:
                await asyncio.to_thread(self._keep, self._kept, dict.fromkeys(kept))
            except OSError as error:
                log.warning("failed to remove a wrong self-check reference from %s: %s", self._kept, error)

    def _drop(self, source: str, *, unconfirmed_only: bool = True) -> None:
        self._blamed.pop(source, None)
        self._dropped.add(source)
        self._known = {
            key: known
            for key, known in self._known.items()
            if known.worker != source or (known.is_confirmed and unconfirmed_only)
        }

    def close(self) -> None:
        """Cancel all computations."""
        for task in self._computing.values():
            task.cancel()

    def _find(self, question: ReferenceQuestion) -> KnownReference | None:
        known = self._known.get(question.key)
        return known if known is not None and known.reference.covers(question.texts) else None

    def _read(self) -> dict[str, KnownReference]:
        """Read references: a kept one replaces a recorded one, the manifest's replaces both."""
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
            found |= {
                key: KnownReference(reference, origin, is_confirmed=True)
                for key, reference in references.items()
            }
        return found | self._read_manifest()

    def _read_manifest(self) -> dict[str, KnownReference]:
        found: dict[str, KnownReference] = {}
        for key, reference in self._of_manifest.items():
            if len(reference.layers) == self._num_layers:
                found[key] = KnownReference(reference, "the reference of the manifest", is_confirmed=True)
            else:
                log.warning(
                    "the manifest's reference in %s is not used: it has %d layers, the model %d",
                    *(key, len(reference.layers), self._num_layers),
                )
        return found

    def _keep(self, path: Path, changes: Mapping[str, Reference | None]) -> None:
        """Merge `changes` into the file; None removes a reference."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            others = read_references(path, self._model.fingerprint)
        except (FileNotFoundError, ValueError):
            others = {}
        merged = {**others, **changes}
        kept = {key: reference for key, reference in merged.items() if reference is not None}
        write_references(path, self._model.fingerprint, kept)

    async def _compute(
        self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]
    ) -> KnownReference:
        """Compute a reference, even after its caller has stopped waiting."""
        try:
            known = await self._ask(question, sources)
            self._known[question.key] = known
            return known
        finally:
            del self._computing[question]

    async def _ask(self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]) -> KnownReference:
        if self._model.pins is not None:
            known = f"a reference in {', '.join(self._of_manifest)}" if self._of_manifest else "none"
            raise NoReference(
                f"no worker has all weights of a remote model, and the manifest has {known}, not in "
                f"{question.key}"
            )
        refusals: list[str] = []
        for source in sorted(sources, key=self._rank):
            try:
                reference = await self._ask_one(source, question)
            except (grpc.aio.AioRpcError, ValueError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                refusals.append(f"worker {source.worker}: {reason}")
            else:
                return KnownReference(reference, f"the reference of worker {source.worker}", source.worker)
        raise NoReference("; ".join(refusals) or "no worker can compute a reference")

    def _rank(self, source: ReferenceSource) -> tuple[object, ...]:
        is_blamed = source.worker in self._blamed.values()
        return (source.worker in self._dropped, is_blamed, -source.free_bytes, source.worker)

    async def _ask_one(self, source: ReferenceSource, question: ReferenceQuestion) -> Reference:
        request = forward_pb2.ComputeReferenceRequest(
            fingerprint=self._model.fingerprint,
            dtype=DTYPE_TO_MESSAGE[question.dtype],
            wire_dtype=WIRE_DTYPE_TO_MESSAGE[question.wire_dtype],
            texts=[step_pb2.TokenSequence(tokens=text) for text in question.texts],
            num_top=NUM_TOP,
            secret=source.secret,
            weights=WEIGHT_FORMAT_TO_MESSAGE[self._model.weight_format],
            kv_dtype=number_of(self._model.kv_dtype),
            has_long_rope=self._model.has_long_rope,
        )
        response = await compute_reference(
            source.address,
            request,
            timeout_s=self._policy.reference_timeout_s,
            transport=self._transport,
        )
        reference = decode_reference(response)
        if tuple(text.tokens for text in reference.texts) != question.texts:
            raise ValueError("a reference of other texts")
        if len(reference.layers) != self._num_layers:
            raise ValueError(f"a reference of {len(reference.layers)} layers")
        return reference


def _take_exception(task: asyncio.Task[KnownReference]) -> None:
    """Retrieve the exception of a task without waiters, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _kept_file(cache_directory: Path, model: ServedModel) -> Path:
    weights, kv_dtype = model.weight_format, model.kv_dtype
    parts = [model.fingerprint]
    parts += [] if weights is None else [weights.value]
    parts += [] if kv_dtype is None else [f"kv-{kv_dtype.value}"]
    parts += ["long"] if model.has_long_rope else []
    return cache_directory / "references" / f"{'-'.join(parts)}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEpoch:
    """The epoch that a check runs in, with its empty or idle ledger.

    Attributes:
        ask_states: Requests the hidden states of all stages, which arrive by `SelfCheck.take_states`; None if
            stages have not recorded them.
        is_watched: The caller handles overdue steps and cancels the check; else `SelfCheck.run` raises
            TimeoutError.
    """

    epoch: int
    plan: Plan
    kv: KvCacheManager
    first_step_id: int
    send: Callable[[Step], None]
    ask_states: Callable[[], None] | None
    is_watched: bool = False


class SelfCheck:
    """Checks one epoch at a time. `verdict` is the result of the last check."""

    def __init__(
        self,
        references: References,
        *,
        vocab_size: int,
        interval_s: float = 0.0,
        policy: RecoveryPolicy,
        changed_files: Callable[[], Sequence[Path]] = tuple,
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """A check is due again after `interval_s`; 0 disables it.

        Args:
            changed_files: Reads which files of the checkpoint have changed since the coordinator opened it.
            now_us: Microseconds since 1970.
        """
        self.verdict = Verdict(outcome=CheckOutcome.NOT_RUN)
        self._references = references
        self._vocab_size = vocab_size
        self._interval_s = interval_s
        self._policy = policy
        self._changed_files = changed_files
        self._now_us = now_us
        self._question: ReferenceQuestion | None = None
        self._passed: ReferenceQuestion | None = None
        self._results = asyncio.Queue[StepResult]()
        self._states = asyncio.Queue[tuple[int, bytes]]()
        self._checked_at_s = 0.0

    async def reference(
        self, plan: Plan, wire_dtype: WireDType, sources: Sequence[ReferenceSource]
    ) -> KnownReference | NoReference:
        """Return the reference for the next `run`."""
        texts = texts_for(plan, self._vocab_size)
        self._question = ReferenceQuestion(plan.dtype, wire_dtype, texts)
        try:
            return await self._references.get(self._question, sources)
        except NoReference as error:
            return error

    async def run(self, epoch: CheckedEpoch, known: KnownReference | NoReference) -> Verdict:
        """Send the steps of a check and judge the results. Call `keep_reference` afterwards.

        Raises:
            TimeoutError: A result is missing.
        """
        script, results = await self._play(epoch)
        states = None
        if epoch.ask_states is not None and isinstance(known, KnownReference):
            states = await self._all_states(len(epoch.plan.stages) - 1, script, epoch.ask_states)
        verdict = judge(script, epoch.plan, results, states, known)
        if isinstance(known, KnownReference) and verdict.is_good:
            self._passed = self._question
        if not verdict.is_good and (changed := await asyncio.to_thread(self._changed_files)):
            verdict = replace(verdict, remedy=remedy_of_changes(changed))
        self._checked_at_s = asyncio.get_running_loop().time()
        self.verdict = replace(verdict, at_us=self._now_us())
        return self.verdict

    def record_failure(self, worker: str) -> bool:
        """See `References.record_failure`; applies to the last check, which failed."""
        if self.verdict.deviation is None or self._question is None:
            return False  # Nothing was compared.
        return self._references.record_failure(self._question, worker)

    def source_left(self, worker: str) -> bool:
        """See `References.source_left`."""
        return self._references.source_left(worker)

    async def discard_references(self, worker: str) -> None:
        """See `References.discard`."""
        await self._references.discard(worker)

    async def keep_reference(self) -> None:
        """Keep the reference of the last check if it passed. Writes to disk; do not delay requests for it."""
        question, self._passed = self._passed, None
        if question is not None:
            await self._references.confirm(question)

    def begin(self) -> None:
        """Report the first check as running."""
        if self.verdict.outcome is CheckOutcome.NOT_RUN:
            self.verdict = Verdict(outcome=CheckOutcome.RUNNING)

    def is_due(self) -> bool:
        """Return whether the interval has passed, or the reference that was missing is now known."""
        if not self._interval_s or self.verdict.at_us == 0:
            return False
        is_incomplete = self.verdict.outcome is CheckOutcome.FINITE_ONLY
        if is_incomplete and self._question is not None and self._references.has(self._question):
            return True
        return asyncio.get_running_loop().time() - self._checked_at_s >= self._interval_s

    def take(self, result: StepResult) -> None:
        """Take a step result of the checked epoch."""
        self._results.put_nowait(result)

    def take_states(self, stage: int, states: bytes) -> None:
        """Take the hidden states that a stage sent."""
        self._states.put_nowait((stage, states))

    def close(self) -> None:
        """Cancel reference computations."""
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
        """Return the hidden states that arrive in time and have the right size, by stage."""
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
