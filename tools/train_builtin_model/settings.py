"""Model shape and training settings."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Llama's dimensions; the defaults give 2.4 million parameters in twelve layers, with heads of 32
    elements, the smallest that the compiled kernels are for.
    """

    vocab_size: int = 1536
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"width {self.hidden_size} does not divide into {self.num_heads} heads,"
                f" or those not into {self.num_kv_heads} KV heads"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """Duration and learning rate. Lengths are in tokens, `long_share` is the last part of the steps."""

    num_steps: int = 3000
    seed: int = 0
    batch_tokens: int = 1024
    row_tokens: int = 256
    long_row_tokens: int = 512
    long_share: float = 0.2
    warmup_steps: int = 150
    peak_learning_rate: float = 2.5e-3
    weight_decay: float = 0.05
    tokenizer_documents: int = 8000
    num_threads: int = 1  # a second one gains 30 % on an idle machine and loses far more on a busy one

    def __post_init__(self) -> None:
        if (
            self.num_steps < 1
            or self.batch_tokens % self.row_tokens
            or self.batch_tokens % self.long_row_tokens
        ):
            raise ValueError(
                f"{self.num_steps} steps of {self.batch_tokens} tokens in rows of {self.row_tokens},"
                f" then {self.long_row_tokens}: at least one step, and whole rows, are needed"
            )

    def row_length(self, step: int) -> int:
        """Tokens per row in `step`, counted from 0."""
        return self.long_row_tokens if step >= self.num_steps * (1 - self.long_share) else self.row_tokens
