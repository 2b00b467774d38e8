"""Formats of quantised weights: which stored tensors hold a matrix.

Sources: compressed-tensors 0.20, transformers 5.23 (fp8, mxfp4), bitsandbytes 0.50, AutoGPTQ and GPTQModel,
AutoAWQ, TensorRT Model Optimizer, ggml. `stage_worker.model.unpack` computes the weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from fnmatch import translate
from functools import lru_cache
from typing import Protocol

from checkpoint.dtypes import BlockDType, DType, PackedDType, StoredDType
from checkpoint.errors import UnsupportedModel
from checkpoint.headers import TensorEntry

Shape = tuple[int, ...]
WORD_BITS = 32
"""Bits of the integers that hold packed 4-bit and 8-bit numbers."""
_FLOATS: tuple[StoredDType, ...] = tuple(DType)
_NIBBLES = 2
"""4-bit numbers in a byte."""


class StoredPart(Enum):
    """A stored tensor's purpose."""

    WEIGHT = auto()
    SCALE = auto()
    ZERO_POINT = auto()
    GROUP_INDEX = auto()
    """Group of each column."""
    GLOBAL_SCALE = auto()
    VALUES = auto()
    """The number that each code stands for."""
    NESTED_SCALE = auto()
    NESTED_VALUES = auto()
    STATE = auto()
    """JSON with the offset of nested scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, of one of these dtypes and shapes; without shapes it has one dimension."""

    name: str
    dtypes: tuple[StoredDType, ...]
    shapes: tuple[Shape, ...]


Parts = dict[StoredPart, StoredTensor]


@dataclass(frozen=True, slots=True)
class Mark:
    """Ends of names: tensor `stored` is there for each quantised matrix whose name ends with `matrix`."""

    stored: str
    matrix: str = ".weight"

    def of(self, matrix: str) -> str:
        """The tensor that tells a quantised `matrix` from a plain one."""
        return matrix.removesuffix(self.matrix) + self.stored


