"""Grammar masks, computed in the background while a step travels.

Background threads advance each matcher, and compute the next mask, as soon as a token is sampled, not when
the token returns as input. llguidance releases the GIL for a mask, so the compute thread continues; the mask
is usually ready before the next logits. Clients take turns on the threads, and a row whose mask is not ready
in time is sampled later, so that no client waits for the masks of others.

A sampled token only predicts the next input. A sequence's state is a function of its start record and its
input tokens: a wrong prediction is discarded, and the matcher is rebuilt from the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint import is_named
from checkpoint.errors import UnusableTokenizer
from checkpoint.files import TOKENIZER_FILE
from checkpoint.grammar_tokenizer import (
    GrammarError,
    GrammarMatcher,
    GrammarTokenizer,
    tokenizer_source,
)
from stage_worker.policy import WORKER_POLICY
from stage_worker.sampling.logits_processors import Place
from wire.ids import SequenceKey
from wire.sampling import GrammarSpec
from wire.steps import StartRecord

MASK_THREADS = 2
"""A client's masks are computed one at a time, so that a slow one leaves a thread to the others."""

_SPREAD = torch.tensor(
    [[0.0 if octet >> bit & 1 else -torch.inf for bit in range(8)] for octet in range(256)]
)
"""Addends of each mask octet for the logits of its eight ids."""


_Result = TypeVar("_Result")
_Piece = tuple[Future[Any], Callable[[], Any]]


