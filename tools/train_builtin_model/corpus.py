"""The training text: an endless, seeded stream of stories and conversations."""

from collections.abc import Iterator
from random import Random

from tools.train_builtin_model.chat_format import END_OF_TEXT, render
from tools.train_builtin_model.chats import make_conversation
from tools.train_builtin_model.stories import tell_story

STORY_SHARE = 0.4


def documents(seed: int) -> Iterator[str]:
    """Documents, each ending with the end-of-text token; the same seed gives the same stream."""
    rng = Random(seed)
    while True:
        text = tell_story(rng).text if rng.random() < STORY_SHARE else render(make_conversation(rng))
        yield text + END_OF_TEXT
