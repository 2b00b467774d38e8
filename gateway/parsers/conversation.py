"""Tools of a request and conversations with tool calls, as chat templates of transformers read them.

Templates take tools in OpenAI's form, arguments of calls as objects, and the text of tool results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.parsers.calls import ToolDefinition
from gateway.parsers.events import short_call_id
from text.json_text import parse_json

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class BadTools(ValueError):
    """Tools or a tool choice that cannot be served; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """The functions that an answer may call.

    Attributes:
        tools: None of them for "none".
        is_required: The answer is a call.
        is_named: The caller named the one function to call.
    """

    tools: tuple[ToolDefinition, ...] = ()
    is_required: bool = False
    is_named: bool = False

    @property
    def needs_grammar(self) -> bool:
        """The calls have to follow a grammar: required calls, and calls of strict tools."""
        return bool(self.tools) and (self.is_required or any(tool.is_strict for tool in self.tools))


@dataclass(frozen=True, slots=True)
class OtherTool:
    """A tool that is no function, which no served model can call; its name is empty if it has none."""

    index: int
    kind: str
    name: str

    def __str__(self) -> str:
        named = f"{self.kind} {self.name}" if self.name else self.kind
        return f"tools[{self.index}] ({named})"


def read_tools(bodies: Sequence[object]) -> list[ToolDefinition]:
    """Read the functions of `tools`, of a chat completion or of a response, which has no "function" level.

    Tools of other types are left out. Raises BadTools.
    """
    tools: list[ToolDefinition] = []
    for index, body in enumerate(bodies):
        param = f"tools[{index}]"
        if not isinstance(body, dict) or not isinstance(_kind(body), str):
            raise BadTools(f"{param} is no tool: it needs an object with the type 'function'", param)
        if _kind(body) != "function":
            continue
        tool = _read_function(body.get("function", body), param)
        if any(tool.name == other.name for other in tools):
            raise BadTools(f"{param} has the name {tool.name!r} of another tool", param)
        tools.append(tool)
    return tools


def other_tools(bodies: Sequence[object]) -> list[OtherTool]:
    """Return the tools that `read_tools` leaves out."""
    return [
        OtherTool(index, _shown(body), _other_name(body))
        for index, body in enumerate(bodies)
        if isinstance(body, dict) and isinstance(kind := _kind(body), str) and kind != "function"
    ]


def function_index(bodies: Sequence[object], name: str) -> int:
    """Return the index of a function that `read_tools` read from `bodies`."""
    functions = ((index, body) for index, body in enumerate(bodies) if isinstance(body, dict))
    return next(
        index
        for index, body in functions
        if _kind(body) == "function" and body.get("function", body)["name"] == name
    )


def _kind(body: Mapping[str, Any]) -> object:
    return body.get("type", "function")


def _shown(body: Mapping[str, Any]) -> str:
    """The type of a tool that is no function, as headers and errors show it."""
    kind = str(_kind(body))
    return kind if _NAME.fullmatch(kind) else ascii(kind[:60])


def _other_name(body: Mapping[str, Any]) -> str:
    """The name of a tool that is no function; chat completions have it below the type."""
    inner = body.get(str(_kind(body)))
    name = body.get("name", inner.get("name") if isinstance(inner, dict) else None)
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


