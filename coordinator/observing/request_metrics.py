"""How long requests wait and take, the tokens that they get, and which are refused."""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import repeat

from coordinator.requests.observer import EngineObserver
from coordinator.requests.request import Request
from coordinator.scheduling.answers import Progress
from coordinator.scheduling.sequence import Sequence
from telemetry.metrics import definitions
from telemetry.metrics.registry import Registry
from wire.errors import (
    ClusterUnavailable,
    DeadlinePassed,
    InvalidRequest,
    JournalUnavailable,
    Overloaded,
    RequestCancelled,
    ServingError,
)
from wire.ids import RequestId
from wire.steps import Step, StepResult


@dataclass(slots=True)
class _Life:
    """A live request, since it was accepted here."""

    accepted_s: float
    has_begun: bool = False
    has_token: bool = False


class RequestMetrics(EngineObserver):
    """Histograms of requests. What is kept is bounded by the live requests and their choices."""

    def __init__(self, registry: Registry) -> None:
        self._queue_time = registry.distribution(definitions.QUEUE_TIME).of()
        self._first_token_time = registry.distribution(definitions.FIRST_TOKEN_TIME).of()
        self._inter_token_time = registry.distribution(definitions.INTER_TOKEN_TIME).of()
        self._request_time = registry.distribution(definitions.REQUEST_TIME)
        self._num_generated = registry.number(definitions.GENERATED_TOKENS).of()
        self._refused = registry.number(definitions.REQUESTS_REFUSED)
        for reason in definitions.REFUSAL.values:
            self._refused.of(reason)
        self._lives: dict[RequestId, _Life] = {}
        self._token_s: dict[Sequence, float] = {}

    def note_refusal(self, error: Exception) -> None:
        """A request is not accepted because of this."""
        self._refused.of(_refusal(error)).add()

    def accepted(self, request: Request, now_s: float) -> None:
        self._lives[request.id] = _Life(now_s)

    def step_sent(self, step: Step, now_s: float) -> None:
        for start in step.starts:
            life = self._lives.get(start.sequence.request_id)
            if life is not None and not life.has_begun:
                life.has_begun = True
                self._queue_time.observe(now_s - life.accepted_s)

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        """Sequences of one step mostly were in one step before, too, so few of the waits differ."""
        sequences = [each.sequence for each in progress if each.token is not None]
        self._num_generated.add(len(sequences))
        waits = Counter(map(self._token_s.get, sequences))
        if waits.pop(None, 0):
            self._note_first_tokens(sequences, now_s)
        for before_s, count in waits.items():
            assert before_s is not None
            self._inter_token_time.observe(now_s - before_s, count)
        self._token_s.update(zip(sequences, repeat(now_s)))

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        for choice in request.choices:
            self._token_s.pop(choice.sequence, None)
        life = self._lives.pop(request.id, None)
        if life is not None:
            self._request_time.of(_outcome(error)).observe(now_s - life.accepted_s)

    def _note_first_tokens(self, sequences: list[Sequence], now_s: float) -> None:
        for sequence in sequences:
            life = self._lives.get(sequence.key.request_id)
            if life is None or life.has_token or sequence in self._token_s:
                continue
            life.has_token = True
            # What a former coordinator has begun had its first token there.
            if sequence.num_generated_tokens == 1:
                self._first_token_time.observe(now_s - life.accepted_s)


def _refusal(error: Exception) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "unavailable" if isinstance(error, ClusterUnavailable | JournalUnavailable) else "other"


def _outcome(error: ServingError | None) -> str:
    if error is None:
        return "finished"
    return "cancelled" if isinstance(error, RequestCancelled | DeadlinePassed) else "failed"
