"""The model that is served: its checkpoint or mock, its run dtype and its tokenizer."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from builtin_model import MODEL_DIRECTORY, MODEL_NAME
from checkpoint import Blueprint, Checkpoint, DType, ScaledDType, UnsupportedModel, WeightFormat
from checkpoint.directory import files_directory
from checkpoint.files import FileIdentity, has_params, stat_files
from checkpoint.gguf.files import is_gguf
from checkpoint.implementation import Implementation
from checkpoint.pins import Pins
from coordinator import mock_model
from coordinator.config import CoordinatorConfig
from text.generation_defaults import read_generation_defaults
from text.grammars import GrammarCompiler
from text.tokenizer import TextCodec, load_text_codec
from weights.location import RemoteModel
from wire.reference import Reference
from wire.sizes import format_size
from wire.tensors import WireDType, check_can_carry, parse_wire_dtype

if TYPE_CHECKING:
    from weights.remote import RemoteCheckpoint

log = logging.getLogger(__name__)

_WITHOUT_TOKENIZER = "token ids only, no text and no chat: copy the model's tokenizer.json beside its weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFiles:
    """Weights that are quantised in files: the format's name, and the size of all weights there."""

    label: str
    size_bytes: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "QuantizedFiles | None":
        """None for a plain checkpoint."""
        if (quantization := checkpoint.config.quantization) is None:
            return None
        return cls(label=quantization.label, size_bytes=checkpoint.weight_file_bytes)


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """The served model and everything derived from its checkpoint.

    Attributes:
        wire_dtype: Dtype of hidden states between stages; None for the run dtype.
        kv_dtype: Dtype of keys and values in the cache; None for the run dtype.
        implementation: Code that computes the layers.
        directory: The checkpoint, or its GGUF file; None for a mock. Of a remote one, config, headers and
            tokenizer.
        files: Identities of the files with weights when they were opened; empty for a mock and a remote one.
        pins: The version of a remote checkpoint; None for a directory.
        shared: The version of a directory that workers without it fetch; None if it is not served to them.
        manifest: SHA-256 of each tensor of a remote checkpoint; empty without a manifest.
        references: Of the self-check, by `reference_key`, from the manifest.
        quantized: Set if the weights are quantised in files.
        eos_token_ids: End a sequence: those of generation_config.json, config.json and the tokenizer.
        text: Tokenizer; None for a model that serves token ids only. See `load_text`.
        grammars: Compiler of structured output; reports why a checkpoint has none.
    """

    name: str
    config: Blueprint
    fingerprint: str
    dtype: DType
    wire_dtype: WireDType | None = None
    kv_dtype: ScaledDType | None = None
    implementation: Implementation = Implementation.NATIVE
    eos_token_ids: tuple[int, ...] = ()
    directory: Path | None = None
    is_builtin: bool = False
    files: tuple[FileIdentity, ...] = ()
    pins: Pins | None = None
    shared: Pins | None = None
    manifest: Mapping[str, bytes] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)
    quantized: QuantizedFiles | None = None
    text: TextCodec | None = None
    grammars: GrammarCompiler | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype is not None:
            check_can_carry(self.wire_dtype, self.dtype)

    def load_text(self) -> None:
        """Load tokenizer and grammar tables; log what cannot be served without. Raises TokenizerError."""
        if self.directory is None:
            return
        self.text = load_text_codec(self.directory, model_vocab_size=self.config.vocab_size)
        if self.text is not None:
            self.eos_token_ids = self.text.end_token_ids(self.eos_token_ids)
        self.grammars = GrammarCompiler(
            self.directory, vocab_size=self.config.vocab_size, eos_token_ids=self.eos_token_ids
        )
        problem = self.grammars.load()
        if self.text is None:
            log.warning("the checkpoint has no tokenizer.json: %s", _WITHOUT_TOKENIZER)
        elif problem is not None:
            log.info("no structured output: %s", problem)

    @property
    def is_mock(self) -> bool:
        """It has no weights: only mock stages can serve it."""
        return self.directory is None

    @property
    def has_weights_here(self) -> bool:
        """Its weights are on this host, so that workers can fetch them: neither a mock nor remote."""
        return not self.is_mock and self.pins is None

    def changed_files(self) -> list[Path]:
        """Files with weights that were written or replaced since the model was opened."""
        if self.directory is None:
            return []
        directory = files_directory(self.directory)
        current = stat_files(directory, [file.name for file in self.files])
        return [
            directory / opened.name for opened, now in zip(self.files, current, strict=True) if opened != now
        ]

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format of the matrices of layers in memory; None for the run dtype."""
        return self.config.weight_format

    @property
    def has_long_rope(self) -> bool:
        """See `Blueprint.has_long_rope`."""
        return self.config.has_long_rope

    @property
    def directory_for_workers(self) -> str:
        """Absolute path on this host; empty for a model that no worker reads from a path.

        That is a mock, the built-in model, which all workers have, and a remote one, which they fetch.
        """
        if self.is_builtin or self.pins is not None or self.directory is None:
            return ""
        # the target of a link may have another suffix, as in Hugging Face's cache
        path = self.directory
        return str(path.absolute() if is_gguf(path) else path.resolve())


def model_of(
    checkpoint: Checkpoint,
    *,
    dtype: DType | None = None,
    wire_dtype: WireDType | None = None,
    is_builtin: bool = False,
) -> ServedModel:
    """Make a model without its tokenizer; `dtype` defaults to the checkpoint's."""
    return ServedModel(
        name=MODEL_NAME if is_builtin else checkpoint.name,
        config=checkpoint.config,
        fingerprint=checkpoint.fingerprint,
        dtype=dtype or checkpoint.config.dtype,
        wire_dtype=wire_dtype,
        eos_token_ids=tuple(checkpoint.eos_token_ids),
        directory=checkpoint.path,
        is_builtin=is_builtin,
        files=checkpoint.file_identities() if checkpoint.pins is None else (),
        pins=checkpoint.pins,
        quantized=QuantizedFiles.of(checkpoint),
    )


