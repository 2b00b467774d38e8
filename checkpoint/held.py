"""What a stage holds: matrices that a GPU holds in 4 or 8 bits, and the sizes of weights and of caches.

`stage_worker.model.held_matrices` has the tensors of such matrices; Triton kernels multiply by them as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from checkpoint.blueprint import Blueprint, Experts, Latent, LayerPlan, Mixer, Opaque
from checkpoint.compressed import Compressed
from checkpoint.dtypes import INT4_GROUP, INT4_ROWS, DType, PackedDType, ScaledDType, WeightFormat
from checkpoint.errors import UnsupportedModel
from checkpoint.names import EXPERT_ROLES, NameTable, Pack, TensorRole
from checkpoint.quantization import Awq, Fp4, Gptq, PackedInts, Quantization, Scaled, Scheme
from checkpoint.recurrent import Pageless, StatePart
from checkpoint.tensors import (
    STREAM_ROLES,
    RoleShapes,
    collapse_shapes,
    final_norm_tensors,
    is_matrix,
    layer_tensors,
    num_elements,
    role_shapes,
    stage_tensor_shapes,
)

FLOAT_BYTES = 4
"""Scales of stored formats are float32 in memory, whatever the file has: exact for each of them. The two of
NVFP4 are one there, rounded as on a CPU; exponents of MXFP4 stay bytes.
"""
_ORDER_BYTES = 4
LEAST_GROUP = 16
"""Columns of the smallest product of a tensor core: groups and blocks must be multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNibbles:
    """4 bits a weight: groups of `group` columns of a row share a scale (0: all columns), and a zero point
    of one byte if it `has_zeros`. With `has_order`, columns are sorted by their groups.

    Codes of a matrix that `is_float` are E2M1. One that `has_exponents` has scales of one byte, E8M0. The
    matrices of all `experts` are one below the other, each with an order of its own.
    """

    rows: int
    columns: int
    group: int
    experts: int = 1
    has_zeros: bool = False
    has_order: bool = False
    is_float: bool = False
    has_exponents: bool = False

    def __post_init__(self) -> None:
        assert self.group % LEAST_GROUP == 0, "products of parts of tiles"
        assert self.rows % self.experts == 0, "experts of different sizes"

    @property
    def half(self) -> int:
        """Columns in the low bits of a run of bytes, whose high bits have as many more; of one group."""
        return 64 if self.group % 64 == 0 else 32 if self.group % 32 == 0 else LEAST_GROUP

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group) if self.group else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row, in whole runs."""
        return -(-self.columns // (2 * self.half)) * self.half

    @property
    def num_bytes(self) -> int:
        """Size in memory with scales of float32, or of exponents."""
        of_group = (1 if self.has_exponents else FLOAT_BYTES) + self.has_zeros
        order = self.experts * self.columns * _ORDER_BYTES if self.has_order else 0
        return self.rows * (self.row_bytes + self.num_groups * of_group) + order


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """One byte a weight, fp8 (E4M3) or int8: blocks of `height` rows and `width` columns share a scale; a
    `width` of 0 has all columns. The matrices of all `experts` are one below the other.
    """

    rows: int
    columns: int
    height: int
    width: int
    is_fp8: bool
    experts: int = 1

    def __post_init__(self) -> None:
        assert self.width % LEAST_GROUP == 0, "products of parts of tiles"
        assert self.height >= 1
        assert self.rows % self.experts == 0, "experts of different sizes"
        assert self.experts == 1 or self.rows // self.experts % self.height == 0, "experts share scales"

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.width) if self.width else 1

    @property
    def num_row_blocks(self) -> int:
        """Blocks of a column."""
        return -(-self.rows // self.height)

    @property
    def num_bytes(self) -> int:
        """Size in memory with float32 scales."""
        return self.rows * self.columns + self.num_blocks * self.num_row_blocks * FLOAT_BYTES


HeldPlan = HeldNibbles | HeldBytes


STACKED = (
    (
        *(TensorRole.Q, TensorRole.K, TensorRole.V, TensorRole.KDA_B),
        *(TensorRole.KDA_DECAY_DOWN, TensorRole.KDA_GATE_DOWN),
    ),
    (TensorRole.CONV_Q, TensorRole.CONV_K, TensorRole.CONV_V),
    (TensorRole.GATE, TensorRole.UP),
    (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP),
    (TensorRole.SHARED_GATE, TensorRole.SHARED_UP),
    (TensorRole.DELTA_QKV, TensorRole.DELTA_Z, TensorRole.DELTA_B, TensorRole.DELTA_A),
    (TensorRole.ENTRY_VALUE, TensorRole.ENTRY_GATE, TensorRole.INDEX_VALUE, TensorRole.INDEX_GATE),
)
"""Roles whose tensors are one below the other in memory."""
_NOT_HELD = frozenset(
    {TensorRole.ROUTER, TensorRole.SHARED_WEIGHT, TensorRole.KV_UP}
    | {TensorRole.HEAD_KEYS, TensorRole.HEAD_VALUES, TensorRole.INDEX_QK}
    | {TensorRole.INDEX_Q, TensorRole.INDEX_K, TensorRole.INDEX_WEIGHT, TensorRole.O_GROUPS}
)
"""Matrices that other code than a projection multiplies by."""
_REORDERED = (TensorRole.Q, TensorRole.Q_UP, TensorRole.KV_DOWN, TensorRole.DELTA_QKV)
"""Stacks whose rows may get another order, so that they cannot share scales."""


def stacked_roles(role: TensorRole, kind: str, shapes: RoleShapes) -> tuple[TensorRole, ...]:
    """The roles of a layer with `shapes` that share a tensor with `role`, in the order of their rows."""
    stack = next((stack for stack in STACKED if role in stack), (role,))
    return tuple(part for part in stack if (part, kind) in shapes)


def held_plans(config: Blueprint, layer: int) -> dict[TensorRole, HeldPlan]:
    """The matrices of a layer that stay as they are stored with `Blueprint.holds_stored`.

    By the first role of their stack; all its tensors, and those of all experts, have one format. Others are
    unpacked.
    """
    if not config.holds_stored or not isinstance(config.quantization, Quantization):
        return {}
    shapes = role_shapes(config.hidden_size, config.layers[layer])
    plans: dict[TensorRole, HeldPlan] = {}
    for role, kind in shapes:
        roles = stacked_roles(role, kind, shapes)
        if not is_matrix(role, kind) or role in _NOT_HELD or role is not roles[0]:
            continue
        if (plan := _held_plan(config, config.quantization, layer, roles, shapes)) is not None:
            plans[role] = plan
    return plans


def _held_plan(
    config: Blueprint,
    quantization: Quantization,
    layer: int,
    roles: tuple[TensorRole, ...],
    shapes: RoleShapes,
) -> HeldPlan | None:
    """The format of the stack of `roles`; None if its tensors are plain or differ, or no product reads it."""
    packs = tuple(dict.fromkeys(config.names.pack_of(role) for role in roles))
    if any(pack.has_unit_axis for pack in packs):
        return None
    if len(packs) > 1 and roles[0] in EXPERT_ROLES and not all(pack.is_per_expert for pack in packs):
        return None
    *leading, _, columns = shapes[roles[0], "weight"]
    experts = leading[0] if leading else 1
    scheme = _common_scheme(quantization, config.names, layer, packs, experts)
    if scheme is None:
        return None
    heights = [sum(shapes[role, "weight"][-2] for role in pack.roles) for pack in packs]
    is_reordered = roles[0] in _REORDERED or any(pack.is_alternating for pack in packs)
    return _plan_of(scheme, heights, columns, experts, is_reordered=is_reordered)


@lru_cache(maxsize=1024)
def _common_scheme(
    quantization: Quantization, names: NameTable, layer: int, packs: tuple[Pack, ...], experts: int
) -> Scheme | None:
    """The format of all matrices of `packs`; None if they are plain or differ.

    Kept, since each plan of a model asks several times for the formats of thousands of experts.
    """
    schemes = {
        quantization.scheme_of(names.in_layer(layer, pack.tensor("weight", expert)))
        for pack in packs
        for expert in (range(experts) if pack.is_per_expert else (None,))
    }
    return schemes.pop() if len(schemes) == 1 else None


def _plan_of(
    scheme: Scheme, heights: list[int], columns: int, experts: int, *, is_reordered: bool
) -> HeldPlan | None:
    """The plan of each expert's matrices of `heights` rows, one below the other."""
    rows, parts = experts * sum(heights), heights if experts > 1 else heights[:-1]
    if isinstance(scheme, Scaled) and scheme.is_symmetric and scheme.block[1] % LEAST_GROUP == 0:
        height, width = scheme.block
        if height == 0 or is_reordered or any(part % height for part in parts):
            height = 1
        is_fp8 = scheme.dtype is PackedDType.F8_E4M3
        return HeldBytes(
            rows=rows, columns=columns, height=height, width=width, is_fp8=is_fp8, experts=experts
        )
    if isinstance(scheme, Fp4):
        return HeldNibbles(
            rows=rows,
            columns=columns,
            group=scheme.group,
            experts=experts,
            is_float=True,
            has_exponents=not scheme.is_nv,
        )
    if not isinstance(scheme, Awq | Gptq | PackedInts) or scheme.group % LEAST_GROUP:
        return None
    if not isinstance(scheme, Awq) and scheme.bits != 4:
        return None
    return HeldNibbles(
        rows=rows,
        columns=columns,
        group=scheme.group,
        experts=experts,
        has_zeros=not isinstance(scheme, PackedInts) or not scheme.is_symmetric,
        has_order=not isinstance(scheme, Awq) and scheme.has_group_index,
    )


