"""Helpers: an answer parsed in pieces, and cuts."""

import random
from collections.abc import Iterable, Sequence

from gateway.parsers.answer import AnswerParser
from gateway.parsers.calls import ToolDefinition
from gateway.parsers.events import ParsedAnswer
from gateway.parsers.families import ParserChoice, choose_parsers

WEATHER = ToolDefinition(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "zip": {"type": "string"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = ToolDefinition("clock", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)


def choice_of(tool_parser: str, reasoning_parser: str = "none") -> ParserChoice:
    return choose_parsers(tool_parser, reasoning_parser, chat_template=None)


def new_parser(
    tool_parser: str,
    reasoning_parser: str = "none",
    *,
    prompt: str = "",
    tools: Sequence[ToolDefinition] = TOOLS,
) -> AnswerParser:
    return choice_of(tool_parser, reasoning_parser).new_parser(prompt=prompt, tools=tools, id_seed="seed")


def parse(parser: AnswerParser, pieces: Iterable[str]) -> ParsedAnswer:
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    return answer


def cut(text: str, seed: int) -> list[str]:
    """Cut into pieces of 1 to about 10 characters."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 5, 10))
        pieces.append(text[at : at + size])
        at += size
    return pieces


def all_cuts(text: str) -> Iterable[list[str]]:
    """The whole text, every cut in two, characters, and random pieces."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield list(text)
    yield from (cut(text, seed) for seed in range(20))
