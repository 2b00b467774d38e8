"""Reference outputs of a model for self-checks, as messages and files."""

import base64
import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from checkpoint import DType
from checkpoint.files import replace_file
from stageline_rpc.internal.v1 import forward_pb2
from wire.step_codec import decode_logprobs, encode_logprobs
from wire.steps import TokenLogprobs
from wire.tensors import WireDType

NUM_TEXTS = 2
MAX_TEXT_TOKENS = 264
"""Enough to cross a block of 260 tokens; references of longer texts would take too much memory."""
NUM_TOP = 20
CHECK_VERSION = 4
"""Version of texts and references; stored references of other versions are ignored."""
NUM_PROJECTIONS = 8
STATE_WIDTH = NUM_PROJECTIONS + 1
"""Numbers per hidden state: its projections, then its norm."""

Text = tuple[int, ...]

_GOLDEN = 0.6180339887498949
_TEXT_OFFSET = 1000


@dataclass(frozen=True, slots=True)
class Roundings:
    """Changes by rounding to the run dtype, one per token.

    Attributes:
        typical: Of a computation that rounds every value.
        highest: At least the typical ones, also with other routes wherever rounding decides.
    """

    typical: "array[float]"
    highest: "array[float]"


@dataclass(frozen=True, slots=True)
class TextReference:
    """Log-probabilities of one text; ranks are unknown.

    `rows[i]` are log-probabilities after tokens[0] to tokens[i]: of the next token (in the last row, of the
    most likely token) and of the `NUM_TOP` most likely tokens. `roundings` are of the rows: root mean squares
    of changes.
    """

    tokens: Text
    rows: tuple[TokenLogprobs, ...]
    roundings: Roundings


