"""`stageline plan --check`: whether a checkpoint is served, and every reason why not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import Checkpoint, UnsupportedModel, stage_weight_bytes
from checkpoint.errors import TRANSFORMERS_ADVICE
from checkpoint.implementation import AUTO, Implementation
from checkpoint.inspection import Inspection, inspect
from stageline.cli.options import require_torch
from text.generation_defaults import read_generation_defaults
from wire.errors import reason_of
from wire.exit_codes import ExitCode
from wire.foreign_text import escaped, printable_line
from wire.sizes import format_size

if TYPE_CHECKING:
    from text.tokenizer import TextCodec


@dataclass(slots=True, kw_only=True)
class TextInspection:
    """Tokenizer and chat template of a directory; None without tokenizer. Notes are no reasons."""

    codec: TextCodec | None = None
    errors: list[ValueError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(directory: Path, *, name: str, as_json: bool) -> int:
    """Print the result, of `name`; the exit code is 0 for a checkpoint that is served, else 1."""
    found = inspect(directory)
    if found.checkpoint is not None and not found.checkpoint.config.has_row:
        found.attempt(partial(_examine, found.checkpoint))
        found.checkpoint = None if found.errors else found.checkpoint
    found.attempt(partial(read_generation_defaults, directory))
    has_text = directory.exists() and not found.is_other_format
    text = inspect_text(directory, found.checkpoint) if has_text else TextInspection()
    facts = check_facts(name, found, text)
    print(json.dumps(facts, indent=2) if as_json else _text(name, found, text))
    return ExitCode.DONE if facts["is_served"] else ExitCode.FAILED


def _examine(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel unless transformers' layers serve it, CommandFailed without torch."""
    from coordinator.model import examine_layers  # loads a tokenizer's libraries

    require_torch(f"the check of {checkpoint.config.model_type!r}, which has no native layers,")
    try:
        examine_layers(checkpoint)
    except ImportError as error:
        raise UnsupportedModel(f"{TRANSFORMERS_ADVICE} ({error})") from error


def inspect_text(directory: Path, checkpoint: Checkpoint | None) -> TextInspection:
    """Load tokenizer, chat template and grammar tables as coordinator and gateway do."""
    from text.chat_template import ConversationError
    from text.tokenizer import TokenizerError, load_text_codec

    found = TextInspection()
    try:
        found.codec = load_text_codec(directory)
        if found.codec is None:
            found.notes.append("no tokenizer (such as tokenizer.json): token ids only, no text and no chat")
            return found
        _check_template(found.codec, found.notes)
        if checkpoint is not None:
            found.notes += _vocabulary_problems(found.codec, checkpoint.config.vocab_size)
            found.notes += _grammar_problems(checkpoint, found.codec)
    except (ConversationError, TokenizerError) as error:
        found.errors.append(error)
    return found


def _check_template(codec: TextCodec, notes: list[str]) -> None:
    """Note a missing template. Raises TokenizerError, and ConversationError if it renders no message."""
    from text.tokenizer import ChatMessage, TokenizerError

    if (template := codec.chat_template) is None:
        notes.append("no chat template: chat needs --chat-template of stageline gateway")
        return
    try:
        codec.check_template(template)
    except TokenizerError as error:
        raise TokenizerError(f"chat template cannot be parsed: {error}") from None
    codec.encode_conversation([ChatMessage(role="user", content="Hello")])


def _vocabulary_problems(codec: TextCodec, num_embeddings: int) -> list[str]:
    if codec.vocab_size <= num_embeddings:
        return []
    return [
        f"tokenizer has token ids up to {codec.vocab_size - 1}, the model has embeddings up to"
        f" {num_embeddings - 1} (vocab_size): prompts with ids beyond are rejected"
    ]


def _grammar_problems(checkpoint: Checkpoint, codec: TextCodec) -> list[str]:
    from text.grammars import GrammarCompiler

    grammars = GrammarCompiler(
        checkpoint.path,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=codec.end_token_ids(checkpoint.eos_token_ids),
    )
    problem = grammars.load()
    return [] if problem is None else [f"no structured output: {problem}"]


def check_facts(name: str, found: Inspection, text: TextInspection) -> dict[str, object]:
    """The result for JSON; sizes in bytes."""
    errors = (*found.errors, *text.errors)
    facts: dict[str, object] = {
        "directory": name,
        "is_served": not errors,
        "reasons": [{"code": reason_of(error), "text": printable_line(str(error))} for error in errors],
        "notes": [*map(printable_line, text.notes)],
        "has_tokenizer": text.codec is not None,
        "has_chat_template": text.codec is not None and text.codec.chat_template is not None,
        "tokenizer_vocab_size": None if text.codec is None else text.codec.vocab_size,
    }
    return facts if found.checkpoint is None else facts | _served(found.checkpoint)


def _served(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    return {
        "model_type": config.model_type,
        "implementation": Implementation.choose(AUTO, config).value,
        "dtype": config.dtype.value,
        "weight_format": None if config.quantization is None else config.quantization.label,
        "num_layers": config.num_layers,
        "legal_cuts": sorted(config.legal_cuts),
        "resident_bytes": resident_bytes(checkpoint),
        "file_bytes": checkpoint.weight_file_bytes,
        "num_ignored_tensors": checkpoint.ignored.num_tensors,
    }


def resident_bytes(checkpoint: Checkpoint) -> int:
    """Size of the weights in the checkpoint's dtype on one stage."""
    config = checkpoint.config
    return stage_weight_bytes(config, config.dtype, 0, config.num_layers, has_embeddings=True, has_head=True)


def _text(name: str, found: Inspection, text: TextInspection) -> str:
    """Lines for a terminal, whose texts from files are escaped."""
    notes = [f"Note: {printable_line(note)}" for note in text.notes]
    name = escaped(name)
    errors = (*found.errors, *text.errors)
    if errors or found.checkpoint is None:
        reasons = [f"- {printable_line(str(error))}" for error in errors]
        return "\n".join([f"{name} is not served:", *reasons, *notes])
    config = found.checkpoint.config
    weights = "plain" if config.quantization is None else config.quantization.label
    lines = [
        f"{name} is served: {config.model_type}, {weights} weights",
        f"Weights: {format_size(resident_bytes(found.checkpoint))} in {config.dtype.value}",
        f"Layers: {config.num_layers}; a stage can begin with {_cuts(sorted(config.legal_cuts))}",
    ]
    if not config.has_row:
        lines.append("Its layers are computed by transformers, as Stageline has none: slower and less tested")
    if text.codec is not None:
        template = "a chat template" if text.codec.chat_template is not None else "no chat template"
        lines.append(f"Tokenizer: {text.codec.vocab_size} ids, {template}")
    if (ignored := found.checkpoint.ignored).num_tensors:
        size = format_size(ignored.num_bytes)
        lines.append(f"Not read: {ignored.num_tensors} tensors of other modalities, {size}")
    return "\n".join([*lines, *notes])


def _cuts(cuts: list[int]) -> str:
    """Layers as ranges."""
    if not cuts:
        return "layer 0 only"
    if len(cuts) == cuts[-1]:
        return "any of them"
    return f"layers 0, {', '.join(map(str, cuts))}"
