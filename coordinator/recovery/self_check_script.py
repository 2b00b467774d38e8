"""The steps of a self-check: small samples of everything that serving does, with known tokens. Pure.

Sequences of different lengths decode together and beside prompt chunks, across the boundary of a block;
others start with a cached block, and with the recurrent state after it. Decodes receive the next token of the
text instead of the sampled one, so that no step depends on the result of another.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from coordinator.planner.plan import Plan
from coordinator.scheduler.kv_manager import KvCacheManager
from kvcache import ActiveSequence, OutOfBlocks, OutOfStates, salt_of
from wire.ids import CHECK_REQUEST, SequenceKey
from wire.reference import MAX_TEXT_TOKENS, NUM_TEXTS, NUM_TOP, Text, check_text
from wire.sampling import StepSampling
from wire.steps import Decode, EndRecord, Prefill, StartRecord, Step, StepSlice

_SAMPLING = StepSampling(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of the check.

    Attributes:
        text: Number of its text.
        chunks: Ends of its prompt chunks; tokens after the last one are decoded, one per step.
        num_tokens: Tokens of the text that it computes.
        starts_at: Its earliest step.
        shares_block: It starts when its first block is cached, and does not compute that block.
    """

    name: str
    text: int
    chunks: tuple[int, ...]
    num_tokens: int
    starts_at: int
    shares_block: bool = False

    @property
    def saves_state(self) -> bool:
        """In models with recurrent layers, its state is saved before its second chunk."""
        return len(self.chunks) > 1


class Phase(Enum):
    """Kind of a slice. Phases are compared apart, because a fault may affect the tokens of only one."""

    FRESH = auto()
    """A prompt from its beginning."""
    CONTINUED = auto()
    """A chunk after tokens that an earlier step computed."""
    DECODED = auto()


@dataclass(frozen=True, slots=True)
class CheckedSlice:
    """Expected results of a slice: log-probabilities after its first `num_scored` tokens, and, if
    `is_sampled`, a token with log-probabilities after its last one.
    """

    sequence: SequenceKey
    text: int
    first: int
    num_tokens: int
    num_scored: int
    is_sampled: bool
    phase: Phase


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step with its slices, in the same order."""

    step: Step
    slices: tuple[CheckedSlice, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """All steps of a check; `left_out` lists parts that do not fit into the plan, with the reason."""

    texts: tuple[Text, ...]
    steps: tuple[CheckedStep, ...]
    left_out: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Positions whose log-probabilities are compared."""
        return sum(
            part.num_scored + part.is_sampled for checked_step in self.steps for part in checked_step.slices
        )


@dataclass(slots=True)
class _Live:
    """A part that has not finished."""

    part: Part
    key: SequenceKey
    tokens: Text
    restart_count: int
    active: ActiveSequence
    num_computed: int = 0
    is_started: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.part.chunks[-1]

    @property
    def is_done(self) -> bool:
        return self.num_computed == self.part.num_tokens

    @property
    def next_end(self) -> int:
        """End of its next slice."""
        ends = (end for end in self.part.chunks if end > self.num_computed)
        return next(ends, self.num_computed + 1)


def texts_for(plan: Plan, vocab_size: int) -> tuple[Text, ...]:
    """Return texts of the length that the parts of a check need for this plan."""
    length = min(plan.block_size + 4, plan.max_sequence_tokens, MAX_TEXT_TOKENS)
    return tuple(check_text(number, length, vocab_size) for number in range(NUM_TEXTS))


def write_script(
    plan: Plan, epoch: int, texts: tuple[Text, ...], kv: KvCacheManager, *, first_step_id: int = 0
) -> Script:
    """Write the steps for an epoch with ledger `kv`, in which no request runs."""
    writer = _Writer(plan, epoch, texts, kv, first_step_id)
    return writer.write()


