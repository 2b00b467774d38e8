"""Run a Gluon kernel for Hopper on a CPU: partitions are threads, shared memory is tensors, barriers count.

Copies and products are complete at once, so that only the compiler's tests see how these overlap. Shared
memory and accumulators begin as NaN; a wait that nothing ends fails after TIMEOUT_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

TIMEOUT_S = 30.0
_SWIZZLED = 64
"""Elements of 2 bytes side by side in shared memory; the next ones follow after all rows."""


def _raw(given: Any) -> Any:
    return given.of if isinstance(given, Value) else given


def _operation(compute: Callable[[Any, Any], Tensor]) -> Callable[[Value, Any], Any]:
    def operate(left: Value, right: Any) -> Any:
        return right + left if isinstance(right, Pointer) else Value(compute(left.of, _raw(right)))

    return operate


class Value:
    """A tensor whose integers are divided as in C."""

    def __init__(self, of: Tensor) -> None:
        self.of = of

    __add__ = __radd__ = _operation(lambda left, right: left + right)
    __sub__ = _operation(lambda left, right: left - right)
    __mul__ = __rmul__ = _operation(lambda left, right: left * right)
    __truediv__ = _operation(lambda left, right: left / right)
    __floordiv__ = _operation(lambda left, right: torch.div(left, right, rounding_mode="trunc"))
    __mod__ = _operation(torch.fmod)
    __and__ = _operation(lambda left, right: left & right)
    __xor__ = _operation(lambda left, right: left ^ right)
    __lt__ = _operation(lambda left, right: left < right)
    __le__ = _operation(lambda left, right: left <= right)
    __gt__ = _operation(lambda left, right: left > right)
    __ge__ = _operation(lambda left, right: left >= right)
    __eq__ = _operation(lambda left, right: left == right)
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.of)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.of[key])

    @property
    def shape(self) -> list[int]:
        return list(self.of.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.of.to(dtype))


class Pointer:
    """Places `at` in the elements of a tensor and of what follows it in memory."""

    def __init__(self, elements: Tensor, at: Any = 0) -> None:
        self.elements, self.at = elements, at

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return cls(tensor.as_strided((size,), (1,)))

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.elements, self.at + _raw(distance))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.elements, self.at[key])

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.elements.dtype)


class Shared:
    """Shared memory as the tensor memory accelerator and products lay it out."""

    def __init__(self, elements: Tensor, shape: Sequence[int], *, is_transposed: bool = False) -> None:
        self.elements, self.shape, self._is_transposed = elements, list(shape), is_transposed

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    def index(self, index: Any) -> Shared:
        number, size = int(_raw(index)), torch.Size(self.shape[1:]).numel()
        assert 0 <= number < self.shape[0], f"place {number} of {self.shape[0]}"
        return Shared(self.elements[number * size : (number + 1) * size], self.shape[1:])

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return Shared(self.elements, self.shape, is_transposed=True)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        assert self.elements.dtype == dtype
        assert self.elements.numel() == torch.Size(shape).numel()
        return Shared(self.elements, shape)

    def _parts(self) -> Tensor:
        rows, columns = self.shape
        return self.elements.view(columns // min(columns, _SWIZZLED), rows, -1)

    def read(self) -> Tensor:
        found = self._parts().transpose(0, 1).reshape(self.shape)
        return found.T if self._is_transposed else found

    def write(self, given: Tensor) -> None:
        parts = self._parts()
        parts.copy_(given.reshape(parts.shape[1], parts.shape[0], -1).transpose(0, 1))

    def load(self, layout: object) -> Value:
        return Value(self.read().clone())

    def store(self, given: Value) -> None:
        self.write(given.of)


class Barrier:
    """Its phase ends when all have arrived and all expected bytes are there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._num_bytes = self._phase = 0

    def begin(self, count: int) -> None:
        self._count = self._missing = count

    def change(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self._changed:
            self._missing -= arrivals
            self._num_bytes += num_bytes
            assert self._missing >= 0, "more arrivals than a phase has"
            if self._missing == self._num_bytes == 0:
                self._phase, self._missing = 1 - self._phase, self._count
                self._changed.notify_all()

    def wait(self, phase: int) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: self._phase != phase, TIMEOUT_S)
        assert ended, "a wait that nothing ends"


class Barriers:
    def __init__(self, count: int) -> None:
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, index: Any) -> Barrier:
        return self._barriers[int(_raw(index))]


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    if _raw(pred):
        barrier.wait(int(_raw(phase)))


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: Barriers,
    init=lambda barrier, count: barrier.begin(count),
    wait=_wait,
    arrive=lambda barrier, count: barrier.change(arrivals=count),
    expect=lambda barrier, num_bytes: barrier.change(arrivals=1, num_bytes=num_bytes),
)


