"""Whether a checkpoint has the tensors of its config, from the headers of its files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from checkpoint.blueprint import Blueprint
from checkpoint.dtypes import StoredDType
from checkpoint.errors import CheckpointError, MissingTensor, UnexpectedTensor, UnsupportedModel, WrongShape
from checkpoint.headers import TensorEntry
from checkpoint.quantization import StoredTensor, is_unused
from checkpoint.tensors import stage_tensor_shapes, stored_tensors


def verify_tensors(config: Blueprint, tensors: Mapping[str, TensorEntry]) -> None:
    """Check, from the headers alone, that the checkpoint has exactly the tensors of `config`.

    Rotary `inv_freq` buffers, draft layers, and scales of quantised activations are allowed in addition.
    Raises the first of `tensor_errors`.
    """
    for error in tensor_errors(config, tensors):
        raise error


def tensor_errors(config: Blueprint, tensors: Mapping[str, TensorEntry]) -> Iterator[CheckpointError]:
    """MissingTensor, UnexpectedTensor, and WrongShape, or UnsupportedModel for a dtype, of each tensor.

    Errors name the tensors.
    """
    shapes = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    expected = stored_tensors(config, shapes)
    if missing := [name for name in expected if name not in tensors]:
        yield MissingTensor(f"checkpoint lacks {_listed(missing)}{_of_format(config)}")
    extra = [name for name in tensors if name not in expected and not _is_harmless(config, name)]
    if extra:
        yield UnexpectedTensor(
            f"checkpoint has {_listed(extra)}, unknown to {config.model_type!r}{_of_format(config)}"
        )
    for name in (name for name in expected if name in tensors):
        if (error := _mismatch(tensors[name], expected[name], _of_format(config))) is not None:
            yield error


def _mismatch(entry: TensorEntry, expected: StoredTensor, of_format: str) -> CheckpointError | None:
    name, shape, shapes = expected.name, entry.shape, expected.shapes
    if entry.dtype not in expected.dtypes:
        return UnsupportedModel(
            f"tensor {name} has dtype {entry.dtype.value}, the config requires {_either(expected.dtypes)}"
            f"{of_format}"
        )
    is_right = shape in shapes if shapes else len(shape) == 1
    if is_right:
        return None
    required = " or ".join(map(str, shapes)) or "one dimension"
    return WrongShape(f"tensor {name} has shape {shape}, the config requires {required}{of_format}")


def _either(dtypes: tuple[StoredDType, ...]) -> str:
    return " or ".join(dtype.value for dtype in dtypes)


def _of_format(config: Blueprint) -> str:
    return "" if config.quantization is None else f" ({config.quantization.label})"


def _is_harmless(config: Blueprint, name: str) -> bool:
    is_scale = config.quantization is not None and is_unused(name)
    if name.endswith("rotary_emb.inv_freq") or is_scale or name.startswith(config.names.ignored):
        return True
    return name.startswith(draft_prefixes(config))


def draft_prefixes(config: Blueprint) -> tuple[str, ...]:
    """Prefixes of the tensors of draft layers."""
    names = config.names
    if names.drafts_module is not None:
        return (f"{names.prefix}{names.drafts_module}.",) if config.num_draft_layers else ()
    drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
    return tuple(names.in_layer(layer, "") for layer in drafts)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more tensors"
