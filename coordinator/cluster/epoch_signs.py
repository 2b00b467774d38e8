"""What has been heard of an epoch that is being put together. Pure."""

from collections.abc import Collection


class EpochSigns:
    """Of one epoch at a time. It can serve when every stage is ready, FIRST has accepted the coordinator's
    stream, and LAST has opened its results.
    """

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._is_link_open = False
        self._are_results_open = False

    def clear(self) -> None:
        """Nothing has been heard of the epoch that begins."""
        self._ready.clear()
        self._is_link_open = self._are_results_open = False

    def note_ready(self, worker: str) -> None:
        self._ready.add(worker)

    def note_link(self) -> None:
        self._is_link_open = True

    def note_results(self) -> None:
        self._are_results_open = True

    def is_ready(self, worker: str) -> bool:
        """This stage has empty pools and reaches the next one."""
        return worker in self._ready

    def are_complete(self, workers: Collection[str]) -> bool:
        """For an epoch of these workers."""
        return self._ready.issuperset(workers) and self._is_link_open and self._are_results_open