def _copy(described: Any, place: Sequence[Any], barrier: Barrier, into: Shared) -> None:
    row, column = (int(_raw(number)) for number in place)
    height, width = into.shape
    assert into.shape == list(described.block_type.shape)
    part = described.base[row : row + height, column : column + width]
    assert row >= 0
    assert part.shape == (height, width)
    into.write(part)
    barrier.change(num_bytes=-part.numel() * part.element_size())


tma = SimpleNamespace(async_copy_global_to_shared=_copy)


def _multiplied(left: Any, right: Shared, total: Value, *, use_acc: bool = True, is_async: bool) -> Value:
    first = left.read() if isinstance(left, Shared) else left.of
    found = first.float() @ right.read().float()
    return Value(found + total.of if use_acc else found)


def _waited(num_outstanding: int, deps: tuple[Value, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Value:
    at = torch.as_tensor(pointer.at).long()
    if mask is None:
        return Value(pointer.elements[at])
    is_there, at = torch.broadcast_tensors(_raw(mask), at)
    found = pointer.elements[torch.where(is_there, at, 0)]
    return Value(torch.where(is_there, found, torch.tensor(other, dtype=found.dtype)))


def _store(pointer: Pointer, given: Value, mask: Value) -> None:
    is_there, at, values = torch.broadcast_tensors(mask.of, torch.as_tensor(pointer.at).long(), given.of)
    assert values.dtype == pointer.elements.dtype
    pointer.elements[at[is_there]] = values[is_there]


def _specialize(
    partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]
) -> None:
    errors: list[BaseException] = []

    def run(partition: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            partition(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _allocated(dtype: torch.dtype, shape: list[int], layout: object) -> Shared | Barriers:
    if layout is Barriers:
        return Barriers(shape[0])
    return Shared(torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype), shape)


def _both(compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Value]:
    return lambda left, right: Value(compute(torch.as_tensor(_raw(left)), torch.as_tensor(_raw(right))))


def _range(*limits: Any) -> Iterator[Value]:
    numbers = range(*(int(_raw(limit)) for limit in limits))
    return (Value(torch.tensor(number, dtype=torch.int32)) for number in numbers)


def _language(program: tuple[int, int], grid: tuple[int, int]) -> SimpleNamespace:
    """What kernels name `gl`, in one program; layouts of registers make no difference."""
    kinds = ("NVMMADistributed", "DotOperand", "Blocked", "Slice", "NVMMAShared")
    return SimpleNamespace(
        **{f"{kind}Layout": lambda *_: None for kind in kinds},
        float32=torch.float32,
        int64=torch.int64,
        program_id=lambda axis: Value(torch.tensor(program[axis], dtype=torch.int32)),
        num_programs=lambda axis: Value(torch.tensor(grid[axis], dtype=torch.int32)),
        load=_load,
        store=_store,
        arange=lambda begin, end, layout: Value(torch.arange(begin, end, dtype=torch.int32)),
        full=lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype)),
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
        zeros_like=lambda given: Value(torch.zeros_like(given.of)),
        max=lambda given, axis: Value(given.of.amax(axis)),
        sum=lambda given, axis: Value(given.of.sum(axis)),
        maximum=_both(torch.maximum),
        minimum=_both(torch.minimum),
        where=lambda chosen, left, right: _both(lambda a, b: torch.where(chosen.of, a, b))(left, right),
        exp2=lambda given: Value(given.of.exp2()),
        convert_layout=lambda given, layout: given,
        allocate_shared_memory=_allocated,
        static_range=range,
        warp_specialize=_specialize,
    )


class Emulator:
    """Starts kernels of `module` here, in place of `Launch.__call__`."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = module
        for name, found in list(vars(module).items()):
            if isinstance(found, JITFunction):
                monkeypatch.setattr(module, name, found.fn)
        for name, replaced in {
            "tma": tma,
            "mbarrier": mbarrier,
            "warpgroup_mma": _multiplied,
            "warpgroup_mma_wait": _waited,
            "fence_async_shared": lambda: None,
        }.items():
            monkeypatch.setattr(module, name, replaced)
        monkeypatch.setattr(module, "range", _range, raising=False)
        for name in ("_LOG2E", "_LOWEST"):
            monkeypatch.setattr(module, name, getattr(module, name).value)

    def run(self, launched: Any, *arguments: Any) -> None:
        given = [_given(argument) for argument in arguments]
        width, height = launched.grid
        attributes = vars(self._module)
        language = attributes["gl"]
        for number in range(width * height):
            program = number % width, number // width
            attributes["gl"] = _language(program, launched.grid)
            try:
                launched.kernel(*given, **launched.constants)
            finally:
                attributes["gl"] = language


def _given(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Pointer.to(argument)
    if isinstance(argument, int | float):
        return argument
    return SimpleNamespace(
        base=argument.base,
        dtype=argument.base.dtype,
        layout=argument.layout,
        block_type=SimpleNamespace(shape=argument.block_shape),
    )
