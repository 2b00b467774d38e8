"""Plans: the assignment of layer ranges to workers, and their inputs. Data only; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from checkpoint import DType, ScaledDType
from kvcache import KvGroup, KvWindow
from wire.device_rates import DeviceRates
from wire.ids import StageRole

LayerRange = tuple[int, int]
"""Layers [begin, end)."""


class PlanImpossible(ValueError):
    """No plan exists for the workers and options; the message has the numbers."""


class DeviceKind(Enum):
    """Where a stage computes, which decides on its memory.

    HOST has no other memory. GPU and GPU_IN_PLACE have buffers for copies from and to the host, and
    workspaces. GPU computes with torch's operators; the kernels of GPU_IN_PLACE attend to pages in place.
    """

    HOST = auto()
    GPU = auto()
    GPU_IN_PLACE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """Memory budget of a worker for weights, KV pages, activations, buffers and workspaces.

    The budget does not include the process itself: interpreter, torch and gRPC take some 300 MB on the host,
    and a CUDA context 300 to 600 MB on the device, before the worker reads its free memory. A device without
    `supports_bf16` emulates bfloat16, slower than float32; with `supports_f16` float16 is as fast there as
    bfloat16 elsewhere. Workers with the same `memory_domain`, which is not empty, share memory on a hop.
    A GPU reads tables of n-grams in memory of its host, which has `host_memory_bytes` for them (None: no
    limit).
    """

    name: str
    memory_bytes: int
    supports_bf16: bool = True
    supports_f16: bool = False
    device: DeviceKind = DeviceKind.HOST
    rates: DeviceRates | None = None
    memory_domain: str = ""
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("worker name is empty")
        if self.memory_bytes < 0:
            raise ValueError(
                f"memory of worker {self.name} is {self.memory_bytes} bytes, must not be negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Maximum tokens and sequences of a step, and maximum tokens of a sequence (prompt and completion)."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_sequence_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    def capped(self, max_sequence_tokens: int) -> StepLimits:
        """Lower the limit of a sequence to `max_sequence_tokens`."""
        return replace(self, max_sequence_tokens=min(self.max_sequence_tokens, max_sequence_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: layers [layer_begin, layer_end) on one worker.

    `memory_bytes` is the worker's budget. On a GPU, `buffer_bytes` are for copies from and to the host, which
    has `pinned_bytes` outside the budget for them, and `overhead_bytes` are workspaces and graphs.
    `segment_bytes` are memory that the stage shares with a next one on its host: of the host, and on a GPU
    as much of the GPU. `table_bytes` are tables that a GPU reads on its host, outside the budget. `cost` is
    the bytes of weights that a decode step reads on this stage, proportional to its time (see
    `coordinator.planner.stage_memory`). If layers are shared by speed, `rates` are the
    worker's among similar ones, and `step_s` is the time of a decode step by them.
    """

    stage: int
    worker: str
    role: StageRole
    layer_begin: int
    layer_end: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    memory_bytes: int
    cost: int
    buffer_bytes: int = 0
    overhead_bytes: int = 0
    segment_bytes: int = 0
    table_bytes: int = 0
    device: DeviceKind = DeviceKind.HOST
    rates: DeviceRates | None = None
    step_s: float | None = None

    @property
    def pinned_bytes(self) -> int:
        """Memory of the host that a GPU accesses: twins of its buffers, what it shares, and tables."""
        shared = 0 if self.device is DeviceKind.HOST else self.segment_bytes
        return self.buffer_bytes + shared + self.table_bytes

    @property
    def num_layers(self) -> int:
        """Number of layers, at least one."""
        return self.layer_end - self.layer_begin

    @property
    def layers_text(self) -> str:
        """For messages: "layers 4-7"."""
        return format_layers(self.layer_begin, self.layer_end)

    @property
    def total_bytes(self) -> int:
        """Weights, KV pages, activations, buffers and workspaces, and memory that is shared."""
        used = self.weight_bytes + self.kv_bytes + self.activation_bytes + self.segment_bytes
        return used + self.buffer_bytes + self.overhead_bytes

    @property
    def free_bytes(self) -> int:
        """Unused part of the worker's budget."""
        return self.memory_bytes - self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All stages in order, with `num_blocks` KV blocks each in the first block group.

    `window` belongs to the first group: the widest sliding window of the layers; None if a layer has none.
    `other_groups` have the layers with other windows. `kv_dtype` is the dtype of keys and values (None:
    `dtype`). `holds_stored`: matrices stay as a checkpoint stores them, see `Blueprint.with_stored`.
    Every stage has `num_states` slots for recurrent states, 0 for models without recurrent layers.
    """

    stages: tuple[StagePlan, ...]
    num_blocks: int
    block_size: int
    dtype: DType
    limits: StepLimits
    window: KvWindow | None = None
    other_groups: tuple[KvGroup, ...] = ()
    kv_dtype: ScaledDType | None = None
    holds_stored: bool = False
    num_states: int = 0

    @property
    def other_num_blocks(self) -> tuple[int, ...]:
        """KV blocks of the block groups after the first."""
        return tuple(group.num_blocks for group in self.other_groups)

    @property
    def window_blocks(self) -> tuple[tuple[int, int], ...]:
        """Window and KV blocks of the block groups after the first."""
        return tuple(
            (group.window.num_tokens, group.num_blocks) for group in self.other_groups if group.window
        )

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].layer_end

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens, over all sequences; windowed groups may hold fewer."""
        return self.num_blocks * self.block_size

    @property
    def holds_any_length(self) -> bool:
        """Whether the cache holds sequences of any length, because a window bounds their blocks."""
        return self.window is not None and self.window.min_blocks(self.block_size) <= self.num_blocks

    @property
    def num_in_flight(self) -> int:
        """Sequences in all steps: one step per stage and one that waits."""
        return (len(self.stages) + 1) * self.limits.max_step_sequences

    @property
    def states_problem(self) -> str:
        """What too few recurrent states limit, for a warning; empty if nothing or without such layers."""
        if not self.num_states or self.num_states >= self.num_in_flight:
            return ""
        return (
            f"memory for {self.num_states} recurrent states, {self.num_in_flight} sequences are in flight at"
            f" most: others wait; the KV cache holds {self.num_kv_tokens} tokens."
            " Lower --max-step-sequences or --max-model-len, or give the workers more memory"
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of a sequence, limited by the model, `--max-model-len` and the KV cache."""
        if self.holds_any_length:
            return self.limits.max_sequence_tokens
        return min(self.limits.max_sequence_tokens, self.num_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers with the same computation and sizes. Sizes are in bytes, of one layer.

    `name` is such as "attention window 1024 + dense". `weight_bytes` is the resident size. A decode step
    reads `step_bytes` of the weights, `step_cost` times the bytes of the cheapest kind. Keys and values are
    in block group number `group`, which has `num_blocks`.
    """

    name: str
    layers: tuple[LayerRange, ...]
    weight_bytes: int
    step_bytes: int
    step_cost: float
    kv_bytes_per_token: int
    group: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """All kinds of layers of a planned model, in order of their first layers.

    `step_cost` is computed for decode steps of `step_sequences`. A stage can begin with layer 0 or with one
    of `legal_cuts`.
    """

    kinds: tuple[LayerKind, ...]
    step_sequences: float
    legal_cuts: frozenset[int]


def layer_ranges(layers: Iterable[int]) -> tuple[LayerRange, ...]:
    """Return ascending layers as ranges [begin, end)."""
    ranges: list[LayerRange] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return tuple(ranges)


def format_ranges(ranges: Iterable[LayerRange]) -> str:
    """Format layer ranges for tables: "0-4, 6"."""
    return ", ".join(f"{begin}" if begin == end - 1 else f"{begin}-{end - 1}" for begin, end in ranges)


def format_layers(layer_begin: int, layer_end: int) -> str:
    """Format a layer range for messages: `format_layers(4, 8)` is "layers 4-7"."""
    last = layer_end - 1
    return f"layer {last}" if layer_begin == last else f"layers {layer_begin}-{last}"
