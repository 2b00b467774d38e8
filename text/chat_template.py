"""Chat templates: a conversation as the text of its prompt.

Templates take the content of a message as a string or as a list of parts, and several system messages or one.
A conversation is rendered in the first form in which the template accepts it and every text of it arrives.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from text.jinja_template import render_template, select_template
from text.tokenizer_json import Templates

PARTS_BETWEEN = "\n"
"""Between the parts of a content that is rendered as a string."""
_MESSAGES_BETWEEN = "\n\n"
_SYSTEM_ROLES = ("system", "developer")
_REASONING_END = "</think>"

Message: TypeAlias = dict[str, Any]

_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template`, which no variable of a template can be named."""


class ConversationError(ValueError):
    """Base of this module's errors."""


class NoChatTemplate(ConversationError):
    """A conversation was sent to a model without a chat template."""


class BadConversation(ConversationError):
    """The conversation is empty, the chat template rejects it, or leaves out a text of it.

    Attributes:
        lost_role: The role of the message whose text is left out; None for other reasons.
    """

    def __init__(self, message: str, *, lost_role: str | None = None) -> None:
        super().__init__(message)
        self.lost_role = lost_role


class BadTemplateVariable(ConversationError):
    """A variable has a name that the chat template's own arguments have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How a conversation is rendered. `template` replaces the model's, `variables` are for it alone."""

    template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = TemplateOptions()


class TemplateSource(Protocol):
    """A tokenizer's templates, and the special tokens that they print."""

    @property
    def chat_template(self) -> Templates: ...
    @property
    def special_tokens_map(self) -> Mapping[str, str]: ...


class ChatTemplate:
    """The chat template of a tokenizer, or another one in its place. Runs in Jinja's sandbox."""

    def __init__(self, tokenizer: TemplateSource) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        """Return the prompt. The content of a message is a string, or a list of parts of type "text".

        Arguments of tool calls are objects, or strings where they are no JSON object.

        Raises NoChatTemplate, BadTemplateVariable, and BadConversation with the reason, also if a text does
        not reach the prompt.
        """
        if not self._tokenizer.chat_template and options.template is None:
            raise NoChatTemplate("the model's tokenizer has no chat template: send text or token ids")
        if not messages:
            raise BadConversation("conversation has no messages, at least 1 is needed")
        if taken := sorted(_ARGUMENTS & options.variables.keys()):
            raise BadTemplateVariable(f"{taken[0]!r} cannot be a variable of the chat template")
        rendering = _Rendering(self._tokenizer, options)
        conversation = self._with_known_roles(messages, options)
        try:
            return rendering.render(conversation)
        except BadConversation as error:
            raise _unless_arguments(error, conversation, rendering) from None

    def _with_known_roles(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions
    ) -> list[Message]:
        """Rename OpenAI's newer name of "system" for templates that do not know it."""
        try:
            template: object = _select(self._tokenizer, options)
        except ValueError as error:
            raise BadConversation(f"the tokenizer has no default chat template: {error}") from error
        if not isinstance(template, str):
            raise BadConversation(f"the chat template is a {type(template).__name__}, must be a text")
        copies = [dict(message) for message in messages]
        for message in copies if "developer" not in template else ():
            if message.get("role") == "developer":
                message["role"] = "system"
        return copies


def _select(tokenizer: TemplateSource, options: TemplateOptions) -> str:
    return select_template(tokenizer.chat_template, options.template, has_tools=options.tools is not None)


