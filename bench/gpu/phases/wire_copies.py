"""Hidden states from the wire to the device and back, in each dtype of the wire: copies and messages; and
hops between two stages on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.hops import OF_GPUS, WAYS, hop_s
from bench.gpu.model import config_of, dtype_of, geometry_of
from bench.gpu.phase import NEEDS_CUDA, Recorder
from bench.gpu.rates import Rates
from bench.gpu.timing import synchronize
from bench.harness.figure import Better
from checkpoint import BoundaryTensor, DType, ScaledDType, parse_config
from checkpoint.boundary import HIDDEN_STATES
from stage_worker.backends.tensor_views import RowScaling, from_frame, payload, to_frame
from stage_worker.backends.torch_device import prepare_thread
from stage_worker.backends.transfers import CudaQueue, HostTransfers, StagingRing, StepTransfers
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import TORCH_DTYPES
from wire.frames import Frame, FrameAssembler, encode_hidden_states, encode_step_frame, step_frame_checksum
from wire.ids import RequestId, SequenceKey
from wire.staging import StagingSizes
from wire.step_codec import encode_step
from wire.steps import Prefill, Step, StepSlice
from wire.tensors import HiddenStates, WireDType

WIRE_DTYPES: dict[str, WireDType] = {
    "bf16": DType.BF16,
    "f16": DType.F16,
    "f32": DType.F32,
    "int8": ScaledDType.I8,
    "fp8": ScaledDType.F8_E4M3,
}

KEY = SequenceKey(RequestId(bytes(16)), 0)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Hidden states [num_tokens, width], their boundary, and transfers and scaling of a stage."""

    hidden: Tensor
    boundary: tuple[BoundaryTensor, ...]
    transfers: StepTransfers
    scaling: RowScaling

    def there_and_back(self, arrived: HiddenStates, dtype: WireDType) -> HiddenStates:
        """What a stage does with the payload of a step around its layers."""
        transfer = self.transfers.begin()
        inputs = [payload(view) for view in arrived]
        place = transfer.upload(inputs)
        placed = [place(array) for array in inputs]
        entered = from_frame(arrived, placed, self.boundary, self.hidden.dtype, self.scaling)
        left = to_frame(entered, self.boundary, dtype, transfer.hand_on, self.scaling)
        transfer.download()
        transfer.wait()
        return left


async def measure(recorder: Recorder) -> None:
    """Each dtype, at the size of a prompt step and of a decode step."""
    order = recorder.order
    device, is_quick = torch.device(order.device), order.is_quick
    geometry, run_dtype = geometry_of(is_quick=is_quick), dtype_of(order.device)
    width, config = geometry.hidden, parse_config(config_of(geometry, run_dtype))
    prepare_thread(device)
    for num_tokens in (32, 2048) if not is_quick else (4, 64):
        hidden = torch.randn((num_tokens, width), generator=torch.Generator().manual_seed(0))
        copies = _Copies(
            hidden.to(run_dtype),
            (BoundaryTensor(name=HIDDEN_STATES, width=width),),
            _transfers(device, num_tokens * width * 4),
            RowScaling.of(Kernels.of(config, device, run_dtype)),
        )
        for name, dtype in WIRE_DTYPES.items():
            _record(recorder, copies, f"{num_tokens} x {width}", name, dtype)
        await _record_hops(recorder, hidden.to(device=device, dtype=run_dtype))


async def _record_hops(recorder: Recorder, hidden: Tensor) -> None:
    """Each way of `hidden` [num_tokens, width] between two stages on one host, in its own dtype."""
    dtype = next(dtype for dtype, of_torch in TORCH_DTYPES.items() if of_torch is hidden.dtype)
    for way in WAYS:
        name = f"hop of {hidden.shape[0]} x {hidden.shape[1]} on one host, {way}"
        if way in OF_GPUS and not recorder.order.is_cuda:
            recorder.not_measured(
                name, "ms", NEEDS_CUDA.format(device=recorder.order.device), better=Better.LOWER
            )
            continue
        try:
            took_s = await hop_s(way, hidden, dtype, rounds=3 if recorder.order.is_quick else 100)
        except OSError as error:
            recorder.not_measured(name, "ms", str(error), better=Better.LOWER)
            continue
        recorder.figure(
            name, took_s * 1e3, "ms", better=Better.LOWER, details={"payload_bytes": float(hidden.nbytes)}
        )


def _transfers(device: torch.device, num_bytes: int) -> StepTransfers:
    if device.type == "cpu":
        return HostTransfers()
    room = num_bytes + (1 << 16)
    return StagingRing(CudaQueue(device), StagingSizes(input_bytes=room, output_bytes=room), timeout_s=60.0)


def _record(recorder: Recorder, copies: _Copies, size: str, name: str, dtype: WireDType) -> None:
    arrived = to_frame([copies.hidden], copies.boundary, dtype)
    num_bytes = sum(payload(view).nbytes for view in arrived)
    rounds = 3 if recorder.order.is_quick else 30
    device = torch.device(recorder.order.device)
    took_s = _least_s(lambda: _dropped(copies.there_and_back(arrived, dtype)), device, rounds)
    rates = Rates.of(recorder.order.rates)
    bound_ms = None
    if rates is not None and rates.up and rates.down:
        bound_ms = 1e3 * (num_bytes / rates.up + num_bytes / rates.down)
    recorder.figure(
        f"hidden states {size} to the device and back, {name}",
        took_s * 1e3,
        "ms",
        bound=bound_ms,
        better=Better.LOWER,
        details={"payload_bytes": float(num_bytes)},
    )
    messages_s = _least_s(lambda: _through_messages(arrived), torch.device("cpu"), rounds)
    recorder.figure(
        f"hidden states {size} through messages on the host, {name}",
        messages_s * 1e3,
        "ms",
        better=Better.LOWER,
    )


def _dropped(left: HiddenStates) -> None:
    """The slot of the ring is free again when nothing holds its output."""


def _through_messages(hidden: HiddenStates) -> None:
    """Encode, with checksum, and assemble again; without gRPC."""
    tokens = tuple(range(hidden[0].shape[0]))
    part = StepSlice(KEY, 0, tokens, Prefill(0, len(tokens), len(tokens)))
    encoded = encode_step(Step(epoch=1, step_id=0, chunks=(part,)))
    assembler = FrameAssembler(max_payload_bytes=1 << 30)
    assembler.add(encode_step_frame(encoded))
    for message in encode_hidden_states(0, step_frame_checksum(encoded, 0), hidden):
        received = assembler.add(message)
    assert isinstance(received[0], Frame), "the messages are a frame"


def _least_s(work: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Least seconds of a call, which waits for the device itself."""
    work()
    synchronize(device)
    least = float("inf")
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began_s)
    return least