class Scheme(Protocol):
    """A format of matrices."""

    @property
    def label(self) -> str:
        """The format's name in messages."""

    @property
    def mark(self) -> Mark:
        """The tensor that a plain matrix never has."""

    def parts(self, name: str, shape: Shape) -> Parts:
        """The stored tensors of matrix `name` ("X.weight") of `shape` [out, in]. Raises UnsupportedModel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """fp8 or int8 elements with one scale per block [rows, columns]; 0 stands for all rows or columns."""

    dtype: PackedDType
    block: tuple[int, int]
    scale: str = "weight_scale"
    is_symmetric: bool = True

    @property
    def label(self) -> str:
        return "int8" if self.dtype is PackedDType.I8 else "fp8"

    @property
    def mark(self) -> Mark:
        return Mark(f".{self.scale}")

    def parts(self, name: str, shape: Shape) -> Parts:
        module = _module(name)
        rows, columns = (1 if size == 0 else -(-n // size) for n, size in zip(shape, self.block, strict=True))
        grids = ((rows, columns),) if columns > 1 else ((rows, 1), (rows,))
        if rows == columns == 1:
            grids = (*grids, ())
        found = {
            StoredPart.WEIGHT: _stored(name, (self.dtype,), shape),
            StoredPart.SCALE: _stored(f"{module}.{self.scale}", (*_FLOATS, PackedDType.F8_E8M0), *grids),
        }
        if not self.is_symmetric:
            found[StoredPart.ZERO_POINT] = _stored(f"{module}.weight_zero_point", (self.dtype,), *grids)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInts:
    """compressed-tensors' pack-quantized: numbers of `bits` bits along rows, as offsets from the least."""

    bits: int
    group: int
    is_symmetric: bool
    has_group_index: bool

    @property
    def label(self) -> str:
        return f"int{self.bits}"

    @property
    def mark(self) -> Mark:
        return Mark(".weight_packed")

    def parts(self, name: str, shape: Shape) -> Parts:
        module, (rows, columns) = _module(name), shape
        per_word = WORD_BITS // self.bits
        groups = _groups(name, columns, self.group)
        found = {
            StoredPart.WEIGHT: _stored(
                f"{module}.weight_packed", (PackedDType.I32,), (rows, -(-columns // per_word))
            ),
            StoredPart.SCALE: _stored(f"{module}.weight_scale", _FLOATS, (rows, groups)),
        }
        if not self.is_symmetric:
            packed = (-(-rows // per_word), groups)
            found[StoredPart.ZERO_POINT] = _stored(f"{module}.weight_zero_point", (PackedDType.I32,), packed)
        if self.has_group_index:
            integers = (PackedDType.I32, PackedDType.I64)
            found[StoredPart.GROUP_INDEX] = _stored(f"{module}.weight_g_idx", integers, (columns,))
        return found


class Fp4Layout(Enum):
    """How producers name and arrange 4-bit floats."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    GPT_OSS = "mxfp4 of transformers"
    DEEPSEEK = "experts of DeepSeek V4"


_FP4_MARKS = {
    Fp4Layout.COMPRESSED_TENSORS: Mark(".weight_packed"),
    Fp4Layout.MODELOPT: Mark(".weight_scale"),
    Fp4Layout.GPT_OSS: Mark("_blocks", ""),
    Fp4Layout.DEEPSEEK: Mark(".scale"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4:
    """4-bit floats (E2M1), low nibble first: NVFP4 has groups of 16 and two scales, MXFP4 of 32 and one."""

    layout: Fp4Layout
    is_nv: bool

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 16 if self.is_nv else 32

    @property
    def label(self) -> str:
        return "nvfp4" if self.is_nv else "mxfp4"

    @property
    def mark(self) -> Mark:
        return _FP4_MARKS[self.layout]

    def parts(self, name: str, shape: Shape) -> Parts:
        *leading, columns = shape
        groups = _whole_groups(name, columns, self.group)
        byte = (PackedDType.U8,)
        if self.layout is Fp4Layout.GPT_OSS:
            blocks = (*leading, groups, self.group // _NIBBLES)
            return {
                StoredPart.WEIGHT: _stored(f"{name}_blocks", byte, blocks),
                StoredPart.SCALE: _stored(f"{name}_scales", byte, (*leading, groups)),
            }
        module = _module(name)
        if self.layout is Fp4Layout.DEEPSEEK:
            return {
                StoredPart.WEIGHT: _stored(name, (PackedDType.I8, *byte), (*leading, columns // _NIBBLES)),
                StoredPart.SCALE: _stored(f"{module}.scale", (PackedDType.F8_E8M0,), (*leading, groups)),
            }
        packed = name if self.layout is Fp4Layout.MODELOPT else f"{module}.weight_packed"
        scales = (PackedDType.F8_E4M3,) if self.is_nv else (PackedDType.U8, PackedDType.F8_E8M0)
        found = {
            StoredPart.WEIGHT: _stored(packed, byte, (*leading, columns // _NIBBLES)),
            StoredPart.SCALE: _stored(f"{module}.weight_scale", scales, (*leading, groups)),
        }
        if self.is_nv:
            is_modelopt = self.layout is Fp4Layout.MODELOPT
            last = "weight_scale_2" if is_modelopt else "weight_global_scale"
            found[StoredPart.GLOBAL_SCALE] = _stored(f"{module}.{last}", (DType.F32,), (1,), ())
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """Stored [in, out]: numbers packed along "in"; `zero_offset` is added to zero points.

    Without `has_group_index`, which is legal unless columns are sorted (`is_sorted`), groups are in order.
    """

    bits: int
    group: int
    zero_offset: int
    is_sorted: bool = False
    has_group_index: bool = True

    @property
    def label(self) -> str:
        return f"gptq int{self.bits}"

    @property
    def mark(self) -> Mark:
        return Mark(".qweight")

    def parts(self, name: str, shape: Shape) -> Parts:
        module, (rows, columns) = _module(name), shape
        per_word = WORD_BITS // self.bits
        groups = _groups(name, columns, self.group)
        words = (PackedDType.I32,)
        found = {
            StoredPart.WEIGHT: _stored(f"{module}.qweight", words, (_words(name, columns, per_word), rows)),
            StoredPart.ZERO_POINT: _stored(f"{module}.qzeros", words, (groups, _words(name, rows, per_word))),
            StoredPart.SCALE: _stored(f"{module}.scales", _FLOATS, (groups, rows)),
        }
        if self.has_group_index:
            found[StoredPart.GROUP_INDEX] = _stored(f"{module}.g_idx", words, (columns,))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """AutoAWQ's "gemm", stored [in, out]: 4-bit numbers packed along "out" in an order of its own."""

    group: int

    @property
    def label(self) -> str:
        return "awq int4"

    @property
    def mark(self) -> Mark:
        return Mark(".qweight")

    def parts(self, name: str, shape: Shape) -> Parts:
        module, (rows, columns) = _module(name), shape
        groups = _groups(name, columns, self.group)
        words, packed = (PackedDType.I32,), _words(name, rows, 8)
        return {
            StoredPart.WEIGHT: _stored(f"{module}.qweight", words, (columns, packed)),
            StoredPart.ZERO_POINT: _stored(f"{module}.qzeros", words, (groups, packed)),
            StoredPart.SCALE: _stored(f"{module}.scales", _FLOATS, (groups, rows)),
        }


NF4_BLOCK = 64
"""Elements in row-major order that share a scale."""
NF4_NESTED_BLOCK = 256
"""Scales that share a nested scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4:
    """bitsandbytes' nf4, high nibble first; nested scales are 8-bit codes with scales of their own."""

    is_nested: bool

    @property
    def label(self) -> str:
        return "nf4"

    @property
    def mark(self) -> Mark:
        return Mark(".absmax", "")

    def parts(self, name: str, shape: Shape) -> Parts:
        rows, columns = shape
        if columns % _NIBBLES:
            raise UnsupportedModel(f"{name}: nf4 rows of {columns} elements, which is odd")
        blocks = -(-rows * columns // NF4_BLOCK)
        byte: tuple[StoredDType, ...] = (PackedDType.U8,)
        found = {
            StoredPart.WEIGHT: _stored(name, byte, (rows * columns // _NIBBLES, 1)),
            StoredPart.SCALE: _stored(f"{name}.absmax", byte if self.is_nested else (DType.F32,), (blocks,)),
            StoredPart.VALUES: _stored(f"{name}.quant_map", (DType.F32,), (16,)),
            StoredPart.STATE: _stored(f"{name}.quant_state.bitsandbytes__nf4", byte),
        }
        if self.is_nested:
            nested = (-(-blocks // NF4_NESTED_BLOCK),)
            found[StoredPart.NESTED_SCALE] = _stored(f"{name}.nested_absmax", (DType.F32,), nested)
            found[StoredPart.NESTED_VALUES] = _stored(f"{name}.nested_quant_map", (DType.F32,), (256,))
        return found


def _stored(name: str, dtypes: tuple[StoredDType, ...], *shapes: Shape) -> StoredTensor:
    return StoredTensor(name=name, dtypes=dtypes, shapes=shapes)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _groups(name: str, columns: int, group: int) -> int:
    """Number of groups; a `group` of 0 has all columns."""
    return 1 if group == 0 else _whole_groups(name, columns, group)


def _whole_groups(name: str, columns: int, group: int) -> int:
    if columns % group:
        raise UnsupportedModel(f"{name}: rows of {columns} elements are not whole groups of {group}")
    return columns // group


def _words(name: str, count: int, per_word: int) -> int:
    if count % per_word:
        raise UnsupportedModel(f"{name}: {count} elements do not fill integers of {per_word} elements")
    return count // per_word


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """GGUF: a tensor of blocks, each a part of a row."""

    dtype: BlockDType

    @property
    def label(self) -> str:
        return self.dtype.value

    @property
    def mark(self) -> Mark:
        return Mark("", "")

    def parts(self, name: str, shape: Shape) -> Parts:
        return {StoredPart.WEIGHT: _stored(name, (self.dtype,), shape)}


@dataclass(frozen=True, slots=True)
class PackedModules:
    """The format of modules whose name matches; see `matches`."""

    pattern: str
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix: its shape [out, in] once unpacked, its format and its stored tensors."""

    name: str
    shape: Shape
    scheme: Scheme
    parts: Mapping[StoredPart, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Which matrices of a checkpoint are quantised, and how.

    The tensors that are stored decide, see `matching`: `stored` has the formats of the matrices that the
    config describes otherwise, None for plain ones. The config decides for a matrix of a layer that is
    missing: the first of `targets` that matches its module gives its format, unless the module matches
    `ignore`. The embeddings are always plain. `parts` replaces parts of a module's name, where patterns are
    for other names than those of the files.
    """

    targets: tuple[PackedModules, ...]
    ignore: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict, hash=False)
    stored: Mapping[str, Scheme | None] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Names of the formats, such as "fp8"."""
        return " and ".join(dict.fromkeys(target.scheme.label for target in self.targets))

    def scheme_of(self, name: str) -> Scheme | None:
        """The format of matrix `name` ("X.weight") of a layer or of the head; None for a plain one."""
        return self.stored[name] if name in self.stored else self._described(name)

    def _described(self, name: str) -> Scheme | None:
        module = self._module(name)
        is_in_layer = any(part.isdecimal() for part in module.split("."))
        if not is_in_layer or _matches_any(self.ignore, module):
            return None
        return next((one.scheme for one in self.targets if matches(one.pattern, module)), None)

    def _module(self, name: str) -> str:
        return ".".join(self.parts.get(part, part) for part in _module(name).split("."))

    def matching(self, tensors: Mapping[str, TensorEntry]) -> Quantization:
        """This, with what only the `tensors` of a checkpoint say.

        Lists of modules that stay plain are written for one hierarchy of names, and as prefixes, parts of
        names or expressions, depending on the tool; so a matrix is quantised if its parts are stored, and
        plain if it is stored in floats. Other forms, which the config must then allow, are refused when
        tensors are compared with it.
        """
        kinds = {name.rpartition(".")[2] for name in tensors}
        scale = _scale_name(tensors, kinds)
        targets = tuple(replace(one, scheme=_as_stored(one.scheme, kinds, scale)) for one in self.targets)
        found = replace(self, targets=targets)
        stored = {
            name: scheme for name, scheme in found._decided(tensors) if scheme != found._described(name)
        }
        return replace(found, stored=stored)

    def _decided(self, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Scheme | None]]:
        """The matrices that `tensors` decide on, and their formats; None for plain ones."""
        marks = tuple(dict.fromkeys(one.scheme.mark for one in self.targets))
        for name, entry in tensors.items():
            if (mark := next((mark for mark in marks if name.endswith(mark.stored)), None)) is not None:
                matrix = name.removesuffix(mark.stored) + mark.matrix
                if (scheme := self._format_with(mark, matrix)) is not None:
                    yield matrix, scheme
                continue
            is_matrix = isinstance(entry.dtype, DType) and len(entry.shape) > 1
            if is_matrix and not any(mark.of(name) in tensors for mark in marks):
                yield name, None

    def _format_with(self, mark: Mark, name: str) -> Scheme | None:
        """The first format of the matrix's module with this mark, whatever the config ignores."""
        module = self._module(name)
        fitting = (one for one in self.targets if one.scheme.mark == mark)
        return next((one.scheme for one in fitting if matches(one.pattern, module)), None)


_SHORT_SCALE = ".scale"


def _scale_name(names: Collection[str], kinds: Collection[str]) -> str:
    """Name of the scales of fp8 tensors, which configs do not tell.

    vLLM and AutoFP8 write `weight_scale`, transformers `weight_scale_inv`, Mistral `qscale_weight`, DeepSeek
    V4 `scale`.
    """
    short = (name.removesuffix(_SHORT_SCALE) for name in names if name.endswith(_SHORT_SCALE))
    is_short = any(f"{module}.weight" in names for module in short)
    return next((scale for scale in _SCALES if scale in kinds), "scale" if is_short else "weight_scale")


def _as_stored(scheme: Scheme, kinds: Collection[str], scale: str) -> Scheme:
    """`scheme` with the parts that a checkpoint has whose names end with `kinds`."""
    match scheme:
        case Scaled():
            return replace(scheme, scale=scale)
        case Gptq():
            return replace(scheme, has_group_index=scheme.is_sorted or "g_idx" in kinds)
    return scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensors:
    """The tensors of a GGUF file that are stored in blocks, any of a model's, by name."""

    schemes: Mapping[str, Blocks] = field(hash=False)

    @property
    def label(self) -> str:
        """Names of the formats, most frequent first."""
        counts = Counter(scheme.label for scheme in self.schemes.values())
        return " and ".join(label for label, _ in counts.most_common())

    def scheme_of(self, name: str) -> Scheme | None:
        """See `Quantization.scheme_of`."""
        return self.schemes.get(name)

    def packed(self, shapes: Mapping[str, Shape]) -> dict[str, PackedMatrix]:
        """The tensors among `shapes` that are stored in blocks."""
        return {
            name: PackedMatrix(name, shape, scheme, scheme.parts(name, shape))
            for name, shape in shapes.items()
            if (scheme := self.schemes.get(name)) is not None
        }


def packed_matrices(
    quantization: Quantization | None, shapes: Mapping[str, Shape], *, embeddings: str
) -> dict[str, PackedMatrix]:
    """Return the quantised tensors among `shapes`. Raises UnsupportedModel for an impossible shape."""
    found: dict[str, PackedMatrix] = {}
    if quantization is None:
        return found
    for name, shape in shapes.items():
        if len(shape) < 2 or name == embeddings or (scheme := quantization.scheme_of(name)) is None:
            continue
        if len(shape) > 2 and not isinstance(scheme, Fp4):
            raise UnsupportedModel(
                f"tensor {name} has the matrices of all {shape[0]} experts, which is not supported in"
                f" {scheme.label}: use a checkpoint with one matrix per tensor, or a plain one"
            )
        found[name] = PackedMatrix(name, shape, scheme, scheme.parts(name, shape))
    return found


_SCALES = ("weight_scale_inv", "qscale_weight")
_UNUSED_SUFFIXES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".qscale_act",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_shape",
)
"""Scales of activations and of the KV cache, and a shape that the config gives, too."""


def is_unused(name: str) -> bool:
    """Whether a quantised checkpoint may have this tensor without effect on the weights."""
    return name.endswith(_UNUSED_SUFFIXES)


def matches(pattern: str, module: str) -> bool:
    """Whether `pattern` selects `module`, a name such as "model.layers.0.mlp.up_proj".

    "re:..." is a regular expression for the beginning of the name; a pattern with * or ? is a glob for the
    whole name or for a parent; any other one is a sequence of whole parts of the name.
    """
    return _matches_any((pattern,), module)


def _matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of `patterns` matches; lists of hundreds are asked for each of thousands of experts."""
    names, expressions = _compiled(patterns)
    parts = module.split(".")
    ends = ((begin, end) for begin in range(len(parts)) for end in range(begin + 1, len(parts) + 1))
    if names and any(".".join(parts[begin:end]) in names for begin, end in ends):
        return True
    return any(expression.match(module) is not None for expression in expressions)


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Sequences of whole parts, and expressions for the others."""
    expressions = []
    names = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(re.compile(pattern[3:]))
        elif "*" in pattern or "?" in pattern:
            expressions += [re.compile(translate(glob)) for glob in (pattern, f"{pattern}.*")]
        else:
            names.add(pattern.strip("."))
    return frozenset(names), tuple(expressions)