def has_held(config: Blueprint) -> bool:
    """Whether `held_plans` would name any matrix with `Blueprint.holds_stored`."""
    if not config.has_row:
        return False
    holding = config.with_stored(holds_stored=True)
    return any(held_plans(holding, layer) for layer in range(config.num_layers))


def layer_sizes(config: Blueprint, dtype: DType) -> tuple[int, ...]:
    """Size of the weights of each layer in memory."""
    kinds = {kind: layer_weight_bytes(config.hidden_size, kind, dtype) for kind in config.kinds}
    return tuple(
        kinds[kind] - sum(_saved_bytes(plan, dtype) for plan in held_plans(config, layer).values())
        for layer, kind in enumerate(config.layers)
    )


def _saved_bytes(plan: HeldPlan, dtype: DType) -> int:
    return plan.rows * plan.columns * dtype.size_bytes - plan.num_bytes


def layer_weight_bytes(hidden_size: int, plan: LayerPlan, dtype: DType) -> int:
    """Size of the weights of a layer in memory."""
    if isinstance(plan.feed_forward, Opaque):
        return num_elements(shape for _, shape in plan.feed_forward.tensors) * dtype.size_bytes
    shapes = role_shapes(hidden_size, plan)
    is_wide = plan.connection is not None and plan.connection.is_wide
    of_streams = num_elements(shape for (role, _), shape in shapes.items() if role in STREAM_ROLES)
    wider = of_streams * (FLOAT_BYTES - dtype.size_bytes) if is_wide else 0
    if plan.weights is None:
        return num_elements(shapes.values()) * dtype.size_bytes + wider
    vectors = num_elements(shape for key, shape in shapes.items() if not is_matrix(*key))
    matrices = (shape for key, shape in shapes.items() if is_matrix(*key))
    sizes = (plan.weights.matrix_bytes(rows, columns, dtype) for rows, columns in matrices)
    return vectors * dtype.size_bytes + wider + sum(sizes)