class _Rendering:
    """Renders conversations with one template and its options."""

    def __init__(self, tokenizer: TemplateSource, options: TemplateOptions) -> None:
        self._tokenizer, self._options = tokenizer, options

    def render(self, messages: Sequence[Message]) -> str:
        """Render the first form that the template takes; raise the problem of the messages as they are."""
        problem: BadConversation | None = None
        for form in _forms(messages):
            try:
                return self._render_contents(form)
            except BadConversation as error:
                problem = problem or error
                if error.lost_role not in (None, "assistant", *_SYSTEM_ROLES):
                    break  # the other forms change nothing about it
        assert problem is not None
        raise problem

    def _render_contents(self, messages: Sequence[Message]) -> str:
        """Render contents as strings, and as parts those that the template loses as strings."""
        attempt = list(messages)
        lost: Mapping[int, str] = dict.fromkeys(range(len(messages)), "")
        problem: BadConversation | None = None
        for shape in (_as_string, _as_parts, _as_one_part):
            attempt = [
                shape(messages[index]) if index in lost else attempt[index] for index in range(len(messages))
            ]
            try:
                text = self._apply(attempt)
                lost = self._lost(attempt)
            except BadConversation as error:
                problem = problem or error
                continue
            if not lost:
                return text
            index, name = next(iter(lost.items()))
            problem = problem or _left_out(name, messages[index].get("role"))
        assert problem is not None
        raise problem

    def _lost(self, messages: Sequence[Message]) -> dict[int, str]:
        """Return the messages of which a text does not reach the prompt, by index, with a name of the text.

        Some templates (Mistral 7B 0.3) render the system message with the user's last message, and leave it
        out until the next one, while tools are called.
        """
        probe = _Probe(messages)
        text = self._apply(probe.messages)
        lost = {**probe.lost(text), **probe.lost_arguments(text), **self._lost_calls(messages)}
        is_system_lost = bool(lost) and all(messages[index]["role"] in _SYSTEM_ROLES for index in lost)
        num_asked = _num_up_to_user(messages)
        if is_system_lost and 0 < num_asked < len(messages):
            return self._lost(messages[:num_asked])
        return lost

    def _lost_calls(self, messages: Sequence[Message]) -> dict[int, str]:
        """`_lost` for calls; none if the template rejects marked names or values, which it looks at then."""
        probe = _CallProbe(messages)
        if not probe.has_calls:
            return {}
        try:
            return probe.lost(self._apply(probe.messages))
        except BadConversation:
            return {}

    def _apply(self, messages: Sequence[Message]) -> str:
        options = self._options
        try:
            return render_template(
                _select(self._tokenizer, options),
                messages,
                tools=options.tools,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                variables={**self._tokenizer.special_tokens_map, **options.variables},
            )
        except Exception as error:  # templates are arbitrary code and raise anything
            raise BadConversation(f"the chat template rejects the conversation: {error}") from error


_PROBE = "7305916482"
_PROBES = re.compile(rf"{_PROBE}\d{{8}}")
_LISTED_PROBE = re.compile(rf"""["']text["']: ["']{_PROBE}\d{{8}}""")
_Needed: TypeAlias = tuple[str, int, str]
"""A number that has to arrive, the index of its message, and a name of the text beside it."""