def parts_for(plan: Plan, length: int) -> tuple[list[Part], list[str]]:
    """Return the parts of a check with texts of `length` tokens, and the parts left out."""
    block = plan.block_size
    most = plan.limits.max_step_tokens
    prompt = max(1, min(block - 2, length - 1, most))
    short = 2 if prompt == 3 else 3
    parts = [
        Part("decode", 0, (prompt,), min(prompt + 4, length), 0),
        Part("decode of another length", 1, (min(short, length, most),), min(short + 4, length), 0),
    ]
    if length <= block:
        return parts, [f"sequences of {length} tokens do not leave a block of {block}"]
    if block > most:
        return parts, [f"a step of {most} tokens does not hold a block of {block}"]
    # A recurrent state is saved at the end of a block only where a prompt has its next chunk.
    text_of_hit = 1 if plan.num_states else 0
    parts += [
        Part("second chunk", 1, (block, block + 1), min(block + 3, length), 1),
        Part(
            "prefix hit",
            text_of_hit,
            (min(block + 3, length),),
            min(block + 4, length),
            4,
            shares_block=True,
        ),
        Part("second prefix hit", 1, (block + 1,), min(block + 2, length), 4, shares_block=True),
    ]
    return parts, []


class _Writer:
    """Fills steps with parts that fit; parts that never fit are left out."""

    def __init__(
        self, plan: Plan, epoch: int, texts: tuple[Text, ...], kv: KvCacheManager, first_step_id: int
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._texts = texts
        self._kv = kv
        self._first_step_id = first_step_id
        # Cached blocks of an earlier check in this epoch must not be hit.
        self._salt = salt_of(f"self-check {epoch} {first_step_id}")
        parts, self._left_out = parts_for(plan, len(texts[0]))
        self._waiting = [self._live(number, part) for number, part in enumerate(parts)]
        self._running: list[_Live] = []
        self._steps: list[CheckedStep] = []

    def write(self) -> Script:
        while self._waiting or self._running:
            ends = self._end_finished()
            slices, starts = self._fill()
            if slices or ends:
                self._add_step(slices, starts, ends)
            else:
                self._give_up_one()
        return Script(self._texts, tuple(self._steps), tuple(self._left_out))

    def _live(self, number: int, part: Part) -> _Live:
        prompt = self._texts[part.text][: part.chunks[-1]]
        active = self._kv.new_sequence(
            prompt, max_output_tokens=part.num_tokens - len(prompt), salt=self._salt
        )
        key = SequenceKey(CHECK_REQUEST, number)
        # Earlier checks of this epoch used other restart counts for these keys.
        return _Live(part, key, self._texts[part.text], self._first_step_id, active)

    def _end_finished(self) -> list[EndRecord]:
        """Free finished parts; their blocks stay cached only if another part waits for them."""
        ended = [live for live in self._running if live.is_done]
        self._running = [live for live in self._running if not live.is_done]
        for live in ended:
            awaited = any(
                other.part.shares_block and other.part.text == live.part.text for other in self._waiting
            )
            self._kv.free_blocks(live.key, live.active, keep_content=awaited)
        return [EndRecord(live.key, live.restart_count) for live in ended]

    def _fill(self) -> tuple[list[tuple[StepSlice, CheckedSlice]], list[StartRecord]]:
        slices: list[tuple[StepSlice, CheckedSlice]] = []
        starts: list[StartRecord] = []
        limits = self._plan.limits
        room = limits.max_step_tokens
        for live in (*self._running, *self._due()):
            if len(slices) == limits.max_step_sequences:
                break
            if not live.is_started and not self._can_start(live):
                continue
            if not live.is_started and live.part.shares_block:
                live.num_computed = self._kv.num_cached_tokens(live.active)
            first, end = live.num_computed, live.next_end
            if end - first > room or (end := self._take_blocks(live, end)) <= first:
                continue
            room -= end - first
            if not live.is_started:
                starts.append(self._start(live))
            slices.append(_slice(live, end))
            live.num_computed = end
        return slices, starts

    def _start(self, live: _Live) -> StartRecord:
        live.is_started = True
        self._waiting.remove(live)
        self._running.append(live)
        prompt = live.tokens[: live.num_prompt_tokens]
        return StartRecord(live.key, live.restart_count, len(prompt), prompt, _SAMPLING)

    def _due(self) -> list[_Live]:
        """Return the parts that are due in this step, those with an evictable cached block first.

        When nothing runs, earliest steps are ignored.
        """
        next_step = len(self._steps)
        is_late = next_step > 0 and not self._running
        due = [live for live in self._waiting if is_late or live.part.starts_at <= next_step]
        return sorted(due, key=lambda live: not live.part.shares_block)

    def _can_start(self, live: _Live) -> bool:
        """Whether its block is cached if it shares one, and recurrent states suffice.

        It needs one, and one for its snapshot if there will be one; running parts have one each.
        """
        num_states = len(self._running) + 1 + live.part.saves_state
        if 0 < self._plan.num_states < num_states:
            return False
        return not live.part.shares_block or self._is_cached(live)

    def _is_cached(self, live: _Live) -> bool:
        return self._kv.num_cached_tokens(live.active) >= min(
            self._plan.block_size, live.num_prompt_tokens - 1
        )

    def _take_blocks(self, live: _Live, end: int) -> int:
        """Allocate blocks; return the end of the slice that they hold, 0 if there are too few."""
        num_blocks = -(-end // self._plan.block_size)
        if not live.is_started and num_blocks > self._kv.num_available:
            return 0  # it would take the cached blocks and then fail
        try:
            if live.num_computed < live.num_prompt_tokens:
                return self._kv.allocate(live.key, live.active, end, first_query=live.num_computed)
            self._kv.push(live.key, live.active, live.tokens[live.num_computed])
        except (OutOfBlocks, OutOfStates):
            return 0
        return end

    def _give_up_one(self) -> None:
        """Resolve a lack of blocks: shorten the part that started last, or leave out a waiting one."""
        stuck = self._running[-1] if self._running else self._waiting.pop()
        self._left_out.append(f"{stuck.part.name}: {self._plan.num_blocks} blocks are too few")
        if self._running:
            stuck.part = replace(stuck.part, num_tokens=stuck.num_computed)

    def _add_step(
        self, slices: list[tuple[StepSlice, CheckedSlice]], starts: list[StartRecord], ends: list[EndRecord]
    ) -> None:
        # Decodes precede chunks in a step.
        slices = sorted(slices, key=lambda entry: isinstance(entry[0].inference_step, Prefill))
        step = Step.of(
            [part for part, _ in slices],
            epoch=self._epoch,
            step_id=self._first_step_id + len(self._steps),
            starts=tuple(starts),
            ends=tuple(ends),
            signals=self._kv.take_pending(),
            digest=self._kv.digest,
        )
        self._steps.append(CheckedStep(step, tuple(checked for _, checked in slices)))


def _slice(live: _Live, end: int) -> tuple[StepSlice, CheckedSlice]:
    """The tokens from `live.num_computed` to `end`."""
    first, num_prompt_tokens = live.num_computed, live.num_prompt_tokens
    tokens = live.tokens[first:end]
    if first >= num_prompt_tokens:
        checked = CheckedSlice(live.key, live.part.text, first, 1, 0, is_sampled=True, phase=Phase.DECODED)
        return StepSlice(live.key, live.restart_count, tokens, Decode(first)), checked
    num_scored = min(end, num_prompt_tokens - 1) - first
    prefill = Prefill(first, len(tokens), num_prompt_tokens, is_scored=num_scored > 0)
    checked = CheckedSlice(
        live.key,
        live.part.text,
        first,
        len(tokens),
        num_scored,
        is_sampled=prefill.is_final,
        phase=Phase.CONTINUED if first else Phase.FRESH,
    )
    return StepSlice(live.key, live.restart_count, tokens, prefill), checked
