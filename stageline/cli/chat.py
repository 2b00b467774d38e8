"""`stageline chat`: a conversation with the model."""

import asyncio
import contextlib
import sys
from typing import Any

from stageline.cli import options
from stageline.cli.options import CommandFailed, report, takes
from stageline.cli.output import live, show_stream
from stageline.cli.request_flags import (
    SAMPLING_NUMBER_FLAGS,
    EndingFlags,
    MaxTokens,
    SamplingFlags,
    options_from,
)
from stageline.cli.waiting import with_notices
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from stageline.client.request import ChatMessage
from wire.addresses import DEFAULT_ADDRESS

with contextlib.suppress(ImportError):  # line editing and history for input(), where available
    import readline  # noqa: F401


@takes(SAMPLING_NUMBER_FLAGS, SamplingFlags, EndingFlags)
def chat(
    max_tokens: MaxTokens = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
    **flags: Any,
) -> int:
    """Chat with a model. [bold]/reset[/] clears the history, [bold]/exit[/] ends; Ctrl-C stops an answer."""
    history: list[ChatMessage] = []
    wanted = options_from({**flags, "max_tokens": max_tokens})

    async def check_model() -> None:
        async with Client(coordinator, tls_dir=tls_dir) as client:
            model = await client.model()
        if not model.has_chat_template:
            if not model.has_tokenizer:
                text = f"model {model.name} has no tokenizer (tokenizer.json), which a chat needs"
                raise CommandFailed(f"{text}: {options.COPY_TOKENIZER}", reason="NO_TOKENIZER")
            text = f"model {model.name} has no chat template; use `stageline generate`"
            raise CommandFailed(text, reason="NO_CHAT_TEMPLATE")
        _say(f"Chatting with {model.name}. /reset clears the history, /exit ends the chat.")

    async def answer() -> str:
        async with Client(coordinator, tls_dir=tls_dir) as client:
            outputs = with_notices(client, client.generate(history, **wanted), tls_dir=tls_dir)
            report = await show_stream(outputs, live(as_token_ids=False))
        return report.completions[0].text

    with asyncio.Runner() as runner:
        runner.run(check_model())
        while (said := _next_line(history)) is not None:
            history.append({"role": "user", "content": said})
            try:
                history.append({"role": "assistant", "content": runner.run(answer()).strip()})
            except KeyboardInterrupt:
                history.pop()
                _say("\n(stopped; your last message is dropped)")
            except StagelineError as error:
                history.pop()
                report(str(error), reason=error.reason)
    return 0


def _next_line(history: list[ChatMessage]) -> str | None:
    """Read the user's next message and run commands such as /reset. None at the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return None
        if line == "/exit":
            return None
        if line == "/reset":
            history.clear()
            _say("(history cleared)")
        elif line.startswith("/"):
            _say(f"(no command {line}; there are /reset and /exit)")
        elif line:
            return line


def _say(text: str) -> None:
    # Standard output has only the model's answers, for use in pipes.
    print(text, file=sys.stderr, flush=True)
