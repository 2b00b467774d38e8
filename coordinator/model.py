"""The model that is served: its checkpoint, its run dtype and its tokenizer."""

from dataclasses import dataclass

from builtin_model import MODEL_DIRECTORY, MODEL_NAME
from checkpoint import Checkpoint, DType, ModelConfig
from coordinator.config import CoordinatorConfig
from coordinator.text.structured import GrammarCompiler
from coordinator.text.tokenizer import TextCodec


@dataclass(slots=True)
class ServedModel:
    """`text` is None for a checkpoint without a tokenizer: it serves token ids. `grammars` say by themselves
    why a checkpoint has no structured output.
    """

    checkpoint: Checkpoint
    dtype: DType
    is_builtin: bool
    text: TextCodec | None = None
    grammars: GrammarCompiler | None = None

    @property
    def name(self) -> str:
        return MODEL_NAME if self.is_builtin else self.checkpoint.directory.name

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint

    @property
    def directory_for_workers(self) -> str:
        """Empty for the built-in model, which every worker has; else this host's absolute path."""
        return "" if self.is_builtin else str(self.checkpoint.directory.resolve())


def open_model(config: CoordinatorConfig) -> ServedModel:
    """Reads config and headers, never weights. Raises CheckpointError, ValueError for a dtype that does not
    exist.
    """
    checkpoint = Checkpoint.open(config.model_directory or MODEL_DIRECTORY)
    dtype = DType.from_name(config.dtype) if config.dtype else checkpoint.config.dtype
    return ServedModel(
        checkpoint,
        dtype,
        is_builtin=config.model_directory is None,
        grammars=GrammarCompiler(
            checkpoint.directory,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
        ),
    )
