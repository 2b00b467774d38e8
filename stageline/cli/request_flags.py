"""Flags of a request and their conversion to `Client.generate` keywords."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict, cast

import typer

from stageline.cli.options import option_parser, parse_non_negative, parse_number
from stageline.client.request import Detach, GenerateOptions, Priority
from wire.sampling import KEEP_RANGE_S, SAMPLING_NUMBERS, Range, SamplingNumber

_non_negative = option_parser(parse_non_negative)

_sampling = partial(typer.Option, rich_help_panel="Sampling")
_ending = partial(typer.Option, rich_help_panel="Length and stopping")
_form = partial(typer.Option, rich_help_panel="Structured output (at most one of these)")
_output = partial(typer.Option, rich_help_panel="Output")
_life = partial(typer.Option, rich_help_panel="Scheduling and lifetime")


MaxTokens: TypeAlias = Annotated[
    int | None, _ending(metavar="N", min=0, help="Maximum new tokens; 0 computes the prompt only.")
]
"""Each command has its own default."""


def _parser_of(valid: Range) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = parse_number(text)
        if value not in valid:
            raise ValueError(f"{text!r} is not in {valid}")
        return value

    return option_parser(parse)


def _number_flag(number: SamplingNumber) -> inspect.Parameter:
    text = f"{number.range.help.removesuffix('.')}; in {number.range}."
    flag = _sampling(metavar=number.range.metavar, parser=_parser_of(number.range), help=text)
    hint = Annotated[float | None, flag]
    return inspect.Parameter(number.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


SAMPLING_NUMBER_FLAGS = tuple(map(_number_flag, SAMPLING_NUMBERS))


class SamplingFlags(TypedDict, total=False):
    """Sampling of the next token, beside `SAMPLING_NUMBER_FLAGS`."""

    top_k: Annotated[
        int | None, _sampling(metavar="K", min=0, help="Sample from the K likeliest tokens; 0 disables it.")
    ]
    seed: Annotated[
        int | None, _sampling(metavar="N", min=0, help="Random seed; the same seed samples the same tokens.")
    ]
    logit_bias: Annotated[
        list[str] | None,
        _sampling(metavar="ID=BIAS", help="Value added to the logit of a token; repeatable."),
    ]
    allowed_token_ids: Annotated[str | None, _sampling(metavar="ID,...", help="Only token ids to generate.")]
    bad_words: Annotated[
        list[str] | None, _sampling("--bad-word", metavar="TEXT", help="Text never to generate; repeatable.")
    ]
    bad_word_ids: Annotated[
        list[str] | None,
        _sampling(metavar="ID,...", help="Token ids never to generate in sequence; repeatable."),
    ]


class EndingFlags(TypedDict, total=False):
    """Stopping conditions besides --max-tokens."""

    min_tokens: Annotated[int | None, _ending(metavar="N", min=0, help="Minimum new tokens before stopping.")]
    stop: Annotated[list[str] | None, _ending(metavar="TEXT", help="Text to stop before; repeatable.")]
    stop_token_ids: Annotated[str | None, _ending(metavar="ID,...", help="Token ids to stop after.")]
    ignore_eos: Annotated[
        bool | None, _ending("--ignore-eos", help="Continue after an end-of-sequence token.")
    ]


class FormFlags(TypedDict, total=False):
    """Structured output."""

    json_schema: Annotated[str | None, _form(metavar="TEXT|@FILE", help="JSON schema of the output.")]
    regex: Annotated[str | None, _form(metavar="REGEX", help="Regular expression of the output.")]
    choice: Annotated[list[str] | None, _form(metavar="TEXT", help="Allowed output; repeatable.")]
    grammar: Annotated[
        str | None, _form(metavar="TEXT|@FILE", help="Context-free grammar of the output, in Lark's syntax.")
    ]


class OutputFlags(TypedDict, total=False):
    """Parts of the output."""

    n: Annotated[
        int | None,
        _output(
            "--n",
            "-n",
            metavar="N",
            min=1,
            help="Number of completions; each is printed when it ends (default: 1).",
        ),
    ]
    echo: Annotated[bool | None, _output("--echo/--no-echo", help="Print the prompt first (default: off).")]
    skip_special_tokens: Annotated[
        bool | None,
        _output(
            "--skip-special-tokens/--no-skip-special-tokens",
            help="Omit special tokens from the text (default: on).",
        ),
    ]
    logprobs: Annotated[
        int | None,
        _output(metavar="N", min=0, help="Table of log-probabilities of each new token and the N likeliest."),
    ]
    prompt_logprobs: Annotated[
        int | None, _output(metavar="N", min=0, help="Table of log-probabilities of the prompt's tokens.")
    ]


class LifeFlags(TypedDict, total=False):
    """Scheduling and lifetime of the request."""

    cache_salt: Annotated[
        str | None, _life(metavar="TEXT", help="Share cached prefixes only with requests of the same salt.")
    ]
    prefix_cache: Annotated[
        bool | None,
        _life(
            "--prefix-cache/--no-prefix-cache",
            help="Share cached KV blocks with other requests (default: on).",
        ),
    ]
    priority: Annotated[Priority | None, _life(help="Priority class in the queue (default: normal).")]
    on_disconnect: Annotated[
        float | None,
        _life(
            "--detach",
            metavar="SECONDS",
            parser=_parser_of(KEEP_RANGE_S),
            help="Continue when this command exits, and keep the output this long, in "
            f"{KEEP_RANGE_S}; see `stageline attach`.",
        ),
    ]
    request_id: Annotated[
        str | None, _life(metavar="UUID", help="Request id, a UUIDv7 (default: a new one).")
    ]
    timeout_s: Annotated[
        float | None,
        _life(
            "--timeout",
            metavar="SECONDS",
            parser=_non_negative,
            help="Deadline after which the request is cancelled (default: none).",
        ),
    ]


def options_from(flags: Mapping[str, Any]) -> GenerateOptions:
    """Build request options from set flags. Raises typer.BadParameter, which names the flag."""
    # An unset repeatable flag is an empty list.
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
        return int(token_id), parse_number(bias)
    except ValueError:
        raise ValueError(f"{entry!r} is not ID=BIAS, for example 15=-2.5") from None


def _text_or_file(text: str) -> str:
    """Return the text, or the content of the file for @FILE."""
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
