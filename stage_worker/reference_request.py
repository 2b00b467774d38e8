"""What the coordinator asks of this worker's checkpoint, decoded and checked for sense."""

from dataclasses import dataclass

from checkpoint import DType
from stageline_rpc.v1 import stage_pb2
from wire.errors import InvalidRequest
from wire.tensors import DTYPE_FROM_MESSAGE

MAX_TOKENS = 64
MAX_TOP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """`directory` is the coordinator's own path, "" for the built-in model. The most likely `num_top` tokens
    are told of each row.
    """

    directory: str
    fingerprint: str
    dtype: DType
    tokens: tuple[int, ...]
    num_top: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.tokens) <= MAX_TOKENS:
            raise InvalidRequest(f"a reference for {len(self.tokens)} tokens, of 1 to {MAX_TOKENS} possible")
        if self.num_top > MAX_TOP:
            raise InvalidRequest(f"{self.num_top} most likely tokens, of at most {MAX_TOP}")


def decode_request(message: stage_pb2.ReferenceRequest, directory: str) -> ReferenceRequest:
    """For the checkpoint in `directory`. Raises InvalidRequest for what no reference can be computed of."""
    dtype = DTYPE_FROM_MESSAGE.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"dtype number {message.dtype} is not known")
    return ReferenceRequest(
        directory=directory,
        fingerprint=message.fingerprint,
        dtype=dtype,
        tokens=tuple(message.tokens),
        num_top=message.num_top,
    )
