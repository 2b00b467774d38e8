"""The flags of `stageline bench serve`, and what explains them. What is not given has its default here."""

from functools import partial
from typing import Annotated, TypedDict

import typer

DEFAULT_RATE_PER_S = 4.0
DEFAULT_NUM_REQUESTS = 100
DEFAULT_PROMPT_TOKENS = "128"
DEFAULT_OUTPUT_TOKENS = "64"
DEFAULT_TIMEOUT_S = 600.0

_LENGTHS = "N, uniform:A-B, normal:MEAN,SD or lognormal:MEAN,SD; the last two may end with :A-B, their bounds"

_load = partial(typer.Option, rich_help_panel="When requests arrive")
_shape = partial(typer.Option, rich_help_panel="What a request is")
_slo = partial(typer.Option, metavar="MS", rich_help_panel="Goodput: requests within all of these limits")


class ArrivalFlags(TypedDict, total=False):
    """When requests arrive, and how many."""

    request_rate: Annotated[
        float | None,
        _load(
            metavar="R",
            help=f"Requests per second; inf is all at once; {DEFAULT_RATE_PER_S:g} unless given.",
        ),
    ]
    num_requests: Annotated[
        int | None,
        _load(metavar="N", min=1, help=f"How many; {DEFAULT_NUM_REQUESTS} unless --duration is given."),
    ]
    duration: Annotated[
        float | None, _load(metavar="SECONDS", help="Send what arrives in so long, instead of a number.")
    ]
    burstiness: Annotated[
        float | None,
        _load(metavar="X", help="1, the default, is Poisson; less comes in bursts, more is steadier."),
    ]
    max_concurrency: Annotated[
        int | None,
        _load(metavar="N", min=1, help="Run no more at once; others wait, and their latencies count that."),
    ]
    seed: Annotated[
        int | None,
        _load(metavar="N", min=0, max=2**64 - 1, help="The same seed is the same load, times included; 0."),
    ]
    warmup: Annotated[
        int | None, _load(metavar="N", min=0, help="Send so many before, at once, and do not count them.")
    ]


class ShapeFlags(TypedDict, total=False):
    """What a request is."""

    prompt_tokens: Annotated[
        str | None,
        _shape(
            metavar="LENGTHS", help=f"Random token ids: {_LENGTHS}; {DEFAULT_PROMPT_TOKENS} unless given."
        ),
    ]
    output_tokens: Annotated[
        str | None,
        _shape(metavar="LENGTHS", help=f"Exact output lengths; {DEFAULT_OUTPUT_TOKENS} unless given."),
    ]
    shared_prefix: Annotated[
        int | None,
        _shape(metavar="N", min=0, help="So many tokens before each prompt are the same in its group."),
    ]
    prefix_groups: Annotated[
        int | None,
        _shape(metavar="K", min=1, help="Groups that requests fall into; 1 unless given."),
    ]
    temperature: Annotated[
        float | None, _shape(metavar="T", min=0, help="0, the default, always takes the likeliest token.")
    ]
    timeout: Annotated[
        float | None,
        _shape(
            metavar="SECONDS",
            help=f"Most time from sending a request to its end; {DEFAULT_TIMEOUT_S:g} unless given.",
        ),
    ]


class LimitFlags(TypedDict, total=False):
    """What counts as good."""

    slo_ttft: Annotated[float | None, _slo(help="Time to the first token, from when the request was due.")]
    slo_itl: Annotated[float | None, _slo(help="The longest gap between two messages of a request.")]
    slo_tpot: Annotated[float | None, _slo(help="Mean time per output token after the first one.")]
    slo_e2e: Annotated[float | None, _slo(help="Time to the last token, from when the request was due.")]
