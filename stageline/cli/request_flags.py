"""Flags of a request and their conversion to `Client.generate` keywords."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict, cast

import typer

from stageline.client.request import Detach, GenerateOptions, Priority

_sampling = partial(typer.Option, rich_help_panel="Sampling")
_ending = partial(typer.Option, rich_help_panel="Length and end")
_form = partial(typer.Option, rich_help_panel="Form of the output (at most one of these)")
_output = partial(typer.Option, rich_help_panel="What comes back")
_life = partial(typer.Option, rich_help_panel="The request's life")


MaxTokens: TypeAlias = Annotated[
    int | None, _ending(metavar="N", min=0, help="Most new tokens; 0 computes the prompt only.")
]
"""Its default is the command's own."""


class SamplingFlags(TypedDict, total=False):
    """Which token comes next."""

    temperature: Annotated[
        float | None,
        _sampling(metavar="T", min=0, help="0 always takes the likeliest token; 1 samples as trained."),
    ]
    top_k: Annotated[
        int | None, _sampling(metavar="K", min=0, help="Sample among the K likeliest tokens; 0 is all.")
    ]
    top_p: Annotated[
        float | None, _sampling(metavar="P", help="Sample among the likeliest tokens that make up share P.")
    ]
    min_p: Annotated[
        float | None, _sampling(metavar="P", help="Drop tokens less likely than P times the likeliest one.")
    ]
    typical_p: Annotated[
        float | None,
        _sampling(metavar="P", help="Sample among the most typical tokens that make up share P."),
    ]
    repetition_penalty: Annotated[
        float | None, _sampling(metavar="X", help="Above 1: make tokens of prompt and output less likely.")
    ]
    frequency_penalty: Annotated[
        float | None, _sampling(metavar="X", help="Taken off a token's logit for each time it came.")
    ]
    presence_penalty: Annotated[
        float | None, _sampling(metavar="X", help="Taken off a token's logit once it has come.")
    ]
    seed: Annotated[int | None, _sampling(metavar="N", min=0, help="The same seed samples the same tokens.")]
    logit_bias: Annotated[
        list[str] | None, _sampling(metavar="ID=BIAS", help="Added to the logit of a token; repeatable.")
    ]
    allowed_token_ids: Annotated[str | None, _sampling(metavar="ID,...", help="Generate none but these.")]
    bad_words: Annotated[
        list[str] | None, _sampling("--bad-word", metavar="TEXT", help="Never generate this; repeatable.")
    ]
    bad_word_ids: Annotated[
        list[str] | None,
        _sampling(metavar="ID,...", help="The same, as a sequence of token ids; repeatable."),
    ]


class EndingFlags(TypedDict, total=False):
    """When it ends, besides --max-tokens."""

    min_tokens: Annotated[
        int | None, _ending(metavar="N", min=0, help="Do not end before so many new tokens.")
    ]
    stop: Annotated[
        list[str] | None, _ending(metavar="TEXT", help="End before this text, without it; repeatable.")
    ]
    stop_token_ids: Annotated[str | None, _ending(metavar="ID,...", help="End after one of these tokens.")]
    ignore_eos: Annotated[bool | None, _ending("--ignore-eos", help="Go on after an end-of-sequence token.")]


class FormFlags(TypedDict, total=False):
    """Structured output."""

    json_schema: Annotated[str | None, _form(metavar="TEXT|@FILE", help="JSON that fits this JSON schema.")]
    regex: Annotated[str | None, _form(metavar="REGEX", help="Text that this expression matches.")]
    choice: Annotated[list[str] | None, _form(metavar="TEXT", help="One of these texts; repeatable.")]
    grammar: Annotated[
        str | None, _form(metavar="TEXT|@FILE", help="Text of this context-free grammar, in Lark's syntax.")
    ]


class OutputFlags(TypedDict, total=False):
    """What comes back."""

    n: Annotated[
        int | None,
        _output(
            "--n", "-n", metavar="N", min=1, help="So many completions; each is written when it has ended."
        ),
    ]
    echo: Annotated[bool | None, _output("--echo/--no-echo", help="Begin with the prompt.")]
    skip_special_tokens: Annotated[
        bool | None,
        _output(
            "--skip-special-tokens/--no-skip-special-tokens",
            help="Leave special tokens out of the text, as is usual.",
        ),
    ]
    logprobs: Annotated[
        int | None,
        _output(
            metavar="N", min=0, help="Log-probabilities of each new token and of the N likeliest, as a table."
        ),
    ]
    prompt_logprobs: Annotated[
        int | None, _output(metavar="N", min=0, help="The same for the tokens of the prompt.")
    ]


class LifeFlags(TypedDict, total=False):
    """How the request waits, and how it ends."""

    cache_salt: Annotated[
        str | None, _life(metavar="TEXT", help="Share cached prefixes with requests of this salt only.")
    ]
    prefix_cache: Annotated[
        bool | None,
        _life(
            "--prefix-cache/--no-prefix-cache",
            help="Share cached KV blocks with other requests (default: share).",
        ),
    ]
    priority: Annotated[Priority | None, _life(help="The class in which it waits; normal unless given.")]
    on_disconnect: Annotated[
        float | None,
        _life(
            "--detach",
            metavar="SECONDS",
            help="Go on without this command, and keep the output so long: see `stageline attach`.",
        ),
    ]
    request_id: Annotated[str | None, _life(metavar="UUID", help="UUIDv7; made here unless given.")]
    timeout_s: Annotated[
        float | None, _life("--timeout", metavar="SECONDS", min=0, help="Cancel it after so long.")
    ]


def options_from(flags: Mapping[str, Any]) -> GenerateOptions:
    """The options that the user has given. Raises typer.BadParameter, which names the flag."""
    # A flag that may be repeated is an empty list where it is not given.
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    return cast("GenerateOptions", {name: _convert(name, value) for name, value in given.items()})


def parse_token_ids(text: str) -> list[int]:
    """Token ids, as in 1,15,7. Raises ValueError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token ids such as 1,15,7") from None


def _convert(name: str, value: Any) -> object:
    try:
        return _CONVERSIONS[name](value) if name in _CONVERSIONS else value
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None


def _biases(entries: list[str]) -> dict[int, float]:
    return dict(map(_bias, entries))


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"{entry!r} is not ID=BIAS, for example 15=-2.5") from None


def _text_or_file(text: str) -> str:
    """The text itself, or what is in the file that @FILE names."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{text[1:]!r} is not UTF-8 text") from None


_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "logit_bias": _biases,
    "allowed_token_ids": parse_token_ids,
    "stop_token_ids": parse_token_ids,
    "bad_word_ids": lambda entries: [parse_token_ids(entry) for entry in entries],
    "json_schema": _text_or_file,
    "grammar": _text_or_file,
    "on_disconnect": lambda keep_s: Detach(keep_s=keep_s),
}