class ClientTurns:
    """Queues of clients before an executor. A client's pieces run in their order. Thread-safe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        self._queues: dict[str, deque[_Piece]] = {}
        """Of clients with waiting work, in the order of their next turns."""
        self._running: set[str] = set()

    def submit(self, client: str, function: Callable[[], _Result]) -> Future[_Result]:
        """Run `function` at the turn of its client. A cancelled future takes no turn."""
        future = Future[_Result]()
        with self._lock:
            self._queues.setdefault(client, deque()).append((future, function))
        self._executor.submit(self._run_next)
        return future

    def close(self) -> None:
        """End the threads after their current work, without waiting."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        """Run the next piece. Each waiting piece of a client without a running one has such a call."""
        with self._lock:
            client = next((client for client in self._queues if client not in self._running), None)
            if client is None:
                return  # the end of a running piece calls again
            future, function = self._take(client)
            self._running.add(client)
        try:
            if future.set_running_or_notify_cancel():
                _settle(future, function)
        finally:
            with self._lock:
                self._running.discard(client)
                has_more = client in self._queues
            if has_more:
                self._executor.submit(self._run_next)

    def _take(self, client: str) -> _Piece:
        """Take the first piece of `client`, whose next turn is behind those of all others."""
        queue = self._queues.pop(client)
        piece = queue.popleft()
        if queue:
            self._queues[client] = queue
        return piece


def _settle(future: Future[_Result], function: Callable[[], _Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Matched:
    """A matcher, for the background threads only, and its mask [ceil(vocab_size / 8)] of next tokens."""

    matcher: GrammarMatcher
    mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Guess:
    token: int
    matched: Future[_Matched]


@dataclass(slots=True)
class _Sequence:
    """`matched` is the state after `tokens`, the generated tokens received; `guess` is one token ahead."""

    client: str
    spec: GrammarSpec
    tokens: list[int]
    matched: Future[_Matched]
    guess: _Guess | None = field(default=None)


class GrammarMasks:
    """Grammars of one stage's sequences, for the compute thread; `apply` reports problems, by row.

    `late`, `apply` and `precompute` may run on another thread; what they find for a sequence that has ended
    is not used.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        pool: Executor | None = None,
        wait_s: float = WORKER_POLICY.mask_wait_s,
    ) -> None:
        """`directory` is the checkpoint's; `pool` runs the work of clients, see `ClientTurns`."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._turns = ClientTurns(pool or ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="grammar"))
        self._wait_s = wait_s
        self._opening = Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._sequences: dict[SequenceKey, _Sequence] = {}

    def load(self) -> str | None:
        """Build the tokenizer's tables in up to a second with the GIL. Returns why it failed, or None."""
        error = self._turns.submit("", self._opened).exception()
        return None if error is None else str(error)

    def start(self, record: StartRecord) -> str | None:
        """Start after the record's generated tokens, in the background. Returns a problem known at once."""
        self.end(record.sequence)
        if (spec := record.sampling.grammar) is None:
            return None
        client, tokens = record.client, record.tokens[record.num_prompt_tokens :]
        matched = self._turns.submit(client, partial(self._begin, spec, tokens))
        self._sequences[record.sequence] = _Sequence(client, spec, list(tokens), matched)
        if self._directory is None or not is_named(tokenizer_source(self._directory)):
            return f"structured output: the checkpoint has no {TOKENIZER_FILE}"
        return None

    def end(self, key: SequenceKey) -> None:
        if (sequence := self._sequences.pop(key, None)) is not None:
            sequence.matched.cancel()
            if sequence.guess is not None:
                sequence.guess.matched.cancel()

    def clear(self) -> None:
        """Drop all sequences; the tables stay."""
        for key in list(self._sequences):
            self.end(key)

    def close(self) -> None:
        """End the threads after their current work, without waiting."""
        self._turns.close()

    def precompute(self, key: SequenceKey, token: int) -> None:
        """Start computing the mask after the sampled `token`."""
        sequence = self._sequences.get(key)
        if sequence is not None and (sequence.guess is None or sequence.guess.token != token):
            sequence.guess = _Guess(token, self._after(sequence, token))

    def advance(self, key: SequenceKey, token: int) -> None:
        """Advance by `token`, the input of a decode step."""
        if (sequence := self._sequences.get(key)) is None:
            return
        guess = sequence.guess
        is_guessed = guess is not None and guess.token == token
        sequence.matched = guess.matched if guess and is_guessed else self._after(sequence, token)
        sequence.tokens.append(token)
        sequence.guess = None

    def ready(self, key: SequenceKey) -> NDArray[np.uint8] | None:
        """The mask [ceil(vocab_size / 8)] of the next token, one bit per id; None if it is not known yet."""
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.matched.done() or sequence.matched.cancelled():
            return None
        return None if sequence.matched.exception() is not None else sequence.matched.result().mask

    def late(self, keys: Collection[SequenceKey]) -> set[SequenceKey]:
        """Wait a moment for all masks of `keys`; return those whose masks are not ready."""
        futures = {key: future for key in keys if (future := self._unready(key)) is not None}
        if futures:
            wait(futures.values(), timeout=self._wait_s)
        return {key for key, future in futures.items() if not future.done()}

    def wait_for_any(self, keys: Collection[SequenceKey]) -> None:
        """Wait a moment until the first mask of `keys` is ready."""
        unready = [future for key in keys if (future := self._unready(key)) is not None]
        if len(unready) == len(keys):
            wait(unready, timeout=self._wait_s, return_when=FIRST_COMPLETED)

    def is_ready(self, key: SequenceKey) -> bool:
        """Whether `apply` knows the mask, or the problem, of a row."""
        return self._unready(key) is None

    def _unready(self, key: SequenceKey) -> Future[_Matched] | None:
        sequence = self._sequences.get(key)
        return None if sequence is None or sequence.matched.done() else sequence.matched

    def apply(self, logits: Tensor, rows: Sequence[tuple[int, SequenceKey]]) -> dict[int, str]:
        """Set disallowed logits to -inf, in place; `logits` is [n, vocab_size]. No row is `late`.

        Returns problems by row, whose logits are unchanged: a rejected grammar or token, or no allowed token.
        """
        found = [(row, self._sequences.get(key)) for row, key in rows]
        started = [(row, sequence) for row, sequence in found if sequence is not None]
        problems: dict[int, str] = {}
        masks: dict[int, NDArray[np.uint8]] = {}
        for row, sequence in started:
            if (problem := _problem(sequence.matched)) is not None:
                problems[row] = problem
            else:
                masks[row] = sequence.matched.result().mask
        if masks:
            _forbid(logits, list(masks), np.stack(list(masks.values())))
        return problems

    def _after(self, sequence: _Sequence, token: int) -> Future[_Matched]:
        """State after `token`. A guess has advanced the matcher, so a wrong guess requires a new one."""
        if sequence.guess is None:
            work = partial(self._advance, sequence.matched, token)
        else:
            work = partial(self._begin, sequence.spec, (*sequence.tokens, token))
        return self._turns.submit(sequence.client, work)

    # The following methods run on the background threads.

    def _opened(self) -> GrammarTokenizer:
        with self._opening:
            if self._tokenizer is None:
                if self._directory is None:
                    raise UnusableTokenizer(f"the checkpoint has no {TOKENIZER_FILE}")
                self._tokenizer = GrammarTokenizer.open(
                    self._directory, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                )
            return self._tokenizer

    def _begin(self, spec: GrammarSpec, tokens: Sequence[int]) -> _Matched:
        tokenizer = self._opened()
        if tokenizer.checksum != spec.tokenizer_checksum:
            raise GrammarError(
                f"{TOKENIZER_FILE} of the coordinator has checksum {spec.tokenizer_checksum:016x}, "
                f"this stage's has {tokenizer.checksum:016x}"
            )
        return self._matched(tokenizer.matcher(spec.definition), tokens)

    def _advance(self, before: Future[_Matched], token: int) -> _Matched:
        return self._matched(before.result().matcher, (token,))

    def _matched(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> _Matched:
        matcher.consume(tokens)
        mask = np.zeros((self._vocab_size + 7) // 8, dtype=np.uint8)
        allowed = np.frombuffer(matcher.mask(), dtype=np.uint8)[: mask.size]
        mask[: allowed.size] = allowed
        return _Matched(matcher, mask)


def _problem(matched: Future[_Matched]) -> str | None:
    try:
        error = matched.exception(timeout=0)
    except (CancelledError, TimeoutError):  # it may have been started again since its mask was ready
        return "the sequence has ended"
    if error is None or isinstance(error, GrammarError | UnusableTokenizer):
        return None if error is None else f"structured output: {error}"
    return f"structured output: {type(error).__name__}: {error}"


_ROWS = 16
"""Rows that a device masks together: each takes 10 bytes per id meanwhile."""


class MaskRows:
    """Grammar masks of rows of a step, made before their logits.

    `arrays` must be on the device before `apply`.
    """

    def __init__(self, masks: Mapping[int, NDArray[np.uint8]]) -> None:
        """`masks` [ceil(vocab_size / 8)] by row, one bit per id."""
        self._rows = np.array(list(masks), np.int64)
        self._masks = np.stack(list(masks.values()))

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        yield self._rows
        yield self._masks

    def apply(self, scores: Tensor, place: Place) -> None:
        """Set scores of disallowed ids in `scores` [n, vocab_size] to -inf; nothing waits for a device."""
        rows, masks = place(self._rows), place(self._masks)
        bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
        for first in range(0, len(rows), _ROWS):
            part, index = masks[first : first + _ROWS], rows[first : first + _ROWS]
            are_banned = part.unsqueeze(-1).bitwise_right_shift(bits).bitwise_and(1).eq(0)
            are_banned = are_banned.flatten(1).narrow(1, 0, scores.shape[1])
            scores.index_copy_(0, index, scores.index_select(0, index).masked_fill_(are_banned, -torch.inf))


def _forbid(logits: Tensor, rows: list[int], masks: NDArray[np.uint8]) -> None:
    """Apply `masks` [len(rows), ceil(vocab_size / 8)], one bit per id, on the logits' device.

    Adding has no branches, unlike a masked fill, and by row it needs no memory of the logits' size: 70 to
    100 us per row of 152,000 on one core, against 150 to 600 us for `masked_fill` on all rows.
    """
    spread = _SPREAD.to(logits.device)
    packed = torch.from_numpy(masks).to(logits.device, dtype=torch.int32)
    for row, octets in zip(rows, packed, strict=True):
        logits[row] += spread.index_select(0, octets).flatten()[: logits.shape[-1]]
