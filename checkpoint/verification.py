"""Whether a checkpoint has the tensors of its config, from the headers of its files; rotary ones are read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from checkpoint.blueprint import Attention, Blueprint, Latent
from checkpoint.compressed import Compressed
from checkpoint.dtypes import DType, StoredDType
from checkpoint.errors import CheckpointError, MissingTensor, UnexpectedTensor, UnsupportedModel, WrongShape
from checkpoint.files import open_regular
from checkpoint.headers import TensorEntry
from checkpoint.quantization import StoredTensor, is_unused
from checkpoint.rope_config import RopeConfig, RopeKind
from checkpoint.tensors import stage_tensor_shapes, stored_tensors


def verify_tensors(config: Blueprint, tensors: Mapping[str, TensorEntry]) -> None:
    """Check, from the headers alone, that the checkpoint has exactly the tensors of `config`.

    Rotary frequencies (see `verify_frequencies`), draft layers, and scales of quantised activations are
    allowed in addition.
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
    if name.endswith(_FREQUENCIES) or is_scale or name.startswith(config.names.ignored):
        return True
    return name.startswith(draft_prefixes(config))


_FREQUENCIES = "rotary_emb.inv_freq"
_RELATIVE, _ABSOLUTE = 2.0**-7, 1e-7
"""Tolerances, since models were stored after a conversion to bf16 or f16."""


def verify_frequencies(config: Blueprint, tensors: Mapping[str, TensorEntry], directory: Path) -> None:
    """Check that stored rotary frequencies, which nothing uses, are those of the config.

    They may be scaled or not: transformers stored either. Of llama3 and yarn only the range is checked.
    Raises UnexpectedTensor for others.
    """
    for name, entry in tensors.items():
        if name.endswith(_FREQUENCIES) and not name.startswith(config.names.ignored):
            stored = _frequencies(entry, directory)
            ranges = [ranges for rope, width in _ropes(config, name) for ranges in _ranges(rope, width)]
            if not any(_are_within(stored, each) for each in ranges):
                wanted = [high for _, high in ranges[0]] if ranges else []
                raise UnexpectedTensor(
                    f"tensor {name} of shape {entry.shape} has the rotary frequencies {_few(stored)}, the "
                    f"config gives {_few(wanted)}: correct rope_theta and rope_scaling, or remove the tensor"
                )


def _few(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.6g}" for number in numbers[:4])
    return f"{shown}, ..." if len(numbers) > 4 else shown or "none"


def _frequencies(entry: TensorEntry, directory: Path) -> Sequence[float]:
    """Elements of a vector of at most as many bytes as that of the widest head; none of another tensor."""
    kinds = {DType.F32: "f", DType.F16: "e", DType.BF16: "H"}
    kind = next((kind for dtype, kind in kinds.items() if entry.dtype == dtype), None)
    if kind is None or len(entry.shape) != 1 or entry.num_bytes > _MOST_BYTES:
        return ()
    with open_regular(directory / entry.file) as stream:
        stream.seek(entry.begin)
        content = stream.read(entry.num_bytes)
    words: tuple[int | float, ...] = struct.unpack(f"<{entry.shape[0]}{kind}", content)
    if entry.dtype != DType.BF16:
        return words
    return struct.unpack(
        f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(int(each) << 16 for each in words))
    )


_MOST_BYTES = 2**18


def _ropes(config: Blueprint, name: str) -> list[tuple[RopeConfig, int]]:
    """Rotary embeddings and widths of heads of the layer that `name` is of, or of all layers."""
    names = config.names
    of_layer = [
        plan for layer, plan in enumerate(config.layers) if name.startswith(names.in_layer(layer, ""))
    ]
    mixers = (plan.mixer for plan in dict.fromkeys(of_layer or config.layers))
    return [
        (mixer.rope, mixer.head_dim if isinstance(mixer, Attention) else mixer.rope_dim)
        for mixer in mixers
        if isinstance(mixer, Attention | Latent | Compressed) and mixer.rope is not None
    ]


def _ranges(rope: RopeConfig, head_dim: int) -> list[list[tuple[float, float]]]:
    """Lowest and highest frequency of each pair, of each embedding that may be stored."""
    width = rope.width or head_dim
    all_pairs = head_dim if rope.kind is RopeKind.PROPORTIONAL else width
    plain = [rope.theta ** (-pair / all_pairs) for pair in range(0, width, 2)]
    divisors: list[list[float]] = [[1.0] * len(plain)]
    match rope.kind:
        case RopeKind.LINEAR | RopeKind.PROPORTIONAL:
            divisors.append([rope.factor] * len(plain))
        case RopeKind.LONGROPE:
            divisors += [list(rope.short_factors), list(rope.long_factors)]
        case RopeKind.LLAMA3 | RopeKind.YARN:
            return [[(each / rope.factor, each) for each in plain]]
    return [[(each / by, each / by) for each, by in zip(plain, factors, strict=True)] for factors in divisors]


def _are_within(stored: Sequence[float], ranges: Sequence[tuple[float, float]]) -> bool:
    """Whether there are as many numbers as ranges, each in its range but for rounding."""
    return len(stored) == len(ranges) and all(
        low * (1 - _RELATIVE) - _ABSOLUTE <= number <= high * (1 + _RELATIVE) + _ABSOLUTE
        for number, (low, high) in zip(stored, ranges, strict=True)
    )


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
