"""What can be wrong with a checkpoint directory.

CheckpointError(ValueError)
|- CheckpointNotFound    the directory, or a file that must be there, is absent
|- NotRegularFile        a FIFO, a directory, a device or a socket in the place of a file
|- FileTooLarge          a JSON file is larger than any model's
|- FileChanged           a file is not the one that was read before
|- UnsupportedFormat     weights exist, but not as safetensors (nothing is ever unpickled)
|- UnsupportedModel      an architecture or a config field that the decoder does not compute
|- BadConfig             config.json or generation_config.json is broken or contradicts itself
|- BadHeader             a safetensors header or the shard index is broken
|- MissingTensor         a tensor that the config asks for is absent
|- UnexpectedTensor      a tensor that the config does not ask for is present
|- WrongShape            a tensor has another shape than the config asks for
|- UnknownDType          a dtype name that is not one of bf16, f16, f32
`- UnusableTokenizer     grammars cannot be matched with its tokenizer.json, or it has none
"""

GGUF_ADVICE = (
    "Stageline reads safetensors; convert it, with transformers for example: "
    "from_pretrained(DIR, gguf_file=FILE).save_pretrained(NEW_DIR)"
)
"""What to do with weights in llama.cpp's format."""


class CheckpointError(ValueError):
    """Base of everything this package raises about a checkpoint."""


class CheckpointNotFound(CheckpointError):
    """The directory, or a file that must be there, is absent."""


class NotRegularFile(CheckpointError):
    """A FIFO, a directory, a device or a socket in the place of a file; it is never opened."""


class FileTooLarge(CheckpointError):
    """A file is larger than its kind can be."""


class FileChanged(CheckpointError):
    """A file is not the one that was read before."""


class UnsupportedFormat(CheckpointError):
    """Weights exist, but not as safetensors."""


class UnsupportedModel(CheckpointError):
    """An architecture or a config field that is not supported, named together with its value."""


class BadConfig(CheckpointError):
    """A JSON file is broken, lacks a field, or holds numbers that cannot be."""


class BadHeader(CheckpointError):
    """A safetensors header or the shard index is broken, or disagrees with the file's size."""


class MissingTensor(CheckpointError):
    """Tensors that the config asks for are absent."""


class UnexpectedTensor(CheckpointError):
    """Tensors are present that the config does not ask for."""


class WrongShape(CheckpointError):
    """A tensor has another shape than the config asks for."""


class UnknownDType(CheckpointError):
    """A dtype name that is none of the supported ones."""


class UnusableTokenizer(CheckpointError):
    """Grammars cannot be matched with its tokenizer.json, or it has none."""
