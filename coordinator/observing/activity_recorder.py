"""Watches the engine, and says what it has done lately.

A step costs it a few microseconds, and a fraction of one for each sequence; everything else is worked out
when somebody asks. Every buffer is bounded.
"""

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

from coordinator.observing.activity import EpochSpan, Snapshot
from coordinator.observing.per_second import PerSecond, Second
from coordinator.observing.request_history import RequestHistory
from coordinator.observing.step_history import StepHistory
from coordinator.requests.observer import EngineObserver
from coordinator.requests.request import Request
from coordinator.scheduling.answers import Progress
from coordinator.scheduling.sequence import Sequence
from wire.errors import ServingError
from wire.steps import Step, StepResult

MAX_LIVE = 100
MAX_ENDED = 100
"""Requests of one snapshot."""
_KEPT_EPOCHS = 32


class ActivityRecorder(EngineObserver):
    """Records from `began_s` on, on the engine's clock."""

    def __init__(
        self, began_s: float, *, bubble_share: Callable[[float], float | None] = lambda now_s: None
    ) -> None:
        """`bubble_share` is asked for that of the last seconds."""
        self._bubble_share = bubble_share
        self._began_s = began_s
        self._steps = StepHistory()
        self._seconds = PerSecond(began_s)
        self._requests = RequestHistory()
        self._token_s = dict[Sequence, float]()
        self._epochs = deque[EpochSpan](maxlen=_KEPT_EPOCHS)

    def accepted(self, request: Request, now_s: float) -> None:
        self._requests.accept(request, now_s)
        self._seconds.at(now_s).num_accepted += 1

    def step_sent(self, step: Step, now_s: float) -> None:
        self._steps.send(step, now_s)
        if step.starts:
            self._requests.start(step.starts, now_s)

    def step_answered(
        self, result: StepResult, progress: Items[Progress], sent_s: float, now_s: float
    ) -> None:
        second = self._seconds.at(now_s)
        second.num_steps += 1
        if (sent := self._steps.answer(result, now_s)) is not None:
            second.num_prefill_tokens += sent.num_chunk_tokens
        sequences = [each.sequence for each in progress if each.token is not None]
        if sequences:
            second.num_generated_tokens += len(sequences)
            self._note_tokens(sequences, second, now_s)

    def preempted(self, sequences: Items[Sequence], now_s: float) -> None:
        self._requests.preempt(sequences)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        self._epochs.append(EpochSpan(epoch, now_s, None))

    def epoch_stopped(self, reason: str, now_s: float) -> None:
        self._steps.void()
        if self._epochs and self._epochs[-1].stopped_s is None:
            self._epochs[-1] = replace(self._epochs[-1], stopped_s=now_s, reason=reason)

    def ended(self, request: Request, error: ServingError | None, now_s: float) -> None:
        self._requests.end(request, error, now_s)
        for choice in request.choices:
            self._token_s.pop(choice.sequence, None)
        second = self._seconds.at(now_s)
        if error is None:
            second.num_finished += 1
        else:
            second.num_unfinished += 1

    def snapshot(self, now_s: float, *, now_unix_s: float, workers: tuple[str, ...] = ()) -> Snapshot:
        """As of now; a millisecond at most. What is made of it may be worked out on another thread."""
        return Snapshot(
            now_s=now_s,
            now_unix_s=now_unix_s,
            began_s=self._began_s,
            bubble_share=self._bubble_share(now_s),
            num_answered=self._steps.num_answered,
            steps=self._steps.answered(now_s),
            in_flight=self._steps.in_flight(),
            epochs=tuple(self._epochs),
            workers=workers,
            rates=self._seconds.rates(now_s),
            seconds=self._seconds.kept(now_s),
            live=self._requests.live(MAX_LIVE),
            ended=self._requests.ended(MAX_ENDED),
        )

    def _note_tokens(self, sequences: list[Sequence], second: Second, now_s: float) -> None:
        """Each of these has got a token. Those of one step have mostly got the one before together, too."""
        before_s = Counter(map(self._token_s.get, sequences))
        num_first = before_s.pop(None, 0)
        for token_s, count in before_s.items():
            assert token_s is not None
            second.inter_token.add(now_s - token_s, count)
        if num_first:
            for sequence in sequences:
                if sequence not in self._token_s:
                    self._note_first_token(sequence, second, now_s)
        self._token_s.update(dict.fromkeys(sequences, now_s))

    def _note_first_token(self, sequence: Sequence, second: Second, now_s: float) -> None:
        waited_s = self._requests.take_first_token(sequence, now_s)
        if waited_s is not None:
            second.first_token.add(waited_s)
