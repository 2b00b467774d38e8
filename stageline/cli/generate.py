"""`stageline generate`: completions of one prompt."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stageline.cli import options
from stageline.cli.attach import expire_after, forget, store
from stageline.cli.options import CommandFailed, takes
from stageline.cli.output import Report, print_report, show_for, show_stream
from stageline.cli.request_flags import (
    SAMPLING_NUMBER_FLAGS,
    EndingFlags,
    FormFlags,
    LifeFlags,
    MaxTokens,
    OutputFlags,
    SamplingFlags,
    options_from,
    parse_token_ids,
)
from stageline.cli.waiting import with_notices
from stageline.client.client import Client
from stageline.client.connection import new_attach_secret
from stageline.client.errors import StagelineError, Superseded, Unavailable
from stageline.client.request import Detach, GenerateOptions, Prompt
from wire.addresses import DEFAULT_ADDRESS
from wire.exit_codes import ExitCode
from wire.ids import id_text, new_request_id


@takes(SAMPLING_NUMBER_FLAGS, SamplingFlags, EndingFlags, FormFlags, OutputFlags, LifeFlags)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to complete.", show_default=False)],
    max_tokens: MaxTokens = 100,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Read PROMPT as token ids, as in 1,15,7.")
    ] = False,
    json: options.Json = False,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
    **flags: Any,
) -> int:
    """Complete a prompt and print the text as it arrives."""
    given: Prompt = _parse_token_ids(prompt) if token_ids else prompt
    wanted = options_from({**flags, "max_tokens": max_tokens})
    # Created here, to print it before the first output.
    request_id = wanted.setdefault("request_id", id_text(new_request_id())) or ""
    detach = wanted.get("on_disconnect")
    is_detached = detach is not None
    if is_detached:
        wanted["attach_secret"] = new_attach_secret()
    try:
        report = asyncio.run(_run(coordinator, tls_dir, given, wanted, is_json=json))
    except KeyboardInterrupt:
        print(f"\nstageline: {_describe_leaving(request_id, is_detached=is_detached)}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except StagelineError as error:
        if is_detached and not isinstance(error, Unavailable | Superseded):
            forget(request_id)
        raise
    if isinstance(detach, Detach):
        expire_after(request_id, detach.keep_s)
    print_report(report, is_json=json)
    print(f"({_describe(report, wanted)})", file=sys.stderr)
    return 0


async def _run(
    address: str, tls_dir: Path | None, prompt: Prompt, wanted: GenerateOptions, *, is_json: bool
) -> Report:
    async with Client(address, tls_dir=tls_dir) as client:
        model = await client.model()
        if isinstance(prompt, str) and not model.has_tokenizer:
            text = f"model {model.name} has no tokenizer (tokenizer.json): give token ids with --token-ids"
            raise CommandFailed(f"{text}, or {options.COPY_TOKENIZER}", reason="NO_TOKENIZER")
        outputs = client.generate(prompt, **wanted)
        if (secret := wanted.get("attach_secret")) is not None:
            store(wanted["request_id"] or "", secret)
            print(f"(request {wanted['request_id']})", file=sys.stderr)
        num_choices = wanted.get("n") or 1
        show = show_for(num_choices=num_choices, as_token_ids=not model.has_tokenizer, is_json=is_json)
        return await show_stream(with_notices(client, outputs, tls_dir=tls_dir), show)


def _describe(report: Report, wanted: GenerateOptions) -> str:
    reasons = ", ".join(dict.fromkeys(completion.finish_reason for completion in report.completions))
    seed = f"; seed {report.completions[0].usage.seed}" if wanted.get("temperature") else ""
    return f"{report.describe_speed()}; ended by {reasons}{seed}"


def _describe_leaving(request_id: str | None, *, is_detached: bool) -> str:
    if not is_detached:
        return "the request was cancelled"
    return (
        f"the request continues; `stageline attach {request_id}` shows it, "
        f"`stageline cancel {request_id}` ends it"
    )


def _parse_token_ids(text: str) -> list[int]:
    try:
        return parse_token_ids(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="PROMPT") from None
