"""The assignment of layer ranges to workers, and what it takes to make one. Data only; sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkpoint import DType
from kvcache import KvWindow
from wire.ids import StageRole


class PlanImpossible(ValueError):
    """No plan meets what was asked; the message has the numbers that make it impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """What a worker offers: bytes for weights, KV pages and activations together.

    The process itself (interpreter, torch, gRPC: some 300 MB on the host, a CUDA context on the device) is
    not part of it: a worker that is told `--memory 8GiB` takes 8 GiB beyond what it needs to exist.
    Without `supports_bf16`, its device emulates bfloat16 and computes it slower than float32.
    """

    name: str
    memory_bytes: int
    supports_bf16: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a worker without a name")
        if self.memory_bytes < 0:
            raise ValueError(f"worker {self.name} has {self.memory_bytes} bytes of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Upper bounds of one step, and of one sequence (prompt and completion, in tokens)."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_sequence_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    def capped(self, max_sequence_tokens: int) -> StepLimits:
        """The same limits with sequences of at most `max_sequence_tokens` tokens."""
        return replace(self, max_sequence_tokens=min(self.max_sequence_tokens, max_sequence_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: layers [layer_begin, layer_end) on one worker.

    `memory_bytes` is what the worker offers; `cost` is the bytes of weights that a decode step reads here,
    which stands for the stage's time (see `coordinator.planner`).
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

    @property
    def num_layers(self) -> int:
        """How many layers run here, at least one."""
        return self.layer_end - self.layer_begin

    @property
    def layers_text(self) -> str:
        """As people read it: "layers 4-7"."""
        return span_text(self.layer_begin, self.layer_end)

    @property
    def total_bytes(self) -> int:
        """Weights, KV pages and activations together."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def free_bytes(self) -> int:
        """What the worker offers and the stage does not take."""
        return self.memory_bytes - self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All stages in order. Each has exactly `num_blocks` KV blocks, also where memory would allow more.

    `window` is what the layers see, where all of them have a sliding window.
    """

    stages: tuple[StagePlan, ...]
    num_blocks: int
    block_size: int
    dtype: DType
    limits: StepLimits
    window: KvWindow | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.stages[-1].layer_end

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values fit, over all sequences."""
        return self.num_blocks * self.block_size

    @property
    def holds_any_length(self) -> bool:
        """Sequences give back the blocks that their window hides, and what they hold at most fits."""
        return self.window is not None and self.window.min_blocks(self.block_size) <= self.num_blocks

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that is accepted: bound by model, by `--max-model-len` and by the cache."""
        if self.holds_any_length:
            return self.limits.max_sequence_tokens
        return min(self.limits.max_sequence_tokens, self.num_kv_tokens)


def span_text(layer_begin: int, layer_end: int) -> str:
    """`span_text(4, 8)` is "layers 4-7"."""
    last = layer_end - 1
    return f"layer {last}" if layer_begin == last else f"layers {layer_begin}-{last}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_size(size_bytes: int) -> str:
    """A size as people read it: `format_size(9_770_000_000)` is "9.1 GiB"."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if abs(size) < 1023.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