def expert_weight_bytes(hidden_size: int, plan: LayerPlan, dtype: DType) -> int:
    """Size of the weights of all experts of a layer; a step reads only chosen experts."""
    shapes = role_shapes(hidden_size, plan).items()
    return num_elements(shape for (role, _), shape in shapes if role in EXPERT_ROLES) * dtype.size_bytes


def collapse_bytes(config: Blueprint, dtype: DType) -> int:
    """Size of what makes one row of several residual streams."""
    is_wide = config.collapse is not None and config.collapse.is_wide
    return num_elements(collapse_shapes(config).values()) * (FLOAT_BYTES if is_wide else dtype.size_bytes)


def table_bytes(plan: LayerPlan, dtype: DType) -> int:
    """Size of the tables in a layer's weights of which a step reads single rows."""
    return 0 if plan.ngrams is None else plan.ngrams.num_rows * plan.ngrams.head_dim * dtype.size_bytes


def stage_table_bytes(config: Blueprint, dtype: DType, layer_begin: int, layer_end: int) -> int:
    """Size of `table_bytes` of layers [layer_begin, layer_end): memory of the host, also of a GPU's stage."""
    return sum(table_bytes(plan, dtype) for plan in config.layers[layer_begin:layer_end])


def held_expert_bytes(config: Blueprint, layer: int, dtype: DType) -> int:
    """As `expert_weight_bytes`, for experts in the form in which layer number `layer` holds them."""
    held = held_plans(config, layer).items()
    saved = sum(_saved_bytes(plan, dtype) for role, plan in held if role in EXPERT_ROLES)
    return expert_weight_bytes(config.hidden_size, config.layers[layer], dtype) - saved


