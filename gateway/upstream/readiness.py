"""Whether a coordinator serves, from the answers of its health check. Pure, so that time is an argument."""

from __future__ import annotations


class Readiness:
    """Ready from the first answer that the coordinator serves, also through an interruption of its pipeline.

    New requests wait for a pipeline that recovers. So a gateway stays ready for `grace_s` after the pipeline
    stopped, else each lost worker would make all gateways unready at once.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ends_s = 0.0
        self._state = "no answer of its health check yet"
        self._is_serving = False

    def note(self, state: str, now_s: float, *, is_serving: bool) -> None:
        """Take an answer; `state` says in a few words what the coordinator does."""
        if self._is_serving and not is_serving:
            self._ends_s = now_s + self._grace_s
        self._state = state
        self._is_serving = is_serving

    def problem(self, now_s: float) -> str:
        """Return why the coordinator does not serve; empty if it does, or recovers."""
        return "" if self._is_serving or now_s < self._ends_s else self._state
