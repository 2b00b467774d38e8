"""`python -m tests.poisoned_stageline` is the `stageline` command, but a worker dies of one token.

The id of that token is in the environment, as POISON_TOKEN: the stage that computes it first is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from stage_worker.executor import BegunStep, StepExecutor
from stageline.__main__ import main
from wire.frames import Frame

POISON_VARIABLE = "POISON_TOKEN"


def poison(token: int) -> None:
    """From now on, a worker that computes a step with this token crashes."""
    begin = StepExecutor.begin

    def begin_or_die(self: StepExecutor, frame: Frame) -> BegunStep:
        if any(token in part.tokens for part in frame.step.slices):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, frame)

    StepExecutor.begin = begin_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    poison(int(os.environ[POISON_VARIABLE]))
    sys.exit(main())
