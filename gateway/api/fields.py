"""Request fields beside those that are honoured: one table of what happens to each.

Honoured fields are in the request classes; the tables are for all others. A field that is in neither is
served and reported in the header `x-stageline-ignored`, or refused with `--strict-fields`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import invalid

ACCEPTED: Mapping[str, str] = {
    "user": "names the caller's user",
    "metadata": "labels for the caller's records",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "safety_identifier": "names the caller's user",
    "prompt_cache_key": "prefixes are shared by content",
    "prompt_cache_retention": "prefixes are kept while there is room",
    "prediction": "a hint for speed",
    "parallel_tool_calls": "applies to tools, which completions lack",
    "add_special_tokens": "applies to `/tokenize`; prompts follow the tokenizer, chats the template",
    "timeout": "read by clients",
}
"""Fields without effect on the output, and why."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the output: why it is not served, and values that ask for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


REFUSED: Mapping[str, Refused] = {
    "best_of": Refused("choices are not ranked: use n", (1,)),
    "suffix": Refused("there is no infilling", ("",)),
    "use_beam_search": Refused("there is no beam search", (False,)),
    "length_penalty": Refused("there is no beam search", (1, 1.0)),
    "early_stopping": Refused("there is no beam search", (False,)),
    "audio": Refused("the output is text"),
    "modalities": Refused("the output is text", (["text"],)),
    "web_search_options": Refused("there is no search"),
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "tools": Refused("use /v1/chat/completions", ([],)),
    "tool_choice": Refused("use /v1/chat/completions", ("none", "auto")),
    "chat_template": Refused("start the gateway with --chat-template"),
    "documents": Refused("put the documents into messages", ([],)),
    "mm_processor_kwargs": Refused("the input is text", ({},)),
    "logits_processors": Refused("no code of a request is run", ([],)),
    "prompt_embeds": Refused("the input is text or token ids"),
    "spaces_between_special_tokens": Refused("the tokenizer's own spacing is used", (True,)),
    "structural_tag": Refused("use structured_outputs"),
}
"""Fields of other servers that cannot be honoured. `null` and neutral values are accepted."""


HINTS: Mapping[str, tuple[Any, ...]] = {"verbosity": ("medium",)}
"""Wishes about the style that no served model understands, and values that ask for nothing.

They are reported like unknown fields.
"""


MAX_EXTRA_FIELDS = 64
"""Fields beside the honoured ones; a client that sends more sends another format."""
MAX_NAME_CHARACTERS = 64
MAX_NAMED_PARTS = 32
"""Parts of honoured fields that a response names as ignored."""


def check_refused(given: Mapping[str, Any], table: Mapping[str, Refused]) -> None:
    """Raise ApiError for a field of `table` whose value asks for something."""
    for name, refused in table.items():
        value = given.get(name)
        if value is not None and value not in refused.neutral:
            raise invalid(f"{name} is not supported: {refused.why}", param=name)


def asks_nothing(hint: str, value: Any) -> bool:
    """Whether a field of HINTS has a neutral value."""
    return hint in HINTS and (value is None or value in HINTS[hint])


def check_parts(parts: Sequence[str], *, is_strict: bool) -> Sequence[str]:
    """Return what is shown of parts of fields without effect. Raises ApiError if strict for any."""
    if parts and is_strict:
        raise invalid(
            f"{parts[0]} has no effect: leave it out, or start the gateway without --strict-fields",
            param=parts[0].partition(" ")[0],
        )
    more = len(parts) - MAX_NAMED_PARTS
    return [*parts[:MAX_NAMED_PARTS], *([f"{more} more"] if more > 0 else ())]


def short_name(name: str) -> str:
    """Return what is shown of a client's name for something."""
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[:MAX_NAME_CHARACTERS]}..."


def header_name(name: str) -> str:
    """Return a client's name for something as a header shows it."""
    name = short_name(name)
    is_plain = name.isascii() and name.isprintable() and name == name.strip() != ""
    return name if is_plain else ascii(name)


def check_fields(
    extra: Mapping[str, Any] | None, *, is_strict: bool, known: Collection[str] = ()
) -> Collection[str]:
    """Return the names of unknown fields. Raises ApiError for a refused one, or if strict for any.

    `known` fields are checked by the API.
    """
    if extra and len(extra) > MAX_EXTRA_FIELDS:
        raise invalid(f"the body has {len(extra)} unknown fields, the limit is {MAX_EXTRA_FIELDS}")
    ignored = []
    for name, value in (extra or {}).items():
        if name in ACCEPTED or name in known or asks_nothing(name, value):
            continue
        if name in REFUSED:
            check_refused({name: value}, {name: REFUSED[name]})
        else:
            ignored.append(name)
    if ignored and is_strict:
        name = short_name(ignored[0])
        raise invalid(f"unknown field {name!r}", param=name)
    return ignored
