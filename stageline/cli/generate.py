"""`stageline generate`: one completion."""

import asyncio
import sys
from typing import Annotated

import typer

from stageline.cli import options
from stageline.cli.failures import INTERRUPTED, CommandFailed
from stageline.cli.stream import Completion, write_stream
from stageline.client import Client
from stageline.prompt import Prompt


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to complete.", show_default=False)],
    max_tokens: options.MaxTokens = 100,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
    ] = False,
    cache_salt: Annotated[
        str,
        typer.Option(
            "--cache-salt", metavar="TEXT", help="Share cached prefixes with requests of this salt only."
        ),
    ] = "",
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="PROMPT is token ids, as in 1,15,7.")
    ] = False,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """Complete a prompt, and write the text as it arrives."""
    given: Prompt = _parse_token_ids(prompt) if token_ids else prompt

    async def run() -> Completion:
        async with Client(coordinator) as client:
            model = await client.model()
            if isinstance(given, str) and not model.has_tokenizer:
                raise CommandFailed(f"model {model.name} has no tokenizer: give token ids with --token-ids")
            outputs = client.generate(
                given,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                ignore_eos=ignore_eos,
                cache_salt=cache_salt,
            )
            return await write_stream(outputs, as_token_ids=not model.has_tokenizer)

    try:
        completion = asyncio.run(run())
    except KeyboardInterrupt:
        print("\nstageline: the request was cancelled", file=sys.stderr)
        return INTERRUPTED
    print(f"({_describe(completion, temperature)})", file=sys.stderr)
    return 0


def _describe(completion: Completion, temperature: float | None) -> str:
    seed = f"; seed {completion.usage.seed}" if temperature else ""
    return f"{completion.describe_speed()}; ended by {completion.finish_reason.value}{seed}"


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        message = f"{text!r} is not a list of token ids such as 1,15,7"
        raise typer.BadParameter(message, param_hint="PROMPT") from None
