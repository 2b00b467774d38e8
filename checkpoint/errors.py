"""Errors of a checkpoint directory, all of them ValueErrors."""

TRANSFORMERS_ADVICE = (
    "families without native layers need transformers on every worker: pip install 'transformers>=5.23,<5.24'"
)
"""Advice where transformers is missing, or another release than is known."""


class CheckpointError(ValueError):
    """Base of this package's errors about a checkpoint."""


class CheckpointNotFound(CheckpointError):
    """The directory or a required file is missing or unreadable."""


class NotRegularFile(CheckpointError):
    """A FIFO, directory, device, socket or link to another's file in place of a file; it is never opened."""


class FileTooLarge(CheckpointError):
    """A file exceeds the size limit of its kind."""


class FileChanged(CheckpointError):
    """A file differs from the one read before."""


class UnsupportedFormat(CheckpointError):
    """Weights exist, but neither as safetensors nor as GGUF; other formats are never loaded."""


class UnsupportedModel(CheckpointError):
    """An unsupported architecture or config field; the text gives its value."""


class BadConfig(CheckpointError):
    """config.json or generation_config.json is invalid, incomplete or contradicts itself."""


class BadHeader(CheckpointError):
    """A safetensors or GGUF header or the shard index is invalid or contradicts the file's size."""


class MissingTensor(CheckpointError):
    """Tensors that the config requires are missing."""


class UnexpectedTensor(CheckpointError):
    """The checkpoint has tensors that the config does not use."""


class WrongShape(CheckpointError):
    """A tensor's shape differs from the config."""


class UnknownDType(CheckpointError):
    """A dtype other than bf16, f16 and f32."""


class UnusableTokenizer(CheckpointError):
    """tokenizer.json is missing or cannot be used for grammars."""