@dataclass(frozen=True, slots=True)
class LayerReference:
    """Hidden states of all texts after a layer; `roundings` are fractions of their norms."""

    states: "array[float]"
    roundings: Roundings


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference outputs of one model in one dtype.

    `logit_spread` is the standard deviation of the logits over the vocabulary, as the root mean square over
    all rows.
    """

    texts: tuple[TextReference, ...]
    layers: tuple[LayerReference, ...]
    logit_spread: float

    def covers(self, texts: tuple[Text, ...]) -> bool:
        """Whether each of `texts` is a prefix of the reference text at the same index."""
        pairs = zip(texts, self.texts, strict=False)
        return len(texts) <= len(self.texts) and all(text == own.tokens[: len(text)] for text, own in pairs)

    def token_index(self, text: int, position: int) -> int:
        """Index of a token in the tokens of all texts."""
        return sum(len(earlier.tokens) for earlier in self.texts[:text]) + position


def check_text(number: int, length: int, vocab_size: int) -> Text:
    """Return the first `length` tokens of text `number`, spread over the vocabulary."""
    first = number * _TEXT_OFFSET
    return tuple(int((first + i + 0.5) * _GOLDEN % 1 * vocab_size) for i in range(length))


def encode_reference(reference: Reference) -> forward_pb2.ComputeReferenceResponse:
    message = forward_pb2.ComputeReferenceResponse(logit_spread=reference.logit_spread)
    for text in reference.texts:
        encoded = message.texts.add(tokens=text.tokens, **_encode_roundings(text.roundings))
        for row in text.rows:
            encode_logprobs(row, encoded.rows.add())
    for layer in reference.layers:
        message.layers.add(states=encode_states(layer.states), **_encode_roundings(layer.roundings))
    return message


def decode_reference(message: forward_pb2.ComputeReferenceResponse) -> Reference:
    """Decode a reference. Raises ValueError for inconsistent lengths."""
    texts = tuple(map(_decode_text, message.texts))
    num_tokens = sum(len(text.tokens) for text in texts)
    layers = tuple(
        LayerReference(decode_states(layer.states, num_tokens), _decode_roundings(layer, num_tokens))
        for layer in message.layers
    )
    return Reference(texts, layers, message.logit_spread)


def _decode_text(message: forward_pb2.TextReference) -> TextReference:
    num_tokens = len(message.tokens)
    if len(message.rows) != num_tokens:
        raise ValueError(f"reference has {len(message.rows)} rows for {num_tokens} tokens")
    roundings = _decode_roundings(message, num_tokens)
    return TextReference(tuple(message.tokens), tuple(map(decode_logprobs, message.rows)), roundings)


def _encode_roundings(roundings: Roundings) -> dict[str, bytes]:
    return {
        "typical_roundings": encode_states(roundings.typical),
        "highest_roundings": encode_states(roundings.highest),
    }


def _decode_roundings(
    message: forward_pb2.TextReference | forward_pb2.LayerReference, num_tokens: int
) -> Roundings:
    fields = message.typical_roundings, message.highest_roundings
    for data in fields:
        if len(data) != 4 * num_tokens:
            raise ValueError(
                f"reference has {len(data) // 4} roundings for {num_tokens} tokens: run the same version of "
                "stageline on all hosts"
            )
    return Roundings(*(array("f", data) for data in fields))


def encode_states(states: "array[float]") -> bytes:
    assert sys.byteorder == "little", "states are little-endian and are not swapped"
    return states.tobytes()


def decode_states(data: bytes, num_tokens: int) -> "array[float]":
    """Decode hidden states. Raises ValueError for a size that does not match `num_tokens`."""
    expected = num_tokens * STATE_WIDTH * 4
    if len(data) != expected:
        raise ValueError(f"hidden states of {num_tokens} tokens have {len(data)} bytes, expected {expected}")
    return array("f", data)


def reference_key(dtype: DType, wire_dtype: WireDType) -> str:
    """Key of a stored reference: "bf16", or "f32 over int8" with another wire dtype."""
    return dtype.value if wire_dtype is dtype else f"{dtype.value} over {wire_dtype.value}"


def encode_references(references: Mapping[str, Reference]) -> dict[str, object]:
    """As a JSON object, with the version of their texts."""
    entries = {key: _encoded(reference) for key, reference in references.items()}
    return {"version": CHECK_VERSION, "references": entries}


def decode_references(content: Mapping[str, Any]) -> dict[str, Reference]:
    """Inverse of `encode_references`; empty for another version. Raises ValueError."""
    try:
        if content["version"] != CHECK_VERSION:
            return {}
        return {key: _decoded(entry) for key, entry in content["references"].items()}
    except (KeyError, TypeError, AttributeError, DecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_references(path: Path, fingerprint: str) -> dict[str, Reference]:
    """Read references by `reference_key`; empty for another fingerprint or version.

    Raises OSError, and ValueError for a corrupt file.
    """
    content = json.loads(path.read_text())
    try:
        is_other = (content["version"], content["fingerprint"]) != (CHECK_VERSION, fingerprint)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {} if is_other else decode_references(content)


def write_references(path: Path, fingerprint: str, references: Mapping[str, Reference]) -> None:
    """Replace the file as `replace_file` does."""
    entries = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(_encoded(value))}" for key, value in references.items()
    )
    head = f'"version": {CHECK_VERSION},\n"fingerprint": {json.dumps(fingerprint)}'
    replace_file(path, f'{{{head},\n"references": {{\n{entries}\n}}}}\n')


def _encoded(reference: Reference) -> dict[str, str]:
    data = encode_reference(reference).SerializeToString(deterministic=True)
    return {"checksum": xxhash.xxh3_64_hexdigest(data), "data": base64.b64encode(data).decode()}


def _decoded(entry: Mapping[str, str]) -> Reference:
    data = base64.b64decode(entry["data"], validate=True)
    if xxhash.xxh3_64_hexdigest(data) != entry["checksum"]:
        raise ValueError("checksum of a reference does not match")
    return decode_reference(forward_pb2.ComputeReferenceResponse.FromString(data))
