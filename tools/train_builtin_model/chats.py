"""Short conversations: greetings, little facts, small sums, stories and questions about them."""

from collections.abc import Callable
from random import Random

from tools.train_builtin_model import words
from tools.train_builtin_model.facts import FACTS
from tools.train_builtin_model.fallback import unknown_question
from tools.train_builtin_model.smalltalk import farewell, greeting, introduction, mood
from tools.train_builtin_model.stories import Story, tell_story, with_article

Message = dict[str, str]
Turns = list[tuple[str, str]]
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You tell stories to children.",
    "Answer in short sentences.", "Be kind.", "You are Stageline's little built-in model.",
)  # fmt: skip
STORY_REQUESTS = (
    "Tell me a story about {}.", "Can you tell me a story about {}?", "Please tell me a story about {}.",
    "I would like a story about {}.", "Write a story about {}.", "A story about {}, please.",
    "Tell a story about {}.", "Write a short story about {}.", "Do you know a story about {}?",
)  # fmt: skip
ANY_STORY_REQUESTS = (
    "Tell me a story.", "Can you tell me a story?", "Tell me another story.",
    "Please tell me a bedtime story.", "Write a story.", "I want to hear a story.",
    "Tell me a little story, please.", "Once upon a time",
)  # fmt: skip

ACCEPTS = ("Yes, please!", "Yes.", "Yes please", "Yes!", "Sure!", "OK", "Of course.")
DECLINES = ("No, thank you.", "No.", "Not now.")


def _requested_story(rng: Random) -> tuple[str, Story]:
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(ANY_STORY_REQUESTS), tell_story(rng)
    request = rng.choice(STORY_REQUESTS)
    if draw < 0.4:
        colour, toy = rng.choice(words.COLOURS), rng.choice(words.TOYS)
        return request.format(with_article(f"{colour} {toy}")), tell_story(rng, colour=colour, toy=toy)
    kind = rng.choice([*words.ANIMALS, "girl", "boy"])
    if draw < 0.75:
        return request.format(with_article(kind)), tell_story(rng, kind=kind)
    name = rng.choice(words.BOYS if kind == "boy" or (kind != "girl" and rng.random() < 0.5) else words.GIRLS)
    return request.format(f"{with_article(kind)} named {name}"), tell_story(rng, kind=kind, name=name)


def _story_turns(rng: Random) -> Turns:
    request, story = _requested_story(rng)
    asked = rng.sample(story.questions, k=rng.randint(0, min(3, len(story.questions))))
    return [(request, story.text), *asked]


def _small_turns(rng: Random) -> Turns:
    makers: tuple[Callable[[Random], Turns], ...] = (greeting, introduction, mood)
    draw = rng.random()
    if draw < 0.25:
        return rng.choice(makers)(rng)
    if draw < 0.40:
        return [unknown_question(rng)]
    return [rng.choice(FACTS)(rng) for _ in range(rng.randint(1, 3))]


def _reply_to_offer(rng: Random) -> Turns:
    """Continue after the model has offered a story."""
    if rng.random() < 0.25:
        return [(rng.choice(DECLINES), "All right! What else would you like?")]
    return [(rng.choice(ACCEPTS), tell_story(rng).text)]


def _typed(rng: Random, question: str) -> str:
    """Vary `question` like typed text: sometimes in lower case, sometimes without its last mark."""
    if rng.random() < 0.15:
        question = question.lower()
    return question.rstrip("?.!") if rng.random() < 0.15 else question


def make_conversation(rng: Random) -> list[Message]:
    """Make a conversation, sometimes with a system message. A part is one story or a few short turns."""
    num_parts = rng.choice((1, 1, 2))
    turns: Turns = greeting(rng) if rng.random() < 0.2 else []
    for _ in range(num_parts):
        turns += _story_turns(rng) if rng.random() < 0.3 else _small_turns(rng)
        if turns[-1][1].endswith("story?") and rng.random() < 0.3:
            turns += _reply_to_offer(rng)
    if rng.random() < 0.15:
        turns.append(farewell(rng))
    messages: list[Message] = []
    if rng.random() < 0.12:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for question, answer in turns:
        messages.append({"role": "user", "content": _typed(rng, question)})
        messages.append({"role": "assistant", "content": answer})
    return messages
