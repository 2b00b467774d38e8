"""Tools of a request, the choice among them, and conversations for chat templates."""

import pytest

from gateway.parsers.calls import ToolDefinition
from gateway.parsers.conversation import (
    BadTools,
    function_index,
    other_tools,
    read_tools,
    select_tools,
    template_messages,
    template_tools,
)
from gateway.parsers.events import short_call_id

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": True},
}
RESPONSES_TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Now.",
    "parameters": SCHEMA,
    "strict": True,
}
MESSAGES_TOOL = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
WEATHER = ToolDefinition("weather", SCHEMA, "Now.", is_strict=True)
CLOCK = ToolDefinition("clock")


def test_tools_are_read_in_the_forms_of_three_apis() -> None:
    assert read_tools([CHAT_TOOL]) == read_tools([RESPONSES_TOOL]) == [WEATHER]
    assert read_tools([MESSAGES_TOOL]) == [ToolDefinition("weather", SCHEMA, "Now.")]
    assert read_tools([{"function": {"name": "a.b-c_1"}}]) == [ToolDefinition("a.b-c_1")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x", "no tool"),
        ({"type": 5}, "no tool"),
        ({"function": 5}, "no object"),
        ({"function": {"name": 'a"b'}}, "has the name"),
        ({"function": {"name": ""}}, "has the name"),
        ({"function": {"name": "a", "parameters": []}}, "no JSON schema"),
        ({"function": {"name": "a", "parameters": {"type": "array"}}}, "of type 'array'"),
        (CHAT_TOOL, "of another tool"),
    ],
)
def test_a_tool_that_cannot_be_served_is_named_by_its_index(body: object, reason: str) -> None:
    with pytest.raises(BadTools, match=reason) as caught:
        read_tools([CHAT_TOOL, body])
    assert caught.value.param == "tools[1]"


def test_every_form_of_a_tool_choice() -> None:
    tools = (WEATHER, CLOCK)

    def select(choice: object) -> tuple[list[str], bool, bool]:
        selection = select_tools(tools, choice)
        return [tool.name for tool in selection.tools], selection.is_required, selection.is_named

    both = ["weather", "clock"]
    assert select(None) == select("auto") == (both, False, False)
    assert select("none") == ([], False, False)
    assert select("required") == (both, True, False)
    assert select({"type": "function", "function": {"name": "clock"}}) == (["clock"], True, True)
    assert select({"type": "function", "name": "clock"}) == (["clock"], True, True)
    listed = [{"type": "function", "function": {"name": "clock"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    assert select(allowed) == (["clock"], True, False)
    assert select({"type": "allowed_tools", "mode": "auto", "tools": listed}) == (["clock"], False, False)


SEARCH = {"type": "web_search", "filters": {}}
AGENTS = {"type": "namespace", "name": "agents", "tools": [CHAT_TOOL]}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}


def test_tools_that_are_no_functions_are_left_out_by_type_and_name() -> None:
    bodies = [SEARCH, CHAT_TOOL, AGENTS, CUSTOM, {"type": "\x00é", "name": "a, b"}]
    assert read_tools(bodies) == [WEATHER]
    assert [str(tool) for tool in other_tools(bodies)] == [
        "tools[0] (web_search)",
        "tools[2] (namespace agents)",
        "tools[3] (custom patch)",
        r"tools[4] ('\x00\xe9')",
    ]
    assert function_index(bodies, "weather") == 1


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "web_search"}, r"tools\[0\] \(web_search\)"),
        ({"type": "custom", "name": "patch"}, r"tools\[2\] \(custom patch\)"),
        ({"type": "function", "name": "agents"}, r"tools\[1\] \(namespace agents\)"),
        ({"type": "mcp", "server_label": "x"}, "a tool of type 'mcp'"),
        ({"type": "custom", "custom": {"name": "other"}}, "a tool of type 'custom' with the name 'other'"),
        ({"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}, r"tools\[0\] \(web_search\)"),
    ],
)
def test_a_choice_that_demands_a_tool_that_is_no_function_names_it(choice: object, named: str) -> None:
    others = other_tools([SEARCH, AGENTS, CUSTOM])
    with pytest.raises(BadTools, match=f"tool_choice demands {named}: only functions are served"):
        select_tools([WEATHER], choice, others)


def test_required_calls_need_a_function() -> None:
    assert select_tools([WEATHER], "required", other_tools([SEARCH])).tools == (WEATHER,)
    with pytest.raises(BadTools, match=r"demands tools\[0\] \(web_search\)"):
        select_tools([], "required", other_tools([SEARCH]))


def test_allowed_tools_that_are_no_functions_are_left_out() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [SEARCH, {"type": "function", "name": "weather"}],
    }
    assert select_tools([WEATHER, CLOCK], choice, other_tools([SEARCH])).tools == (WEATHER,)
    assert select_tools([WEATHER], {**choice, "mode": "auto", "tools": [SEARCH]}).tools == ()


def test_a_tool_choice_without_its_tool_is_rejected() -> None:
    for choice in ("any", 5, {"type": "function", "name": "clock"}, {"type": "allowed_tools", "tools": 5}):
        with pytest.raises(BadTools) as caught:
            select_tools([WEATHER], choice)
        assert caught.value.param == "tool_choice"
    with pytest.raises(BadTools, match="there are no tools"):
        select_tools([], "required")


def test_required_and_strict_calls_need_a_grammar() -> None:
    assert select_tools([CLOCK], "required").needs_grammar
    assert select_tools([CLOCK, WEATHER], "auto").needs_grammar
    assert not select_tools([CLOCK], "auto").needs_grammar
    assert not select_tools([WEATHER], "none").needs_grammar


def test_templates_get_tools_in_openais_form() -> None:
    assert template_tools([]) is None
    first, second = template_tools([WEATHER, CLOCK]) or ()
    assert first == {
        "type": "function",
        "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA},
    }
    assert second["function"]["parameters"] == {"type": "object", "properties": {}}


def call(arguments: object, identifier: str = "call_1") -> dict[str, object]:
    return {"id": identifier, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_templates_get_arguments_as_objects_and_names_of_results() -> None:
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Oslo"}')], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
        {"role": "tool", "tool_call_id": "other", "content": "Sun"},
    ]
    user, assistant, result, unknown = template_messages(messages)
    assert user == {"role": "user", "content": "Hi"}
    assert assistant["tool_calls"] == [call({"city": "Oslo"})]
    assert assistant["reasoning_content"] == assistant["reasoning"] == "Hm."
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "Rain", "name": "weather"}
    assert "name" not in unknown
    assert messages[1]["tool_calls"] == [call('{"city": "Oslo"}')]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (None, {}),
        ("null", {}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ({"a": 1}, {"a": 1}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_that_are_no_object_are_texts(arguments: object, expected: object) -> None:
    [message] = template_messages([{"role": "assistant", "tool_calls": [call(arguments)]}])
    assert message["tool_calls"] == [call(expected)]


def test_short_ids_match_between_calls_and_results() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("{}"), call("{}", "abcdefghi")]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": ""},
    ]
    assistant, first, second = template_messages(messages, has_short_ids=True)
    ids = [item["id"] for item in assistant["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]] == [short_call_id("call_1"), "abcdefghi"]
    assert len(ids[0]) == 9
    assert (first["name"], second["name"]) == ("weather", "weather")
