"""`stageline plan --check`: whether a checkpoint is served, and every reason why not."""

import json
from pathlib import Path

from checkpoint import Checkpoint, stage_weight_bytes
from checkpoint.files import is_named
from checkpoint.inspection import TOKENIZER_FILE, Inspection, inspect
from wire.errors import reason_of
from wire.exit_codes import ExitCode
from wire.sizes import format_size


def check(directory: Path, *, as_json: bool) -> int:
    """Print the result; the exit code is 0 for a checkpoint that is served, else 1."""
    found = inspect(directory)
    facts = check_facts(directory, found)
    print(json.dumps(facts, indent=2) if as_json else _text(directory, found))
    return ExitCode.DONE if found.checkpoint is not None else ExitCode.FAILED


def check_facts(directory: Path, found: Inspection) -> dict[str, object]:
    """The result for JSON; sizes in bytes."""
    facts: dict[str, object] = {
        "directory": str(directory),
        "is_served": found.checkpoint is not None,
        "reasons": [{"code": reason_of(error), "text": str(error)} for error in found.errors],
    }
    return facts if found.checkpoint is None else facts | _served(found.checkpoint)


def _served(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    return {
        "model_type": config.model_type,
        "dtype": config.dtype.value,
        "weight_format": None if config.quantization is None else config.quantization.label,
        "num_layers": config.num_layers,
        "legal_cuts": sorted(config.legal_cuts),
        "resident_bytes": resident_bytes(checkpoint),
        "file_bytes": checkpoint.weight_file_bytes,
        "num_ignored_tensors": checkpoint.ignored.num_tensors,
        "has_tokenizer": is_named(checkpoint.directory / TOKENIZER_FILE),
    }


def resident_bytes(checkpoint: Checkpoint) -> int:
    """Size of the weights in the checkpoint's dtype on one stage."""
    config = checkpoint.config
    return stage_weight_bytes(config, config.dtype, 0, config.num_layers, has_embeddings=True, has_head=True)


def _text(directory: Path, found: Inspection) -> str:
    if found.checkpoint is None:
        return "\n".join([f"{directory} is not served:", *(f"- {error}" for error in found.errors)])
    config = found.checkpoint.config
    weights = "plain" if config.quantization is None else config.quantization.label
    lines = [
        f"{directory} is served: {config.model_type}, {weights} weights",
        f"Weights: {format_size(resident_bytes(found.checkpoint))} in {config.dtype.value}",
        f"Layers: {config.num_layers}; a stage can begin with {_cuts(sorted(config.legal_cuts))}",
    ]
    if (ignored := found.checkpoint.ignored).num_tensors:
        size = format_size(ignored.num_bytes)
        lines.append(f"Not read: {ignored.num_tensors} tensors of other modalities, {size}")
    if not is_named(directory / TOKENIZER_FILE):
        lines.append(f"{TOKENIZER_FILE} is missing: token ids only, no grammars")
    return "\n".join(lines)


def _cuts(cuts: list[int]) -> str:
    """Layers as ranges."""
    if not cuts:
        return "layer 0 only"
    if len(cuts) == cuts[-1]:
        return "any of them"
    return f"layers 0, {', '.join(map(str, cuts))}"
