"""Formats of model families by name, and the choice of a format by chat template.

A format has the reader of its calls, and the texts around name and arguments, of which grammars are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.answer import AnswerParser, ReasoningTags, TextParser
from gateway.parsers.calls import (
    FormatReader,
    ToolDefinition,
    read_deepseek,
    read_glm,
    read_hermes,
    read_json,
    read_llama3_json,
    read_mistral,
    read_no_calls,
    read_qwen3_coder,
)

AUTO = "auto"
NONE = "none"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkup:
    """Texts around the calls of an answer, and around name and arguments of each.

    `parameter` has the texts before and after the key and after the value, where arguments are not JSON.
    """

    opens: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    separator: str = ""
    closes: str = ""
    parameter: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        markers: Texts of the format that may be special tokens, which must stay in the text.
        signs: Texts of the chat templates of the family; any of these sets chooses it.
        has_short_ids: The chat template rejects ids of calls that are not 9 letters and digits.
    """

    name: str
    read: FormatReader
    markup: CallMarkup
    markers: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    has_short_ids: bool = False


_BEFORE_NAME = '{"name": "'
_BEFORE_ARGUMENTS = '", "arguments": '
_TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
_DEEPSEEK_MARKERS = tuple(
    f"<｜{name}｜>"
    for name in ("tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end")
)
_BEGIN, _CALL, _SEP, _END, _ALL_END = _DEEPSEEK_MARKERS

JSON_FORMAT = ToolFormat(
    name="json",
    read=read_json,
    markup=CallMarkup(before=_BEFORE_NAME, between=_BEFORE_ARGUMENTS, after="}", separator="\n"),
)
"""For forced calls of a model without a format of its own."""

