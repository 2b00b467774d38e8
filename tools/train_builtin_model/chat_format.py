"""Format of conversations: special tokens and chat template."""

from collections.abc import Sequence

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
# A token's place here is its id.
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def render(messages: Sequence[dict[str, str]]) -> str:
    """The text of a finished conversation, as `CHAT_TEMPLATE` gives it."""
    return "".join(f"<|{message['role']}|>{message['content'].strip()}{END_OF_TURN}" for message in messages)