class _Probe:
    """A conversation with a number on both sides of each text, which shows the texts that a template renders.

    Numbers arrive however a template trims, escapes or encodes a text. These texts have to arrive: contents,
    from beginning to end, and arguments of calls that are strings. Left out on purpose is the beginning of an
    assistant's message, where reasoning stands, and reasoning alone beside calls.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._contents: list[_Needed] = []
        self._arguments: list[_Needed] = []
        self._num_probes = 0
        self._has_parts = any(isinstance(message.get("content"), list) for message in messages)
        self.messages = [self._marked(index, message) for index, message in enumerate(messages)]

    def lost(self, text: str) -> dict[int, str]:
        """Return the messages with a content that is not in `text`, by index, with a name of the content."""
        if self._has_parts:  # a template that prints the list itself does not render its parts
            text = _LISTED_PROBE.sub("", text)
        return _not_in(text, self._contents)

    def lost_arguments(self, text: str) -> dict[int, str]:
        """`lost` for arguments of calls."""
        return _not_in(text, self._arguments)

    def _marked(self, index: int, message: Message) -> Message:
        marked, content, calls = dict(message), message.get("content"), message.get("tool_calls")
        if isinstance(content, str):
            marked["content"] = self._marked_content(index, message, content)
        elif isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._marked_content(index, message, part["text"])} for part in content
            ]
        if calls:
            marked["tool_calls"] = [self._marked_call(index, call) for call in calls]
        return marked

    def _marked_content(self, index: int, message: Message, text: str) -> str:
        if not text.strip():
            return text
        begin, end = self._new_probe(), self._new_probe()
        name = f"the text of message {index + 1} (role {reprlib.repr(message['role'])})"
        if message["role"] != "assistant":
            self._contents.append((begin, index, name))
        if not message.get("tool_calls") or _after_reasoning(text):
            self._contents.append((end, index, name))
        return f"{begin}{text}{end}"

    def _marked_call(self, index: int, call: object) -> object:
        if (text := _text_arguments(call)) is None:
            return call
        begin, end = self._new_probe(), self._new_probe()
        self._arguments += [(probe, index, _arguments_name(index, call)) for probe in (begin, end)]
        return _with_arguments(call, f"{begin}{text}{end}")

    def _new_probe(self) -> str:
        self._num_probes += 1
        return f"{_PROBE}{self._num_probes:08d}"


class _CallProbe:
    """A conversation with a number in the name and in each argument of each call.

    Of a call, one argument has to arrive; its name, or what stands for an argument, where it has none. A
    template may render the arguments that it knows, without the name.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._num_probes = 0
        self._needed: list[tuple[list[str], int, str]] = []
        self.messages = [self._marked(index, message) for index, message in enumerate(messages)]

    @property
    def has_calls(self) -> bool:
        return bool(self._needed)

    def lost(self, text: str) -> dict[int, str]:
        """Return the messages with a call that is not in `text`, by index, with a name of the call."""
        arrived = set(_PROBES.findall(text))
        return {index: name for probes, index, name in self._needed if arrived.isdisjoint(probes)}

    def _marked(self, index: int, message: Message) -> Message:
        return _with_calls(message, lambda call: self._marked_call(index, call))

    def _marked_call(self, index: int, call: object) -> object:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            return call
        begin, arguments = self._num_probes, function.get("arguments")
        marked: Message = {"arguments": self._marked_value(arguments)}
        if self._num_probes == begin:
            marked = {"name": f"{function.get('name')}{self._new_probe()}"}
            if isinstance(arguments, dict):
                marked["arguments"] = {**arguments, "arguments": self._new_probe()}
        probes = [self._probe(number + 1) for number in range(begin, self._num_probes)]
        name = f"{reprlib.repr(function.get('name'))} with {reprlib.repr(arguments)} in message {index + 1}"
        self._needed.append((probes, index, f"the call {name}"))
        return {**call, "function": {**function, **marked}}

    def _marked_value(self, value: Any) -> Any:
        """Mark texts and whole numbers, which stay what they are."""
        if isinstance(value, dict):
            return {key: self._marked_value(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._marked_value(child) for child in value]
        if isinstance(value, str):
            return f"{value}{self._new_probe()}"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return int(self._new_probe()) if is_number else value

    def _new_probe(self) -> str:
        self._num_probes += 1
        return self._probe(self._num_probes)

    @staticmethod
    def _probe(number: int) -> str:
        return f"{_PROBE}{number:08d}"


def _not_in(text: str, needed: Sequence[_Needed]) -> dict[int, str]:
    arrived = set(_PROBES.findall(text))
    return {index: name for probe, index, name in needed if probe not in arrived}


def _left_out(name: str, role: object) -> BadConversation:
    return BadConversation(
        f"{name} does not reach the prompt: the chat template leaves it out. "
        "Send it as text of a role that the template renders, or serve another template (--chat-template)",
        lost_role=str(role),
    )


def _unless_arguments(
    error: BadConversation, messages: Sequence[Message], rendering: _Rendering
) -> BadConversation:
    """Return `error`, or one that names the call if the template renders it with an object as arguments."""
    names: list[str] = []
    repaired: list[Message] = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        names += [_arguments_name(index, call) for call in calls if _text_arguments(call) is not None]
        repaired.append(_with_calls(message, _with_object_arguments))
    if not names:
        return error
    try:
        rendering.render(repaired)
    except BadConversation:
        return error
    return BadConversation(
        f"{names[0]} are no JSON object, and the chat template renders only objects: send an object"
    )


def _with_calls(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _text_arguments(call: object) -> str | None:
    """The arguments of a call if they are a string, which is no JSON object."""
    arguments = _arguments(call)
    return arguments if isinstance(arguments, str) else None


def _arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _with_arguments(call: Any, arguments: object) -> Any:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_object_arguments(call: Any) -> Any:
    text = _text_arguments(call)
    return call if text is None else _with_arguments(call, {"arguments": text})


def _with_json_arguments(call: Any) -> Any:
    arguments = _arguments(call)
    if not isinstance(arguments, dict):
        return call
    return _with_arguments(call, json.dumps(arguments, ensure_ascii=False))


def _arguments_name(index: int, call: Any) -> str:
    name, arguments = reprlib.repr(call["function"].get("name")), reprlib.repr(_arguments(call))
    return f"arguments {arguments} of the call {name} in message {index + 1}"


def joined(content: object) -> str:
    """Return a content as a string; a part is a line."""
    if isinstance(content, list):
        return PARTS_BETWEEN.join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _as_string(message: Message) -> Message:
    return {**message, "content": joined(message["content"])} if "content" in message else message


def _as_parts(message: Message) -> Message:
    return message if isinstance(message.get("content"), list) else _as_one_part(message)


def _as_one_part(message: Message) -> Message:
    if "content" not in message:
        return message
    text = joined(message["content"])
    return {**message, "content": [{"type": "text", "text": text}] if text else []}


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the conversation as it is, and then as templates take it that reject it or lose a text of it.

    Some take one system message, at the beginning (Qwen 3.5), and messages of the user and the assistant in
    turn (Gemma, Mistral), some take the arguments of calls as JSON (DeepSeek R1), and some render no text
    beside calls (Llama 3).
    """
    for system_form in _system_forms(messages):
        for form in _call_forms(system_form):
            yield form
            as_json = [_with_calls(message, _with_json_arguments) for message in form]
            if as_json != form:
                yield as_json


def _call_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    yield messages
    if len(apart := _with_texts_apart(messages)) == len(messages):
        return
    yield apart
    if len(turns := _with_one_text_a_turn(apart)) < len(apart):
        yield turns


def _with_texts_apart(messages: Sequence[Message]) -> list[Message]:
    """Make the text beside calls a message before them."""
    apart: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and _after_reasoning(joined(message.get("content"))):
            apart.append({key: value for key, value in message.items() if key != "tool_calls"})
            apart.append({"role": message["role"], "content": "", "tool_calls": calls})
        else:
            apart.append(message)
    return apart


def _with_one_text_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Join the assistant's texts between two messages of the user in the last one."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.get("role") == "user":
            turns.append([])
        turns[-1].append(message)
    return [message for turn in turns for message in _with_one_text(turn)]


def _with_one_text(turn: Sequence[Message]) -> Iterator[Message]:
    texts = [each for each in turn if each.get("role") == "assistant" and not each.get("tool_calls")]
    for message in turn:
        if texts and message is texts[-1]:
            yield {**message, "content": _texts_of(texts)}
        elif message.get("role") != "assistant" or message.get("tool_calls"):
            yield message


def _after_reasoning(text: str) -> str:
    return text.rpartition(_REASONING_END)[2].strip()


def _system_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    yield list(messages)
    system = [message for message in messages if message.get("role") in _SYSTEM_ROLES]
    is_first = len(system) == 1 and messages[0] is system[0] and system[0]["role"] == "system"
    if not system or is_first:
        return
    first = {**system[0], "role": "system", "content": _texts_of(system)}
    others = [message for message in messages if message.get("role") not in _SYSTEM_ROLES]
    yield [first, *others]
    if len(turns := _in_turn(others)) < len(others):
        yield [first, *turns]


def _in_turn(messages: Sequence[Message]) -> list[Message]:
    """Join messages of the user that follow each other."""
    turns: list[Message] = []
    for message in messages:
        if turns and message.get("role") == turns[-1].get("role") == "user":
            turns[-1] = {**turns[-1], "content": _texts_of((turns[-1], message))}
        else:
            turns.append(message)
    return turns


def _texts_of(messages: Sequence[Message]) -> str:
    texts = (joined(message.get("content")) for message in messages)
    return _MESSAGES_BETWEEN.join(text for text in texts if text)


def _num_up_to_user(messages: Sequence[Message]) -> int:
    """Number of messages up to the user's last one; 0 without any."""
    numbers = (index + 1 for index, message in enumerate(messages) if message.get("role") == "user")
    return max(numbers, default=0)
