"""The newest reader gets each token once and in order; older readers get none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.output_stream import (
    TEXT_TOKENS_PER_TURN,
    OutputStream,
    Positions,
    max_message_tokens,
)
from coordinator.engine.request import Choice, Request
from coordinator.scheduler.policy import SchedulerLimits
from tests.unit.coordinator.engine.conftest import NewModel
from tests.unit.coordinator.engine.engine_model import Call, EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase, prompt_scores, solo
from text.detokenizer import IncrementalDetokenizer
from wire.errors import InvalidRequest, RequestCancelled, RequestNotFound, Superseded
from wire.ids import new_request_id
from wire.steps import TokenLogprobs

ONE_AT_A_TIME = SchedulerLimits(max_step_tokens=16, max_step_sequences=8, max_steps_in_flight=1)
LONG = (5, 3, 1) * 7


def prompt_logprobs(call: Call) -> tuple[TokenLogprobs | None, ...]:
    """Received prompt log-probabilities; checks that they have no gap or overlap."""
    got: list[TokenLogprobs | None] = []
    first = None
    for output in call.outputs:
        if output.prompt_logprobs:
            first = output.first_prompt_token_index if first is None else first
            assert output.choice.index == 0
            assert output.first_prompt_token_index == first + len(got)
            got.extend(output.prompt_logprobs)
    return tuple(got)


def run_steps(model: EngineModel, count: int) -> None:
    for _ in range(count):
        assert model.run_step()


# Reading


def test_tokens_coalesce_until_they_are_read(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(max_tokens=7)
    call = model.submit(case.request())
    run_steps(model, 3)
    tokens = solo(case).tokens
    assert [output.piece.tokens for output in call.read_all()] == [tokens[:3]]
    run_steps(model, 1)
    assert [output.piece.tokens for output in call.read_all()] == [tokens[3:4]]
    model.run()
    assert [(output.piece.tokens, output.piece.is_last) for output in call.read_all()] == [(tokens[4:], True)]
    assert (call.is_over, call.error) == (True, None)


def test_a_waiting_reader_is_woken_by_new_output(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    call = model.submit(RequestCase(max_tokens=2).request())
    assert call.read() is None
    assert not call.is_over
    run_steps(model, 1)
    assert call.read() is not None
    assert call.read() is None
    run_steps(model, 1)
    assert call.read() is not None


@pytest.mark.parametrize("is_waiting", [True, False])
def test_output_before_an_error_is_delivered_first(new_model: NewModel, is_waiting: bool) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    request = RequestCase(max_tokens=9).request()
    call = model.submit(request)
    if is_waiting:
        assert call.read() is None
    run_steps(model, 2)
    model.engine.cancel(request.id)
    assert len(call.read_all()) == 1
    assert call.tokens() == solo(RequestCase(max_tokens=9)).tokens[:2]
    assert isinstance(call.error, RequestCancelled)


def test_an_error_wakes_a_reader_that_waits(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9).request()
    call = model.submit(request)
    assert call.read() is None
    model.engine.cancel(request.id)
    assert call.read() is None
    assert isinstance(call.error, RequestCancelled)


class LettersOf(IncrementalDetokenizer):
    """A letter per token, and how many there were."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        return "".join(chr(token) for token in token_ids)

    def flush(self) -> str:
        return ""


def unread_request(detokenizer: IncrementalDetokenizer, text: str) -> Request:
    """A request with output that nobody has read."""
    sequence = RequestCase(max_tokens=9).request().choices[0].sequence
    buffer = OutputBuffer(detokenizer)
    for letter in text:
        buffer.append(ord(letter))
    return Request(sequence.key.request_id, [Choice(sequence, buffer)], client="")


async def test_others_run_while_the_text_of_a_long_output_is_produced() -> None:
    letters = LettersOf()
    messages = OutputStream(unread_request(letters, 999 * "a" + "z"), Positions(default=999)).outputs()
    reader = asyncio.ensure_future(anext(messages))
    per_turn = []
    while not reader.done():
        before = letters.num_tokens
        await asyncio.sleep(0)
        per_turn.append(letters.num_tokens - before)
    piece = reader.result().piece
    assert (piece.first_token_index, piece.text_offset, piece.text) == (999, 999, "z")
    assert sum(per_turn) == 1000
    assert max(per_turn) == TEXT_TOKENS_PER_TURN


async def test_a_stream_that_is_superseded_produces_no_more_text() -> None:
    letters = LettersOf()
    stream = OutputStream(unread_request(letters, 999 * "a"), Positions(default=998))
    reader = asyncio.ensure_future(anext(stream.outputs()))
    await asyncio.sleep(0)
    stream.supersede()
    with pytest.raises(Superseded):
        await reader
    assert letters.num_tokens == TEXT_TOKENS_PER_TURN


