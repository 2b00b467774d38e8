"""The coordinator's own ends of the pipeline, epoch after epoch: steps to FIRST, results of LAST."""

from collections.abc import Callable

from coordinator.cluster.actions import BeginEpoch
from coordinator.cluster.messages import check_results_hello, encode_hop_hello
from coordinator.cluster.pipeline_link import PipelineLink
from stageline_rpc.v1 import stage_pb2
from wire.errors import StaleStream
from wire.ids import Incarnation
from wire.steps import Step


class Pipeline:
    """Owner of the stream to FIRST."""

    def __init__(self, *, incarnation: Incarnation, fingerprint: str) -> None:
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._begun: BeginEpoch | None = None
        self._link: PipelineLink | None = None

    def expect(self, action: BeginEpoch) -> None:
        """This epoch begins: results of it are welcome."""
        self._begun = action

    def new_link(self, action: BeginEpoch, on_broken: Callable[[str], None]) -> PipelineLink:
        """The stream of this epoch to FIRST, still to be opened; `release` comes first."""
        assert self._link is None, "an epoch has one stream"
        hello = encode_hop_hello(action, incarnation=self._incarnation, fingerprint=self._fingerprint)
        first = action.workers[0]
        self._link = PipelineLink(first.address, hello, on_broken, worker=first.name)
        return self._link

    def send(self, step: Step) -> None:
        """Queues a step of the present epoch; never blocks."""
        assert self._link is not None, "no epoch has begun"
        self._link.send(step)

    def release(self) -> PipelineLink | None:
        """The stream that there was, for closing; from now on there is none."""
        link, self._link = self._link, None
        return link

    def check_results(self, hello: stage_pb2.HopHello, *, epoch: int) -> None:
        """LAST opens its results. Raises StaleStream or HandshakeMismatch; `epoch` is the present one."""
        if self._begun is None or hello.epoch != epoch:
            raise StaleStream(f"results of epoch {hello.epoch}; the present epoch is {epoch}")
        check_results_hello(hello, self._begun, incarnation=self._incarnation, fingerprint=self._fingerprint)
