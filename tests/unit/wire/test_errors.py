"""Every serving error has a gRPC status; other exceptions send a fixed text."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import grpc
import pytest

import wire
from wire.errors import (
    INTERNAL_ERROR_TEXT,
    STATUS_OF_ERROR,
    HandshakeMismatch,
    InvalidRequest,
    ServingError,
    StepFault,
    StepFaultKind,
    status_of,
)


def subclasses(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_serving_error_has_a_status() -> None:
    for module in pkgutil.iter_modules(wire.__path__, "wire."):
        importlib.import_module(module.name)
    importlib.import_module("coordinator.scheduler.scheduler")
    without = [
        error.__qualname__
        for error in subclasses(ServingError)
        if not any(ancestor in STATUS_OF_ERROR for ancestor in error.__mro__)
    ]
    assert without == []


def test_no_serving_error_maps_to_ok_or_unknown() -> None:
    assert grpc.StatusCode.OK not in STATUS_OF_ERROR.values()
    assert grpc.StatusCode.UNKNOWN not in STATUS_OF_ERROR.values()


@pytest.mark.parametrize(
    "error", [ValueError("secret"), KeyError("secret"), RuntimeError("secret"), TimeoutError("secret")]
)
def test_the_text_of_an_unknown_exception_is_not_sent(error: Exception) -> None:
    assert status_of(error) == (grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT)


def test_a_subclass_has_the_status_of_its_parent_and_its_own_text() -> None:
    class PromptTooLong(InvalidRequest):
        pass

    assert status_of(PromptTooLong("5 > 4")) == (grpc.StatusCode.INVALID_ARGUMENT, "5 > 4")


def test_a_mismatch_shows_both_values() -> None:
    error = HandshakeMismatch("block size", expected=16, got=32)
    assert status_of(error) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "block size mismatch: expected 16, got 32",
    )


def test_a_fault_without_details_has_its_location() -> None:
    fault = StepFault(StepFaultKind.CHECKSUM, "expected 1, got 2")
    assert fault.describe(stage=1) == (
        "stage 1, unknown step, requests none known: CHECKSUM: expected 1, got 2"
    )
    assert status_of(fault)[0] is grpc.StatusCode.ABORTED