@pytest.mark.parametrize(("num_top", "full"), [(0, 256), (2, 128)])
def test_long_outputs_are_split_into_bounded_messages(new_model: NewModel, num_top: int, full: int) -> None:
    assert max_message_tokens(num_top) == full
    model = new_model(
        num_blocks=2000,
        limits=SchedulerLimits(max_step_tokens=4000, max_step_sequences=4, max_steps_in_flight=1),
    )
    case = RequestCase(
        prompt=(1, 2) * 350, max_tokens=0, echo=True, logprobs=num_top, prompt_logprobs=num_top
    )
    call = model.submit(case.request())
    model.run()
    call.read_all()
    sizes = [(len(output.prompt_logprobs), len(output.piece.tokens)) for output in call.outputs]
    num_full, rest = divmod(700, full)
    assert sizes == [*[(full, 0)] * num_full, (rest, 0), *[(0, full)] * num_full, (0, rest)]
    assert call.tokens() == case.prompt


def test_a_message_without_log_probabilities_has_more_tokens_and_every_one_has_some() -> None:
    assert max_message_tokens(None) == 512
    assert max_message_tokens(100_000) == 1


def test_choices_take_turns(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    call = model.submit(RequestCase(n=3, max_tokens=4).request())
    order = []
    for _ in range(4):
        run_steps(model, 1)
        order += [output.choice.index for output in (call.read(), call.read()) if output is not None]
    assert order == [0, 1, 2, 0, 1, 2, 0, 1]


# Another reader


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_superseded_call_gets_no_more_output(new_model: NewModel, is_waiting: bool) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    request = RequestCase(max_tokens=9).request()
    stale = model.submit(request)
    run_steps(model, 2)
    if is_waiting:
        stale.read_all()
    num_read = len(stale.outputs)
    # Later output, for the reader that attaches now.
    run_steps(model, 1)
    call = model.attach(request.id)
    assert stale.read_all() == []
    assert isinstance(stale.error, Superseded)
    assert len(stale.outputs) == num_read
    model.run()
    call.read_all()
    assert call.tokens() == solo(RequestCase(max_tokens=9)).tokens
    # The reader has left, which did not end the request.
    assert (call.error, request.error) == (None, None)


def test_a_call_superseded_after_the_end_gets_no_more_output(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9, keep_s=60.0).request()
    stale = model.submit(request)
    model.run()
    call = model.attach(request.id)
    assert stale.read_all() == []
    assert isinstance(stale.error, Superseded)
    call.read_all()
    assert call.has_last()


@pytest.mark.parametrize("from_token", range(8))
@pytest.mark.parametrize("is_live", [True, False])
def test_an_attached_call_begins_with_the_requested_token(
    new_model: NewModel, from_token: int, is_live: bool
) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(max_tokens=9, keep_s=60.0, stops=("never",), logprobs=1)
    request = case.request()
    first = model.submit(request)
    run_steps(model, 7)
    first.read_all()
    if not is_live:
        model.run()
    call = model.attach(request.id, from_token)
    model.run()
    call.read_all()
    whole = solo(case)
    assert call.outputs[0].piece.first_token_index == from_token
    assert call.tokens() == whole.tokens[from_token:]
    assert call.text() == whole.text[call.outputs[0].piece.text_offset :]
    if from_token == 7:
        assert first.text() + call.text() == whole.text


def test_each_choice_is_read_from_its_own_position(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(n=3, max_tokens=6, keep_s=60.0)
    request = case.request()
    model.submit(request)
    run_steps(model, 4)
    call = model.attach(request.id, 1, by_choice={2: 3, 0: 0})
    model.run()
    call.read_all()
    for choice, begin in ((0, 0), (1, 1), (2, 3)):
        assert call.tokens(choice) == solo(case, choice).tokens[begin:]


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ({"from_token": 4}, "from_token is 4, choice 0 has 3 tokens so far"),
        ({"by_choice": {1: 9}}, "from_token is 9, choice 1 has 3 tokens so far"),
        ({"by_choice": {2: 0}}, "choice is 2, the request has 2 choices"),
        ({"prompt_token": 4}, "from_prompt_token is 4, the prompt has 3 tokens"),
    ],
)
def test_positions_that_do_not_exist_are_rejected_and_the_reader_stays(
    new_model: NewModel, positions: dict[str, object], text: str
) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(n=2, max_tokens=6)
    request = case.request()
    call = model.submit(request, deadline_s=2000.0)
    run_steps(model, 3)
    with pytest.raises(InvalidRequest) as caught:
        model.attach(request.id, **positions)  # type: ignore[arg-type]
    assert str(caught.value) == text
    assert request.deadline_s == 2000.0
    model.run()
    call.read_all()
    assert (call.error, call.tokens(0), call.tokens(1)) == (None, solo(case).tokens, solo(case, 1).tokens)


def test_an_unknown_request_cannot_be_attached_to(new_model: NewModel) -> None:
    model = new_model()
    with pytest.raises(RequestNotFound):
        model.attach(new_request_id())
    request = RequestCase(max_tokens=1).request()
    model.submit(request)
    model.run()
    # The request has ended and is not kept.
    with pytest.raises(RequestNotFound):
        model.attach(request.id)


# Kept output