_FORMATS = (
    ToolFormat(
        name="deepseek_v3",
        read=read_deepseek,
        markers=_DEEPSEEK_MARKERS,
        signs=((_BEGIN, "```json"),),
        markup=CallMarkup(
            opens=_BEGIN,
            before=f"{_CALL}function{_SEP}",
            between="\n```json\n",
            after=f"\n```{_END}",
            separator="\n",
            closes=_ALL_END,
        ),
    ),
    ToolFormat(
        name="deepseek_v31",
        read=read_deepseek,
        markers=_DEEPSEEK_MARKERS,
        signs=((_BEGIN,),),
        markup=CallMarkup(opens=_BEGIN, before=_CALL, between=_SEP, after=_END, closes=_ALL_END),
    ),
    ToolFormat(
        name="mistral_v11",
        read=read_mistral,
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        has_short_ids=True,
        markup=CallMarkup(before="[TOOL_CALLS]", between="[ARGS]"),
    ),
    ToolFormat(
        name="mistral",
        read=read_mistral,
        markers=("[TOOL_CALLS]",),
        signs=(("[TOOL_CALLS]",),),
        has_short_ids=True,
        markup=CallMarkup(
            opens="[TOOL_CALLS][",
            before=_BEFORE_NAME,
            between=_BEFORE_ARGUMENTS,
            after="}",
            separator=", ",
            closes="]",
        ),
    ),
    ToolFormat(
        name="glm45",
        read=read_glm,
        markers=(*_TOOL_CALL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=(("<arg_key>", "<tool_call>"),),
        markup=CallMarkup(
            before="<tool_call>",
            between="\n",
            after="</tool_call>",
            separator="\n",
            parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    ToolFormat(
        name="qwen3_coder",
        read=read_qwen3_coder,
        markers=_TOOL_CALL_TAGS,
        signs=(("<function=", "<tool_call>"),),
        markup=CallMarkup(
            before="<tool_call>\n<function=",
            between=">\n",
            after="</function>\n</tool_call>",
            separator="\n",
            parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    ToolFormat(
        name="hermes",
        read=read_hermes,
        markers=_TOOL_CALL_TAGS,
        signs=(("<tool_call>",),),
        markup=CallMarkup(
            before='<tool_call>\n{"name": "',
            between='", "arguments": ',
            after="}\n</tool_call>",
            separator="\n",
        ),
    ),
    ToolFormat(
        name="llama3_json",
        read=read_llama3_json,
        markers=("<|python_tag|>",),
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        markup=CallMarkup(before='{"name": "', between='", "parameters": ', after="}", separator="; "),
    ),
    JSON_FORMAT,
)  # the first one with a sign in the chat template is chosen
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in _FORMATS}

_THINK = ReasoningTags("<think>", "</think>")
_REASONING_SIGNS = {
    "think": _THINK,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}
REASONING_FORMATS = {**_REASONING_SIGNS, "deepseek_r1": _THINK, "qwen3": _THINK, "glm45": _THINK}
"""By name; families that write `<think>` are known by their names too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserChoice:
    """The parsers of a served model."""

    tool_format: ToolFormat | None = None
    reasoning: ReasoningTags | None = None
    response_template: Mapping[str, Any] | None = field(default=None, repr=False)
    description: str = ""

    @property
    def forced_format(self) -> ToolFormat:
        """The format of calls that a grammar forces."""
        return self.tool_format or JSON_FORMAT

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser, also where they are special tokens."""
        calls = self.tool_format.markers if self.tool_format else ()
        return (*calls, *(self.reasoning.markers if self.reasoning else ()))

    @property
    def needs_special_tokens(self) -> bool:
        """The parser reads all special tokens, not the markers alone."""
        return self.response_template is not None

    def new_parser(
        self, *, prompt: str, tools: Sequence[ToolDefinition], id_seed: str, is_forced: bool = False
    ) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            prompt: The rendered conversation, with special tokens, or its end: it tells whether the answer
                begins within the reasoning.
            tools: The functions that the answer may call; without any, no call is looked for.
            id_seed: What the ids of calls are made of: request id and choice.
            is_forced: A grammar forces the calls, in `forced_format`.
        """
        if self.response_template is not None and not is_forced:
            from gateway.parsers.response_template import TemplateParser  # imports transformers

            return TemplateParser(self.response_template, prompt=prompt, tools=tools, id_seed=id_seed)
        tool_format = self.forced_format if is_forced else self.tool_format
        return TextParser(
            tool_format.read if tool_format and tools else read_no_calls,
            self.reasoning,
            prompt=prompt,
            tools=tools,
            id_seed=id_seed,
            has_short_ids=tool_format is not None and tool_format.has_short_ids,
        )


def choose_parsers(
    tool_parser: str,
    reasoning_parser: str,
    *,
    chat_template: str | None,
    response_template: Mapping[str, Any] | None = None,
) -> ParserChoice:
    """Return the parsers of these names. Raises ValueError for unknown ones.

    "auto" is transformers' parser if the tokenizer has a response template, else the first family with a
    sign in the chat template.
    """
    check_parser_names(tool_parser, reasoning_parser)
    is_named = TRANSFORMERS in (tool_parser, reasoning_parser)
    uses_template = is_named or (tool_parser == reasoning_parser == AUTO and response_template is not None)
    flaw = _template_flaw(response_template) if uses_template else None
    if is_named and flaw is not None:
        raise ValueError(f"{flaw}: choose another parser than 'transformers'")
    uses_template = uses_template and flaw is None
    text = chat_template or ""
    tool_format = TOOL_FORMATS.get(tool_parser)
    if tool_parser in (AUTO, TRANSFORMERS):
        tool_format = _find_format(text)
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    if reasoning_parser in (AUTO, TRANSFORMERS):
        reasoning = next((tags for tags in _REASONING_SIGNS.values() if tags.closes in text), None)
    return ParserChoice(
        tool_format=tool_format,
        reasoning=reasoning,
        response_template=response_template if uses_template else None,
        description=_description(tool_format, reasoning, uses_template=uses_template)
        + (f" ({flaw})" if flaw else ""),
    )


def _template_flaw(response_template: Mapping[str, Any] | None) -> str | None:
    """Return why there is no usable response template."""
    if response_template is None:
        return "the tokenizer has no response template"
    try:
        from gateway.parsers.response_template import check_response_template
    except ImportError:
        return "the tokenizer's response template needs transformers on the gateway's host"
    try:
        check_response_template(response_template)
    except (ValueError, TypeError, AttributeError) as error:
        return f"the tokenizer's response template is invalid: {error}"
    return None


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError for an unknown name."""
    _check("tool parser", tool_parser, (*TOOL_FORMATS, TRANSFORMERS))
    _check("reasoning parser", reasoning_parser, (*REASONING_FORMATS, TRANSFORMERS))


def _check(kind: str, name: str, names: Sequence[str]) -> None:
    if name not in (AUTO, NONE, *names):
        raise ValueError(f"unknown {kind} {name!r}: choose auto, none or {', '.join(sorted(names))}")


def _find_format(chat_template: str) -> ToolFormat | None:
    for tool_format in _FORMATS:
        if any(all(sign in chat_template for sign in signs) for signs in tool_format.signs):
            return tool_format
    return None


def _description(
    tool_format: ToolFormat | None, reasoning: ReasoningTags | None, *, uses_template: bool
) -> str:
    forced = f"calls are forced in the format {(tool_format or JSON_FORMAT).name}"
    if uses_template:
        return f"tool calls and reasoning are parsed by the tokenizer's response template, {forced}"
    calls = f"tool calls: {tool_format.name}" if tool_format else f"tool calls: none, {forced}"
    return f"{calls}; reasoning: {reasoning.opens if reasoning else 'none'}"
