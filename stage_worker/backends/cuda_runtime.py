"""Calls of the CUDA or HIP runtime that torch lacks: memory that other processes open, and copies from it."""

from __future__ import annotations

import ctypes
import logging
import mmap
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stage_worker.backends.contract import DeviceError
from stage_worker.backends.hop_memory import DeviceMappings
from stage_worker.model.attention_views import HostArray
from stage_worker.model.checksums import Checksum
from wire.staging import WORD_BYTES

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
PROOF_BYTES = 1 << 16
"""Of a segment, which are compared when it is opened; segments are larger."""
_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess."""
_BY_ADDRESS = 4
"""cudaMemcpyDefault."""
LOCKED_PIECE_BYTES = 1 << 30
"""Of memory that is page-locked at a time."""
_FOR_ALL_CONTEXTS, _MAPPED = 1, 2
"""cudaHostRegisterPortable and cudaHostRegisterMapped."""
_LIBRARIES = {"libcudart": "cuda", "libamdhip64": "hip"}
"""Begin of the library's file name, and of its functions."""
_MAPS = Path("/proc/self/maps")


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class DeviceRuntime:
    """The runtime that torch has loaded, for the current device of the calling thread."""

    def __init__(self) -> None:
        """Raises OSError if torch has loaded none."""
        path, self._prefix = _loaded_runtime()
        self._library = ctypes.CDLL(path)
        self._text = getattr(self._library, f"{self._prefix}GetErrorString")
        self._text.restype = ctypes.c_char_p
        self._last = getattr(self._library, f"{self._prefix}GetLastError")

    def call(self, function: str, *arguments: object) -> None:
        """Call `function`, such as "Malloc". Raises OSError with the driver's text.

        The error is then no longer that of the thread's next call.
        """
        error = getattr(self._library, f"{self._prefix}{function}")(*arguments)
        if error:
            self._last()
            raise OSError(f"{self._prefix}{function}: {self._text(error).decode()}")

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy of the device. Raises DeviceError."""
        try:
            self.call(
                "MemcpyAsync",
                *(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes)),
                *(ctypes.c_int(_BY_ADDRESS), ctypes.c_void_p(stream)),
            )
        except OSError as error:
            raise DeviceError(str(error)) from error


@cache
def device_runtime() -> DeviceRuntime:
    """Raises OSError if torch has loaded no runtime."""
    return DeviceRuntime()


def _loaded_runtime() -> tuple[str, str]:
    """File and prefix of the runtime. Raises OSError."""
    for line in _MAPS.read_text().splitlines():
        name = line.rpartition("/")[2]
        for begin, prefix in _LIBRARIES.items():
            if name.startswith(begin) and ".so" in name:
                return line[line.index("/") :], prefix
    raise OSError("torch has loaded no CUDA or HIP runtime library")


def locked_memory(num_bytes: int) -> HostArray:
    """Page-locked memory uint8 [num_bytes] at its addresses on the device, too; unlocked before it is freed.

    The thread that frees it has the device as its current one from then on: without one, the driver would
    take memory of the first GPU. It is locked in pieces, because threads that map memory may wait while the
    driver locks pages. Raises OSError with the driver's text, or the system's.
    """
    memory: HostArray = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    begin, locked, device = memory.ctypes.data, list[int](), ctypes.c_int()
    device_runtime().call("GetDevice", ctypes.byref(device))
    weakref.finalize(memory, _unlock, locked, device).atexit = False
    for address in range(begin, begin + num_bytes, LOCKED_PIECE_BYTES):
        size_bytes = min(LOCKED_PIECE_BYTES, begin + num_bytes - address)
        device_runtime().call(
            "HostRegister",
            *(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)),
            ctypes.c_uint(_FOR_ALL_CONTEXTS | _MAPPED),
        )
        locked.append(address)
        _check_place(address)
    return memory


def _check_place(address: int) -> None:
    """Raise OSError if the device has page-locked memory elsewhere: pieces would not follow each other."""
    found = ctypes.c_void_p()
    device_runtime().call(
        "HostGetDevicePointer", *(ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
    )
    if found.value != address:
        raise OSError(f"the device has host memory of address {address:#x} at {found.value or 0:#x}")


def _unlock(locked: Sequence[int], device: ctypes.c_int) -> None:
    try:
        device_runtime().call("SetDevice", device)
        for address in locked:
            device_runtime().call("HostUnregister", ctypes.c_void_p(address))
    except OSError as error:  # of a device that has failed: the process ends
        log.warning("memory of the host stays page-locked: %s", error)


class CudaMappings(DeviceMappings):
    """Memory of CUDA or ROCm, apart from torch's; the calling thread has the device as its current one."""

    def __init__(self, device: torch.device, checksum: Checksum) -> None:
        """`checksum` is that of steps, whose kernel is then compiled before they come."""
        self._device, self._checksum = device, checksum

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_void_p()
        device_runtime().call("Malloc", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        assert address.value is not None, "memory at no address"
        return address.value

    def free(self, address: int) -> None:
        device_runtime().call("Free", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        device_runtime().call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        device_runtime().call(
            "IpcOpenMemHandle",
            *(ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS)),
        )
        assert address.value is not None, "memory at no address"
        return address.value

    def close(self, address: int) -> None:
        device_runtime().call("IpcCloseMemHandle", ctypes.c_void_p(address))

    def write_proof(self, address: int) -> int:
        content = torch.frombuffer(bytearray(secrets.token_bytes(PROOF_BYTES)), dtype=torch.int32)
        with _as_os_errors():
            proof = content.to(self._device)
            self._copy(address, proof.data_ptr())
            return self._checksum_of(proof)

    def read_proof(self, address: int) -> int:
        with _as_os_errors():
            found = torch.empty(PROOF_BYTES // WORD_BYTES, dtype=torch.int32, device=self._device)
            self._copy(found.data_ptr(), address)
            return self._checksum_of(found)

    def _copy(self, target: int, source: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        device_runtime().copy(target, source, PROOF_BYTES, stream)

    def _checksum_of(self, words: Tensor) -> int:
        return int(self._checksum(words, 0)) % (1 << 64)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise OSError for any error of memory, kernel or driver: hidden states take another way then."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