def test_kept_output_expires_after_the_last_reader_detaches(new_model: NewModel) -> None:
    model = new_model()
    case = RequestCase(max_tokens=3, keep_s=10.0)
    request = case.request()
    model.submit(request).close()
    model.now_s += 100
    model.engine.sweep()
    assert request.is_live
    model.run()
    model.now_s += 9
    model.engine.sweep()
    call = model.attach(request.id)
    # Output with a reader does not expire.
    model.now_s += 100
    model.engine.sweep()
    call.read_all()
    assert call.tokens() == solo(case).tokens
    model.now_s += 9.5
    model.engine.sweep()
    model.attach(request.id).close()
    model.now_s += 10
    model.engine.sweep()
    with pytest.raises(RequestNotFound):
        model.attach(request.id)
    assert model.engine.registry.num_kept == 0


def test_a_kept_cancelled_request_delivers_its_output_and_then_the_error(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(max_tokens=9, keep_s=10.0)
    request = case.request()
    model.submit(request).close()
    run_steps(model, 3)
    model.engine.cancel(request.id)
    call = model.attach(request.id, 1)
    call.read_all()
    assert call.tokens() == solo(case).tokens[1:3]
    assert isinstance(call.error, RequestCancelled)


# Log-probabilities of the prompt


def test_prompt_logprobs_arrive_by_chunk_before_the_first_token(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(prompt=LONG, max_tokens=2, n=2, prompt_logprobs=2, logprobs=1)
    call = model.submit(case.request())
    run_steps(model, 1)
    assert [len(output.prompt_logprobs) for output in call.read_all()] == [17]
    model.run()
    call.read_all()
    assert prompt_logprobs(call) == tuple(prompt_scores(LONG, 2))
    with_scores = [bool(output.prompt_logprobs) for output in call.outputs if output.choice.index == 0]
    assert with_scores == sorted(with_scores, reverse=True)
    logprobs = [
        logprob for output in call.outputs for logprob in output.piece.logprobs if not output.choice.index
    ]
    assert tuple(logprobs) == solo(case).logprobs


def test_a_prompt_of_one_token_has_one_empty_prompt_logprob(new_model: NewModel) -> None:
    model = new_model()
    call = model.submit(RequestCase(prompt=(4,), max_tokens=1, prompt_logprobs=2).request())
    model.run()
    call.read_all()
    assert prompt_logprobs(call) == (None,)


def test_an_echo_with_logprobs_waits_for_the_whole_prompt(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(prompt=LONG, max_tokens=2, n=2, echo=True, logprobs=1)
    call = model.submit(case.request())
    run_steps(model, 1)
    assert call.read_all() == []
    model.run()
    call.read_all()
    for choice in range(2):
        pieces = [output.piece for output in call.outputs if output.choice.index == choice]
        assert tuple(logprob for piece in pieces for logprob in piece.logprobs) == solo(case, choice).logprobs
        assert call.tokens(choice) == solo(case, choice).tokens
    assert prompt_logprobs(call) == ()


def test_an_echo_without_logprobs_is_delivered_at_once(new_model: NewModel) -> None:
    model = new_model()
    call = model.submit(RequestCase(prompt=LONG, max_tokens=2, echo=True).request())
    call.read_all()
    assert call.tokens() == LONG


@pytest.mark.parametrize("prompt_token", [None, 0, 1, 16, 17, 18, 21])
def test_prompt_logprobs_resume_at_the_requested_position(
    new_model: NewModel, prompt_token: int | None
) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(prompt=LONG, max_tokens=2, prompt_logprobs=2)
    request = case.request()
    first = model.submit(request)
    run_steps(model, 1)
    first.read_all()
    assert len(prompt_logprobs(first)) == 17
    call = model.attach(request.id, prompt_token=prompt_token)
    model.run()
    call.read_all()
    assert prompt_logprobs(call) == tuple(prompt_scores(LONG, 2))[prompt_token or 0 :]
    assert call.tokens() == solo(case).tokens


def test_a_reader_with_tokens_already_has_the_prompt_logprobs(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    request = RequestCase(max_tokens=4, prompt_logprobs=2, keep_s=10.0).request()
    model.submit(request)
    model.run()
    for from_token, count in ((0, 3), (1, 0)):
        call = model.attach(request.id, from_token)
        call.read_all()
        assert len(prompt_logprobs(call)) == count


def test_a_preemption_between_chunks_repeats_and_loses_no_score(new_model: NewModel) -> None:
    model = new_model(num_blocks=12, limits=ONE_AT_A_TIME)
    case = RequestCase(prompt=LONG * 2, max_tokens=1, prompt_logprobs=1, echo=True, logprobs=2)
    call = model.submit(case.request())
    run_steps(model, 2)
    call.read_all()
    model.stop()
    model.start(12)
    model.run()
    call.read_all()
    assert prompt_logprobs(call) == tuple(prompt_scores(case.prompt, 1))
    assert call.tokens() == solo(case).tokens
    assert call.outputs[-1].piece.logprobs == solo(case).logprobs
