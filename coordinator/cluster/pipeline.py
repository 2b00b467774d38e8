"""The coordinator's own ends of the pipeline, epoch after epoch: steps to FIRST, results of LAST."""

import time
from collections.abc import Callable

from coordinator.cluster.actions import BeginEpoch
from coordinator.cluster.messages import check_results_hello, encode_begin, encode_hop_hello
from coordinator.cluster.pipeline_link import PipelineLink
from stageline_rpc.v1 import cluster_pb2, stage_pb2
from wire.errors import StaleStream
from wire.ids import Incarnation
from wire.peer_secrets import HopSecrets, RefusedPeers
from wire.steps import Step


class Pipeline:
    """Owner of the stream to FIRST."""

    def __init__(
        self, *, incarnation: Incarnation, fingerprint: str, new_secret: Callable[[], bytes]
    ) -> None:
        """`new_secret` makes what the two ends of a hop know of each other in one epoch."""
        self._new_secret = new_secret
        self._secrets: tuple[bytes, ...] = ()
        self._incoming = HopSecrets(RefusedPeers(time.monotonic))
        self._has_results = False
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._begun: BeginEpoch | None = None
        self._link: PipelineLink | None = None

    def expect(self, action: BeginEpoch) -> None:
        """This epoch begins: results of it are welcome."""
        self._begun, self._has_results = action, False
        self._secrets = tuple(self._new_secret() for _ in range(len(action.workers) + 1))
        self._incoming.begin_epoch(self._secrets[-1])

    def begin_message(self, action: BeginEpoch, stage: int) -> cluster_pb2.CoordinatorMessage:
        """For one stage of the expected epoch, with the secrets of the hops into and out of it."""
        assert action is self._begun, "secrets are of one epoch"
        return encode_begin(
            action,
            incarnation=self._incarnation,
            incoming_secret=self._secrets[stage],
            outgoing_secret=self._secrets[stage + 1],
        )

    def new_link(self, action: BeginEpoch, on_broken: Callable[[str], None]) -> PipelineLink:
        """The stream of this epoch to FIRST, still to be opened; `release` comes first."""
        assert self._link is None, "an epoch has one stream"
        hello = encode_hop_hello(action, incarnation=self._incarnation, fingerprint=self._fingerprint)
        hello.secret = self._secrets[0]
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

    def accept_results(self, hello: stage_pb2.HopHello, *, epoch: int, host: str) -> None:
        """LAST, on `host`, opens its results, once in an epoch; `epoch` is the present one. Raises
        SecretMismatch, StaleStream or HandshakeMismatch.
        """
        self._incoming.check(hello.secret, host=host)
        if self._begun is None or hello.epoch != epoch:
            raise StaleStream(f"results of epoch {hello.epoch}; the present epoch is {epoch}")
        check_results_hello(hello, self._begun, incarnation=self._incarnation, fingerprint=self._fingerprint)
        if self._has_results:
            raise StaleStream(f"the results of epoch {epoch} have their stream already")
        self._has_results = True
