"""Stop strings with the built-in model: generation ends there, and no part of one is sent."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from builtin_model import MODEL_DIRECTORY
from tests.integration.calls import LENGTH, STOP, Caller, Received, ReceivedChoice, message
from tests.integration.cluster import Cluster
from text.tokenizer import TextCodec, load_text_codec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time"
NUM_TOKENS = 60
FALSE_START = ", there was a big race"
"""Follows ", there was a brave girl" in the story."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(None, layers=(6, 6), has_text=True, max_kv_tokens=4096) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def caller(cluster: Cluster) -> AsyncIterator[Caller]:
    async with Caller(cluster.address) as caller:
        yield caller


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def story(caller: Caller) -> Received:
    """Output without stop strings."""
    return await caller.run(message(PROMPT, NUM_TOKENS))


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    codec = load_text_codec(MODEL_DIRECTORY)
    assert codec is not None
    return codec


def check(
    stopped: ReceivedChoice, undisturbed: ReceivedChoice, stops: Sequence[str], codec: TextCodec
) -> None:
    """Assert that the output ended at the first token that completes a stop string, before that string."""
    texts = [codec.decode(undisturbed.tokens[:end]) for end in range(len(undisturbed.tokens) + 1)]
    ends = [end for end, text in enumerate(texts) if any(stop in text for stop in stops)]
    if not ends:
        assert (stopped.tokens, stopped.text) == (undisturbed.tokens, undisturbed.text)
        assert stopped.finish_reason == undisturbed.finish_reason
        return
    assert stopped.tokens == undisturbed.tokens[: ends[0]]
    assert stopped.usage.completion_tokens == ends[0]
    text = texts[ends[0]]
    # Of several in one token, the first complete one counts; of those that end together, the longest.
    _, begin = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    assert stopped.text == text[:begin]
    assert stopped.finish_reason == STOP


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([" brave girl named"], id="whole tokens"),
        pytest.param(["ave girl na"], id="parts of tokens"),
        pytest.param(["nna"], id="inside a token"),
        pytest.param(["."], id="one character"),
        pytest.param([FALSE_START], id="after a false start"),
        pytest.param(["forest", "big race in", "race in the", "dragon"], id="the first of several"),
        pytest.param(["girl named", "ave girl named", "rl name"], id="several that end together"),
        pytest.param(["dragon", "Anna was"], id="none"),
        pytest.param([","], id="the first token"),
    ],
)
async def test_generation_ends_before_the_first_stop_string(
    cluster: Cluster, caller: Caller, story: Received, codec: TextCodec, stops: list[str]
) -> None:
    stopped = await caller.run(message(PROMPT, NUM_TOKENS, stop=stops))
    check(stopped.choices[0], story.choices[0], stops, codec)
    await cluster.wait_drained()


async def test_any_part_of_the_text_stops_the_output(
    cluster: Cluster, caller: Caller, story: Received, codec: TextCodec
) -> None:
    generator = random.Random(11)

    def part() -> str:
        begin = generator.randrange(len(story.text))
        return story.text[begin : begin + generator.randrange(1, 24)]

    chosen = [[part() for _ in range(1 + index % 3)] for index in range(24)]
    received = await asyncio.gather(
        *(caller.run(message(PROMPT, NUM_TOKENS, stop=stops)) for stops in chosen)
    )
    for stops, stopped in zip(chosen, received, strict=True):
        check(stopped.choices[0], story.choices[0], stops, codec)
    await cluster.wait_drained()


@pytest.mark.full
async def test_a_stop_string_in_the_last_token_is_the_finish_reason(
    cluster: Cluster, caller: Caller, story: Received
) -> None:
    stopped = await caller.run(message(PROMPT, NUM_TOKENS, stop=[FALSE_START]))
    num_tokens = len(stopped.tokens)
    last = await caller.run(message(PROMPT, num_tokens, stop=[FALSE_START]))
    assert last.outputs == stopped.outputs == [(story.tokens[:num_tokens], stopped.text, STOP)]
    assert story.text.startswith(stopped.text + FALSE_START)
    # With one token less, the held-back text is sent.
    less = await caller.run(message(PROMPT, num_tokens - 1, stop=[FALSE_START]))
    text = stopped.text + FALSE_START.removesuffix(" race")
    assert less.outputs == [(story.tokens[: num_tokens - 1], text, LENGTH)]
    await cluster.wait_drained()


async def test_a_stop_string_in_the_end_of_sequence_token(cluster: Cluster, caller: Caller) -> None:
    prompt = "A spider has eight legs"
    ends = await caller.run(message(prompt, 20, skip_special_tokens=False))
    assert (ends.text, ends.choices[0].finish_reason) == (".<|end|>", STOP)
    for stop, text in [("<|end|>", "."), (".<|", ""), ("|>", ".<|end"), ("d|>.", ".<|end|>")]:
        stopped = await caller.run(message(prompt, 20, skip_special_tokens=False, stop=[stop]))
        assert stopped.outputs == [(ends.tokens, text, STOP)]
    # Skipped, it adds no text: a possible beginning is held back until the end, and sent then.
    skipped = await caller.run(message(prompt, 20, stop=[".<|"]))
    assert skipped.outputs == [(ends.tokens, ".", STOP)]
    await cluster.wait_drained()


@pytest.mark.full
async def test_choices_stop_one_by_one(cluster: Cluster, caller: Caller, codec: TextCodec) -> None:
    free = await caller.run(message(PROMPT, NUM_TOKENS, seed=5, n=4, ignore_eos=True))
    stops = [" big", ". She", " friend"]
    stopped = await caller.run(message(PROMPT, NUM_TOKENS, seed=5, n=4, ignore_eos=True, stop=stops))
    for index in range(4):
        check(stopped.choices[index], free.choices[index], stops, codec)
    assert len({len(choice.tokens) for choice in stopped.choices.values()}) > 1
    await cluster.wait_drained()


async def test_no_stop_string_ends_the_output_before_min_tokens(
    cluster: Cluster, caller: Caller, story: Received
) -> None:
    stopped = await caller.run(message(PROMPT, NUM_TOKENS, stop=["."], min_tokens=16))
    # The first sentence has fewer than 16 tokens, so the second full stop ends the output.
    assert story.text.startswith(stopped.text + ".")
    assert stopped.text.count(".") == 1
    assert (len(stopped.tokens), stopped.choices[0].finish_reason) == (19, STOP)
    await cluster.wait_drained()
