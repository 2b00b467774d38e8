"""Rates of the hardware, measured by the first phase, which bound the figures of the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bench.gpu.bounds import StageWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of device memory, operations per second of products, bytes per second of copies of
    16 MiB from and to pinned memory (0: not measured).
    """

    memory: float
    products: float
    up: float = 0.0
    down: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Rates | None:
        """None if the phase `hardware` measured none."""
        return cls(**values) if values else None

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    def decode_ms(self, work: StageWork, contexts: list[int]) -> float:
        """Least time of a decode step, bound by bytes or, in large batches, by products."""
        flops = 2 * work.layer_weights * work.num_layers * len(contexts)
        return 1e3 * max(work.decode_bytes(contexts) / self.memory, flops / self.products)

    def prompt_ms(self, work: StageWork, num_tokens: int, start: int) -> float:
        """Least time of a step with a chunk of a prompt."""
        flops, num_bytes = work.prompt_flops(num_tokens, start), work.prompt_bytes(num_tokens, start)
        return 1e3 * max(flops / self.products, num_bytes / self.memory)
