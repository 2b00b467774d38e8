"""Conversations of every API: their prompts, tools, the form of their answers, and how those are read.

An API converts its body to ConversationFields, prepares it, submits it, and writes what `Answers` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gateway.answers import AnswerRules, Answers
from gateway.api.body import RequestBody
from gateway.api.call import Gateway, Submission, output_rules
from gateway.api.errors import invalid
from gateway.api.sampling import GenerationFields, response_schema, sampling_message, structure_names
from gateway.generation import Generation, GenerationSpec
from gateway.output import OutputRules
from gateway.parsers.answer import AnswerParser, ReasoningTags
from gateway.parsers.conversation import (
    BadTools,
    ToolSelection,
    function_index,
    other_tools,
    read_tools,
    select_tools,
    template_messages,
    template_tools,
)
from gateway.parsers.families import ParserChoice
from gateway.parsers.forced_calls import (
    ForcedCalls,
    OversizedTools,
    UnenforceableSchema,
    call_grammar,
    special_marker_ids,
)
from stageline_rpc.v1 import inference_pb2
from text.chat_template import BadTemplateVariable, ConversationError, TemplateOptions, joined
from text.tokenizer import TextCodec, TokenizerError

MAX_TOOLS = 1024
_PROMPT_END_TOKENS = 32
"""More than the tag that opens the reasoning has."""


class ChatPart(BaseModel):
    """A part of a message's content; only text is served."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class MessageFields(BaseModel):
    """A message; further fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[ChatPart] | None = None


class TemplateFields(RequestBody):
    """Fields that decide how a conversation is rendered."""

    messages: list[MessageFields]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ConversationFields(TemplateFields, GenerationFields):
    """A conversation and the answer that is wanted.

    `tools` and `tool_choice` have OpenAI's forms for chat completions or for responses.
    """

    schema_name: ClassVar[str] = "function.parameters"
    """The API's name for the schema of a tool's arguments."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    def without_effect(self) -> Sequence[str]:
        return left_out_tools(self.tools)