def head_bytes(config: Blueprint, dtype: DType) -> int:
    """Size of collapse, final norm and output head on a stage without embeddings.

    A tied head is a second copy of the embedding matrix there; a stage with both has one copy, see
    `stage_weight_bytes`.
    """
    if config.outer is not None:
        return num_elements(shape for _, shape in config.outer.after) * dtype.size_bytes
    rows = config.vocab_size + len(final_norm_tensors(config))
    return rows * config.hidden_size * dtype.size_bytes + collapse_bytes(config, dtype)


def stage_weight_bytes(
    config: Blueprint,
    dtype: DType,
    layer_begin: int,
    layer_end: int,
    *,
    has_embeddings: bool,
    has_head: bool,
) -> int:
    """Size in memory of a stage's weights, for layers [layer_begin, layer_end); tied weights count once."""
    shapes = stage_tensor_shapes(
        config, layer_begin, layer_end, has_embeddings=has_embeddings, has_head=has_head
    )
    if not config.has_row:
        return num_elements(shapes.values()) * dtype.size_bytes
    layers = range(layer_begin, layer_end)
    apart = {tensor.name for layer in layers for tensor in layer_tensors(config, layer)}
    apart |= collapse_shapes(config).keys()
    outside = num_elements(shape for name, shape in shapes.items() if name not in apart) * dtype.size_bytes
    outside += collapse_bytes(config, dtype) if has_head else 0
    sizes = layer_sizes(config, dtype)
    return outside + sum(sizes[layer] for layer in layers)


_NOT_ROUNDED: Mapping[str, Callable[[LayerPlan], bool]] = {
    "is a mixture of experts": lambda kind: isinstance(kind.feed_forward, Experts),
    "has compressed attention": lambda kind: isinstance(kind.mixer, Compressed),
    "has latent attention": lambda kind: isinstance(kind.mixer, Latent),
    "has recurrent layers": lambda kind: kind.recurrent is not None,
}
"""Layers whose weights keep the run dtype, and what a model with one of them is or has."""


def check_can_hold(config: Blueprint) -> None:
    """Raise UnsupportedModel for families without a row, layers of `_NOT_ROUNDED`, and matrices that lack
    whole groups of the weight format.
    """
    if config.weight_format is None:
        return
    if not config.has_row:
        raise UnsupportedModel(
            f"{config.model_type!r} has no native layers, which --quantize needs: leave it out"
        )
    for what, is_so in _NOT_ROUNDED.items():
        if any(map(is_so, config.kinds)):
            raise UnsupportedModel(
                f"{config.model_type!r} {what}, which --quantize does not support: leave it out"
            )
    if config.weight_format is not WeightFormat.INT4:
        return
    for layer in map(config.layers.index, config.kinds):
        for tensor in layer_tensors(config, layer):
            if tensor.is_matrix and (tensor.shape[0] % INT4_ROWS or tensor.shape[1] % INT4_GROUP):
                raise UnsupportedModel(
                    f"int4 weights have multiples of {INT4_ROWS} rows and {INT4_GROUP} columns, but"
                    f" {tensor.name} has {tensor.shape[0]} and {tensor.shape[1]}: use int8, or no --quantize"
                )


def kv_bytes_per_token(mixer: Mixer, dtype: DType | ScaledDType) -> int:
    """Size of the rows that one layer keeps of a token, in `dtype`, see `PageShape`."""
    if isinstance(mixer, Pageless):
        return 0
    shape = mixer.page_shape
    return shape.parts * shape.heads * dtype.row_bytes(shape.width)


def entry_bytes_per_block(mixer: Mixer, block_size: int, dtype: DType) -> int:
    """Size of the entries that one layer keeps of a block of tokens, which are in the run dtype."""
    if not isinstance(mixer, Compressed):
        return 0
    return mixer.entry_elements(block_size) * dtype.size_bytes


def state_bytes(parts: Iterable[StatePart], dtype: DType) -> int:
    """Size of what one layer keeps of a sequence beside pages, see `LayerPlan.state_parts`."""
    sizes = ((part, DType.F32 if part.is_wide else dtype) for part in parts)
    return sum(prod(part.shape) * part_dtype.size_bytes for part, part_dtype in sizes)


def cached_bytes_per_token(mixer: Mixer, dtype: DType, kv_dtype: ScaledDType | None) -> int:
    """Size of all that one layer keeps of a token: rows in `kv_dtype` (None: the run dtype `dtype`), and a
    key of its indexer, or what entries are pooled of, which are always in the run dtype. Of entries, see
    `entry_bytes_per_block`.
    """
    beside = mixer.pending_width if isinstance(mixer, Compressed) else mixer.index_width
    return kv_bytes_per_token(mixer, kv_dtype or dtype) + dtype.row_bytes(beside)
