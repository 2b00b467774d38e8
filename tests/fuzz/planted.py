"""A surface with faults, which shows that faults are found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from tests.fuzz.harness import Opened, Surface

NUM_KINDS = 4


def _make(random: Random) -> bytes:
    return bytes([random.randrange(NUM_KINDS)])


def _examine(data: bytes) -> str:
    match data[0]:
        case 0:
            raise KeyError("a planted fault")
        case 1:
            os.kill(os.getpid(), signal.SIGABRT)
        case 2:
            os._exit(7)
    return "ok"


@contextmanager
def _opened() -> Iterator[Opened]:
    yield Opened(_examine)


PLANTED = Surface(name="planted", share=1, make=_make, opened=_opened)
