"""Reference outputs of a model for self-checks, in messages and files."""

import base64
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from google.protobuf.message import DecodeError

from checkpoint import DType
from stageline_rpc.v1 import stage_pb2
from wire.sampling_codec import decode_logprobs, encode_logprobs
from wire.steps import TokenLogprobs
from wire.tensors import WireDType

NUM_TEXTS = 2
NUM_TOP = 20
CHECK_VERSION = 2
"""Of texts and references: a kept reference of another version is of no use."""
NUM_PROJECTIONS = 8
STATE_WIDTH = NUM_PROJECTIONS + 1
"""Numbers that stand for a hidden state: its projections, then its norm."""

Text = tuple[int, ...]

_GOLDEN = 0.6180339887498949
_TEXT_OFFSET = 1000


@dataclass(frozen=True, slots=True)
class TextReference:
    """`rows[i]` are log-probabilities after tokens[0] to tokens[i]: of the token that follows, or for the
    last row of the most likely one, and of the most likely ones. Ranks are not known.
    """

    tokens: Text
    rows: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class LayerReference:
    """Hidden states after a layer: STATE_WIDTH float32 for each token of each text, in order.

    `rounding` is what rounding on the way changes them by, as a fraction of their norms.
    """

    states: "array[float]"
    rounding: float


@dataclass(frozen=True, slots=True)
class Reference:
    """`logit_spread` is the standard deviation of the logits over the vocabulary; `rounding` is what rounding
    to the run dtype on the way changes log-probabilities by. Both are root mean squares over the rows.
    """

    texts: tuple[TextReference, ...]
    layers: tuple[LayerReference, ...]
    logit_spread: float
    rounding: float

    def covers(self, texts: tuple[Text, ...]) -> bool:
        """Each of `texts` is the beginning of the one here in its place."""
        pairs = zip(texts, self.texts, strict=False)
        return len(texts) <= len(self.texts) and all(text == here.tokens[: len(text)] for text, here in pairs)

    def state_index(self, text: int, position: int) -> int:
        """Where the hidden state of a token begins in `LayerReference.states`."""
        before = sum(len(each.tokens) for each in self.texts[:text])
        return (before + position) * STATE_WIDTH


def check_text(number: int, length: int, vocab_size: int) -> Text:
    """The first `length` tokens of text `number`, spread over the vocabulary."""
    first = number * _TEXT_OFFSET
    return tuple(int((first + i + 0.5) * _GOLDEN % 1 * vocab_size) for i in range(length))


def encode_reference(reference: Reference) -> stage_pb2.ReferenceResponse:
    message = stage_pb2.ReferenceResponse(logit_spread=reference.logit_spread, rounding=reference.rounding)
    for text in reference.texts:
        encoded = message.texts.add(tokens=text.tokens)
        for row in text.rows:
            encode_logprobs(row, encoded.rows.add())
    for layer in reference.layers:
        message.layers.add(states=encode_states(layer.states), rounding=layer.rounding)
    return message


def decode_reference(message: stage_pb2.ReferenceResponse) -> Reference:
    """Raises ValueError when it contradicts itself."""
    texts = tuple(
        TextReference(tuple(text.tokens), tuple(map(decode_logprobs, text.rows))) for text in message.texts
    )
    for text in texts:
        if len(text.rows) != len(text.tokens):
            raise ValueError(f"a reference of {len(text.rows)} rows for {len(text.tokens)} tokens")
    num_tokens = sum(len(text.tokens) for text in texts)
    layers = tuple(
        LayerReference(decode_states(layer.states, num_tokens), layer.rounding) for layer in message.layers
    )
    return Reference(texts, layers, message.logit_spread, message.rounding)


def encode_states(states: "array[float]") -> bytes:
    assert sys.byteorder == "little", "states are little-endian and are not swapped"
    return states.tobytes()


def decode_states(data: bytes, num_tokens: int) -> "array[float]":
    """Raises ValueError unless they are those of so many tokens."""
    expected = num_tokens * STATE_WIDTH * 4
    if len(data) != expected:
        raise ValueError(f"hidden states in {len(data)} bytes, {expected} expected for {num_tokens} tokens")
    return array("f", data)


def reference_key(dtype: DType, wire_dtype: WireDType) -> str:
    """What a reference is kept under: "bf16", or "f32 over int8"."""
    return dtype.value if wire_dtype is dtype else f"{dtype.value} over {wire_dtype.value}"


def read_references(path: Path, fingerprint: str) -> dict[str, Reference]:
    """By `reference_key`; empty for another fingerprint or version. Raises OSError, ValueError for a file
    that is corrupt.
    """
    try:
        content = json.loads(path.read_text())
        if (content["version"], content["fingerprint"]) != (CHECK_VERSION, fingerprint):
            return {}
        return {key: _decoded(entry) for key, entry in content["references"].items()}
    except (KeyError, TypeError, AttributeError, DecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_references(path: Path, fingerprint: str, references: Mapping[str, Reference]) -> None:
    """Replaces the file at once, readable by its owner only. Raises OSError; then the old one is there."""
    entries = ",\n".join(f"{json.dumps(key)}: {_encoded(each)}" for key, each in references.items())
    head = f'"version": {CHECK_VERSION},\n"fingerprint": {json.dumps(fingerprint)}'
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f'{{{head},\n"references": {{\n{entries}\n}}}}\n')
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _encoded(reference: Reference) -> str:
    data = encode_reference(reference).SerializeToString(deterministic=True)
    return json.dumps({"checksum": xxhash.xxh3_64_hexdigest(data), "data": base64.b64encode(data).decode()})


def _decoded(entry: Mapping[str, str]) -> Reference:
    data = base64.b64decode(entry["data"], validate=True)
    if xxhash.xxh3_64_hexdigest(data) != entry["checksum"]:
        raise ValueError("a checksum does not match")
    return decode_reference(stage_pb2.ReferenceResponse.FromString(data))