def left_out_tools(tools: Sequence[dict[str, Any]] | None) -> Sequence[str]:
    """Return the tools that are no functions, by index, type and name."""
    return list(map(str, other_tools(tools or ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation that can be submitted."""

    submission: Submission
    rules: AnswerRules

    def answers(self, generation: Generation, request_id: str) -> Answers:
        """Return the reader of the answers. The ids of calls are made from `request_id`."""
        return Answers(self.rules, generation.usage, generation.num_choices, request_id)


def prepare(
    gateway: Gateway,
    fields: ConversationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    wants_tokens: bool = False,
) -> Conversation:
    """Check a conversation and render its prompt; slow work, for `Gateway.beside_loop`.

    Args:
        max_tokens: None for all that the context has room for.
        logprobs: Number of the most likely tokens to report beside each one; None for no log-probabilities.
        wants_tokens: Deltas without text are of use, for their tokens.

    Raises ApiError.
    """
    codec = _require_codec(gateway, fields)
    sampling = sampling_message(fields, gateway.upstream.model.generation_config)
    if logprobs is not None:
        sampling.logprobs = logprobs
    selection = read_selection(fields.tools, fields.tool_choice)
    rules = output_rules(gateway, fields, kept_special_ids=_kept_ids(gateway.parsers, codec, selection))
    ids = encode_messages(gateway, fields, selection)
    answer = _plan_answer(gateway.parsers, codec, fields, selection, ids)
    if answer.grammar is not None:
        sampling.grammar = answer.grammar
    spec = GenerationSpec(
        rules=rules, num_choices=fields.n or 1, wants_tokens=wants_tokens or logprobs is not None
    )
    prompt = gateway.fit(ids, fields, param=fields.name_of("messages"), max_tokens=max_tokens)
    submission = Submission(
        spec=spec,
        prompts=[prompt],
        sampling=sampling,
        fields=fields,
        own_names=_own_names(fields, sampling, selection),
    )
    return Conversation(submission=submission, rules=answer.rules)


def _own_names(
    fields: ConversationFields, sampling: inference_pb2.SamplingParameters, selection: ToolSelection
) -> dict[str, str]:
    """Return the client's names for the coordinator's fields."""
    grammar_of = {"grammar": "tools"} if selection.is_required else {}
    structure = structure_names(fields, sampling, default="tools") | grammar_of
    return {"prompt": fields.name_of("messages"), **structure}


def read_rules(
    gateway: Gateway, fields: ConversationFields, prompt_end: Sequence[int]
) -> tuple[OutputRules, AnswerRules]:
    """Return how an answer is read, from the last tokens of its prompt. Raises ApiError."""
    codec = _require_codec(gateway, fields)
    selection, parsers = read_selection(fields.tools, fields.tool_choice), gateway.parsers
    output = output_rules(gateway, fields, kept_special_ids=_kept_ids(parsers, codec, selection))
    prompt = _prompt_text(parsers, codec, selection, prompt_end)
    return output, _answer_rules(parsers, fields, selection, prompt)


def read_selection(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None = None
) -> ToolSelection:
    """Return the tools that the answer may call. Raises ApiError."""
    if (num_tools := len(tools or ())) > MAX_TOOLS:
        raise invalid(f"tools has {num_tools} entries, the limit is {MAX_TOOLS}", param="tools")
    try:
        return select_tools(read_tools(tools or ()), choice, other_tools(tools or ()))
    except BadTools as error:
        raise invalid(str(error), param=error.param) from None


def encode_messages(gateway: Gateway, fields: TemplateFields, selection: ToolSelection) -> Sequence[int]:
    """Return the token ids of the rendered conversation; slow work, as above. Raises ApiError."""
    codec = _require_codec(gateway, fields)
    if not fields.messages:
        name = fields.name_of("messages")
        raise invalid(f"{name} is empty, at least 1 entry is needed", param=name)
    try:
        return _encode(gateway, codec, fields, selection)
    except BadTemplateVariable as error:
        raise invalid(str(error), param="chat_template_kwargs") from None
    except (ConversationError, TokenizerError) as error:
        raise invalid(str(error), param=fields.name_of("messages")) from None


def _require_codec(gateway: Gateway, fields: TemplateFields) -> TextCodec:
    return gateway.require_codec(fields.name_of("messages"), "use /v1/completions with token ids")


def _encode(
    gateway: Gateway, codec: TextCodec, fields: TemplateFields, selection: ToolSelection
) -> Sequence[int]:
    messages: list[dict[str, Any]] = [
        _message(index, message) for index, message in enumerate(fields.messages)
    ]
    texts = (joined(message["content"]) for message in messages)
    gateway.check_text_size(texts, param=fields.name_of("messages"))
    options = _template_options(gateway, fields, selection)
    _check_calls(messages)
    messages = template_messages(messages, has_short_ids=gateway.parsers.forced_format.has_short_ids)
    return codec.encode_messages(messages, options, tenant=gateway.visitor.tenant)


def _check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError for calls of earlier answers that no template could read."""
    for index, message in enumerate(messages):
        calls, param = message.get("tool_calls"), f"messages[{index}].tool_calls"
        if calls is None:
            continue
        if not isinstance(calls, list):
            raise invalid(f"{param} is no list", param=param)
        for number, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                param = f"{param}[{number}]"
                raise invalid(f"{param} is no call: it needs a function with a name", param=param)


def _message(index: int, message: MessageFields) -> dict[str, Any]:
    """Return a message as `ChatTemplate.render` takes it."""
    content: str | list[dict[str, str]] = ""
    if isinstance(message.content, list):
        content = [
            {"type": "text", "text": _part_text(part, f"messages[{index}].content[{number}]")}
            for number, part in enumerate(message.content)
        ]
    elif message.content:
        content = message.content
    return {**(message.model_extra or {}), "role": message.role, "content": content}


def _part_text(part: ChatPart, param: str) -> str:
    if part.type not in ("text", "input_text", "output_text") or part.text is None:
        raise invalid(f"{param} is of type {part.type!r}: only text is served", param=param)
    return part.text


def _template_options(gateway: Gateway, fields: TemplateFields, selection: ToolSelection) -> TemplateOptions:
    continues = bool(fields.continue_final_message)
    begins = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continues and begins:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    return TemplateOptions(
        template=gateway.template,
        add_generation_prompt=begins,
        continue_final_message=continues,
        tools=template_tools(selection.tools),
        variables=variables,
    )


def _kept_ids(parsers: ParserChoice, codec: TextCodec, selection: ToolSelection) -> frozenset[int] | None:
    """The special tokens that the parser reads; None for all."""
    if parsers.needs_special_tokens and not selection.needs_grammar:
        return None
    calls = parsers.forced_format.markers if selection.tools else ()
    reasoning = parsers.reasoning.markers if parsers.reasoning else ()
    return frozenset(special_marker_ids((*calls, *reasoning), codec).values())


@dataclass(frozen=True, slots=True)
class _AnswerPlan:
    rules: AnswerRules
    grammar: str | None


def _plan_answer(
    parsers: ParserChoice,
    codec: TextCodec,
    fields: ConversationFields,
    selection: ToolSelection,
    prompt_ids: Sequence[int],
) -> _AnswerPlan:
    """Decide how the answer is read, and the grammar that it follows. Raises ApiError."""
    prompt = _prompt_text(parsers, codec, selection, prompt_ids)
    return _AnswerPlan(
        _answer_rules(parsers, fields, selection, prompt), _grammar(parsers, codec, fields, selection, prompt)
    )


def _is_plain(parsers: ParserChoice, selection: ToolSelection) -> bool:
    """All text of an answer is content."""
    return parsers.reasoning is None and parsers.response_template is None and not selection.tools


def _prompt_text(
    parsers: ParserChoice, codec: TextCodec, selection: ToolSelection, prompt_ids: Sequence[int]
) -> str:
    """The part of the prompt's text that parsers need."""
    shown = prompt_ids if parsers.response_template is not None else prompt_ids[-_PROMPT_END_TOKENS:]
    return "" if _is_plain(parsers, selection) else codec.decode(shown, skip_special_tokens=False)


def _answer_rules(
    parsers: ParserChoice, fields: ConversationFields, selection: ToolSelection, prompt: str
) -> AnswerRules:
    new_parser = None
    if not _is_plain(parsers, selection):

        def new_parser(id_seed: str) -> AnswerParser:
            return parsers.new_parser(
                prompt=prompt, tools=selection.tools, id_seed=id_seed, is_forced=selection.needs_grammar
            )

    return AnswerRules(
        new_parser=new_parser,
        is_named=selection.is_named,
        max_calls=1 if fields.parallel_tool_calls is False else None,
        hides_reasoning=fields.include_reasoning is False,
        is_call=selection.is_required,
    )


def _possible_reasoning(
    parsers: ParserChoice, fields: ConversationFields, prompt: str
) -> ReasoningTags | None:
    """The tags of reasoning that may begin the answer; None where the prompt has closed or passed it."""
    tags = parsers.reasoning
    if tags is None or tags.is_closed(prompt):
        return None
    is_begun = bool(fields.continue_final_message and _message(0, fields.messages[-1])["content"])
    return None if is_begun and not tags.is_open(prompt) else tags


def _grammar(
    parsers: ParserChoice,
    codec: TextCodec,
    fields: ConversationFields,
    selection: ToolSelection,
    prompt: str,
) -> str | None:
    """The grammar of forced calls, or of a JSON answer beside calls or after reasoning.

    A form of the text has no effect where the answer is a call.
    """
    schema = None if selection.is_required else response_schema(fields.response_format)
    reasoning = _possible_reasoning(parsers, fields, prompt)
    is_mixed = schema is not None and bool(selection.tools or reasoning)
    if not selection.needs_grammar and not is_mixed:
        return None
    other = None if selection.is_required else fields.structure
    if other is not None and other != "response_format":
        name = fields.name_of(other)
        raise invalid(f"{name} and tools with strict = true exclude each other", param=name)
    forced = ForcedCalls(
        tools=selection.tools,
        is_parallel=fields.parallel_tool_calls is not False,
        is_required=selection.is_required,
        text_schema=schema,
        reasoning=reasoning,
        is_reasoning_open=reasoning is not None and reasoning.is_open(prompt),
        special_ids=special_marker_ids(parsers.markers, codec),
    )
    try:
        return call_grammar(parsers.forced_format, forced)
    except UnenforceableSchema as error:
        index = function_index(fields.tools or (), selection.tools[error.tool].name)
        raise invalid(str(error), param=f"tools[{index}].{fields.schema_name}") from None
    except OversizedTools as error:
        raise invalid(str(error), param="tools") from None
    except ValueError as error:
        name = fields.name_of("response_format")
        raise invalid(f"{name}: {error}", param=name) from None