def _read_function(function: object, param: str) -> ToolDefinition:
    if not isinstance(function, dict):
        raise BadTools(f"{param}.function is no object", param)
    name, parameters = function.get("name"), function.get("parameters", function.get("input_schema"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadTools(
            f"{param} has the name {name!r}: use 1 to 128 of the characters A-Z a-z 0-9 _ . : / -", param
        )
    if not isinstance(parameters, dict | None):
        raise BadTools(f"{param} has parameters that are no JSON schema", param)
    if parameters is not None and parameters.get("type", "object") != "object":
        raise BadTools(f"{param} has parameters of type {parameters['type']!r}: use 'object'", param)
    description = function.get("description")
    return ToolDefinition(
        name,
        parameters,
        description if isinstance(description, str) else "",
        is_strict=function.get("strict") is True,
    )


def select_tools(
    tools: Sequence[ToolDefinition], choice: object, others: Sequence[OtherTool] = ()
) -> ToolSelection:
    """Apply `tool_choice`: OpenAI's forms for chat completions and responses.

    Raises BadTools, also for a choice that demands one of the `others`.
    """
    if choice is None or choice == "auto":
        return ToolSelection(tuple(tools))
    if choice == "none":
        return ToolSelection()
    if choice == "required":
        return _required(tools, others)
    if isinstance(choice, dict):
        match choice.get("type"):
            case "function":
                return ToolSelection((_named(tools, choice, others),), is_required=True, is_named=True)
            case "allowed_tools":
                return _allowed(tools, choice, others)
            case str():
                raise _not_served(_demanded(choice, others))
    raise BadTools("tool_choice is none of none, auto, required, a function, allowed_tools", "tool_choice")


def _allowed(tools: Sequence[ToolDefinition], choice: Any, others: Sequence[OtherTool]) -> ToolSelection:
    allowed = choice.get("allowed_tools", choice)
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(listed, list) or allowed.get("mode", "auto") not in ("auto", "required"):
        raise BadTools(
            "tool_choice of allowed_tools needs tools, and the mode auto or required", "tool_choice"
        )
    left_out = other_tools(listed)
    indices = {tool.index for tool in left_out}
    named = [_named(tools, item, others) for index, item in enumerate(listed) if index not in indices]
    if allowed.get("mode") != "required":
        return ToolSelection(tuple(named))
    return _required(named, [_demanded(listed[tool.index], others) for tool in left_out])


def _required(tools: Sequence[ToolDefinition], others: Sequence[OtherTool | str]) -> ToolSelection:
    if tools:
        return ToolSelection(tuple(tools), is_required=True)
    if others:
        raise _not_served(others[0])
    raise BadTools("tool_choice demands a call, but there are no tools", "tool_choice")


def _named(tools: Sequence[ToolDefinition], item: object, others: Sequence[OtherTool]) -> ToolDefinition:
    function = item.get("function", item) if isinstance(item, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    found = next((tool for tool in tools if tool.name == name), None)
    if found is not None:
        return found
    if (other := next((tool for tool in others if tool.name == name), None)) is not None:
        raise _not_served(other)
    raise BadTools(f"tool_choice names the function {name!r}, which is not among the tools", "tool_choice")


def _demanded(item: Mapping[str, Any], others: Sequence[OtherTool]) -> OtherTool | str:
    """The tool that is meant by an item of `tool_choice` that is no function."""
    kind, name = _shown(item), _other_name(item)
    for other in others:
        if other.kind == kind and name in ("", other.name):
            return other
    return f"a tool of type {kind!r}" + (f" with the name {name!r}" if name else "")


def _not_served(tool: OtherTool | str) -> BadTools:
    return BadTools(f"tool_choice demands {tool}: only functions are served", "tool_choice")


def template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]] | None:
    """Return the tools for the variable `tools` of a chat template; None without any."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters or {"type": "object", "properties": {}}),
            },
        }
        for tool in tools
    ] or None


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, has_short_ids: bool = False
) -> list[dict[str, Any]]:
    """Return OpenAI's messages as templates read them.

    Arguments of calls become objects (a text that is none stays), results of tools get the name of their
    function, and reasoning is under both of its names. `has_short_ids` shortens ids for the templates that
    demand it.
    """
    names: dict[str, str] = {}
    return [_template_message(message, names, has_short_ids=has_short_ids) for message in messages]


def _template_message(
    message: Mapping[str, Any], names: dict[str, str], *, has_short_ids: bool
) -> dict[str, Any]:
    found = dict(message)
    reasoning = found.get("reasoning_content") or found.get("reasoning")
    if isinstance(reasoning, str):
        found["reasoning_content"] = found["reasoning"] = reasoning
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    elif isinstance(found["tool_calls"], list):
        found["tool_calls"] = [
            _template_call(call, names, has_short_ids=has_short_ids) for call in found["tool_calls"]
        ]
    call_id = found.get("tool_call_id")
    if isinstance(call_id, str):
        if call_id in names:
            found.setdefault("name", names[call_id])
        found["tool_call_id"] = short_call_id(call_id) if has_short_ids else call_id
    return found


def _template_call(call: object, names: dict[str, str], *, has_short_ids: bool) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    found = {"type": "function", **call}
    if isinstance(identifier := call.get("id"), str):
        if isinstance(name := function.get("name"), str):
            names[identifier] = name
        found["id"] = short_call_id(identifier) if has_short_ids else identifier
    return {**found, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """Return arguments as an object; as a text if they are none, such as JSON that `max_tokens` cut."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    value = parse_json(text) if text.strip() else {}
    return {} if value is None else value if isinstance(value, dict) else text
