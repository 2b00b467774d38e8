"""What the coordinator asks of this worker's checkpoint, decoded and checked for sense."""

from dataclasses import dataclass

from checkpoint import DType
from stageline_rpc.v1 import stage_pb2
from wire.errors import InvalidRequest
from wire.reference import Text
from wire.tensors import DTYPE_FROM_MESSAGE
from wire.wire_dtypes import WIRE_DTYPE_FROM_MESSAGE, WireDType, can_carry

MAX_TOKENS = 1024
"""Of all texts together."""
MAX_TOP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """`directory` is the coordinator's own path, "" for the built-in model. The most likely `num_top` tokens
    are told of each row. `wire_dtype` is what hidden states travel in.
    """

    directory: str
    fingerprint: str
    dtype: DType
    texts: tuple[Text, ...]
    num_top: int
    wire_dtype: WireDType

    def __post_init__(self) -> None:
        num_tokens = sum(map(len, self.texts))
        if not 1 <= num_tokens <= MAX_TOKENS or not all(self.texts):
            lengths = [len(text) for text in self.texts]
            raise InvalidRequest(f"a reference for texts of {lengths} tokens, of 1 to {MAX_TOKENS} possible")
        if not 1 <= self.num_top <= MAX_TOP:
            raise InvalidRequest(f"{self.num_top} most likely tokens, of 1 to {MAX_TOP} possible")


def decode_request(message: stage_pb2.ReferenceRequest, directory: str) -> ReferenceRequest:
    """For the checkpoint in `directory`. Raises InvalidRequest for what no reference can be computed of."""
    dtype = DTYPE_FROM_MESSAGE.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"dtype number {message.dtype} is not known")
    wire_dtype = WIRE_DTYPE_FROM_MESSAGE.get(message.wire_dtype or message.dtype)
    if wire_dtype is None or not can_carry(wire_dtype, dtype):
        raise InvalidRequest(f"wire dtype number {message.wire_dtype} is not one for {dtype.value}")
    return ReferenceRequest(
        directory=directory,
        fingerprint=message.fingerprint,
        dtype=dtype,
        texts=tuple(tuple(text.tokens) for text in message.texts),
        num_top=message.num_top,
        wire_dtype=wire_dtype,
    )