def open_model(config: CoordinatorConfig) -> ServedModel:
    """Open the configured model: config and headers, no weights.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ValueError: The dtype does not exist, or the wire dtype is not smaller than the run dtype.
    """
    dtype = DType.from_name(config.dtype) if config.dtype else None
    wire_dtype = parse_wire_dtype(config.wire_dtype) if config.wire_dtype else None
    if config.mock_model is not None:
        return _mock(mock_model.parse_mock_model(config.mock_model), dtype, wire_dtype)
    weights = WeightFormat.from_name(config.quantize) if config.quantize else None
    remote = _open_remote(config)
    checkpoint = Checkpoint.open(_directory(config)) if remote is None else remote.checkpoint
    read_generation_defaults(checkpoint.path)  # gateways use them: raise for wrong ones now
    checkpoint = checkpoint.with_weights(weights)
    checkpoint = checkpoint.for_length(config.max_sequence_tokens)
    if checkpoint.config.has_long_rope:
        log.info("rotary embeddings by long_factor: sequences may be longer than the original length")
    _log_unread(checkpoint)
    model = model_of(checkpoint, dtype=dtype, wire_dtype=wire_dtype, is_builtin=config.model is None)
    if remote is not None:
        assert isinstance(config.model, RemoteModel)
        model.name = config.model.name
        if remote.manifest is not None:
            model.manifest, model.references = remote.manifest.sha256s, remote.manifest.references
    model.implementation = _implementation(config, checkpoint)
    model.kv_dtype = ScaledDType.from_name(config.kv_dtype) if config.kv_dtype else None
    return model


def _implementation(config: CoordinatorConfig, checkpoint: Checkpoint) -> Implementation:
    """Raises UnsupportedModel where the configured one cannot compute the model."""
    chosen = Implementation.choose(config.implementation, checkpoint.config)
    if chosen is Implementation.TRANSFORMERS:
        if checkpoint.config.weight_format is not None:
            raise UnsupportedModel(
                "--quantize is for native layers, transformers computes these: leave it out"
            )
        if is_gguf(checkpoint.path):
            raise UnsupportedModel("GGUF files are for native layers: use --implementation auto")
        if has_params(checkpoint.path):
            raise UnsupportedModel("Mistral's own format is for native layers: use --implementation auto")
        try:
            examine_layers(checkpoint)
        except ImportError as error:
            log.warning("the model is not examined here, workers do so when they load it: %s", error)
        log.warning("%s", transformers_note(checkpoint.config))
    return chosen


def examine_layers(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel unless transformers' layers serve the checkpoint; runs them without weights.

    Raises ImportError where torch or transformers are not installed, which only workers need.
    """
    # By their names: other models need neither here.
    torch = importlib.import_module("torch")
    importlib.import_module("transformers_stage.probe").examine(checkpoint, torch.float32)


def transformers_note(config: Blueprint) -> str:
    """That transformers computes the layers of `config`, and the consequence."""
    reason = "as chosen" if config.has_row else f"as {config.model_type!r} has no native ones"
    return f"transformers' layers serve this model, {reason}: they are slower and less tested"


def _directory(config: CoordinatorConfig) -> Path:
    return config.model if isinstance(config.model, Path) else MODEL_DIRECTORY


def _open_remote(config: CoordinatorConfig) -> "RemoteCheckpoint | None":
    """None for a model in a directory."""
    if not isinstance(config.model, RemoteModel):
        if config.weights_manifest is not None:
            raise ValueError(
                "--weights-manifest is for a remote model: it needs --model with an address; "
                "`stageline weights verify DIR` compares a directory with its manifest"
            )
        return None
    if config.cache_directory is None:
        raise ValueError(f"{config.model} needs a cache directory for its config and headers")
    from weights.remote import open_remote  # other models need no client of sources

    return open_remote(config.model, config.cache_directory, manifest=config.weights_manifest)


def _log_unread(checkpoint: Checkpoint) -> None:
    for unread, what in (
        (checkpoint.ignored, "serving text only: ignored %d tensors of other modalities, %s"),
        (checkpoint.drafts, "serving without speculation: ignored %d tensors of draft layers, %s"),
    ):
        if unread.num_tensors:
            log.info(what, unread.num_tensors, format_size(unread.num_bytes))


def _mock(shape: Blueprint, dtype: DType | None, wire_dtype: WireDType | None) -> ServedModel:
    return ServedModel(
        name=mock_model.NAME,
        config=shape,
        fingerprint=mock_model.mock_fingerprint(shape),
        dtype=dtype or shape.dtype,
        wire_dtype=wire_dtype,
    )
