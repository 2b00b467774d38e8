"""Gateways: the product's link to the coordinator, in processes that die, and the wire rules of Serve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gateway.upstream.link import CoordinatorLink, LinkPolicy
from gateway.upstream.numbered_request import NumberedRequest, RequestStream
from stageline_rpc.v1 import inference_pb2
from tests.simulation.calls import ClientCall
from tests.simulation.cluster import COORDINATOR, Cluster
from tests.simulation.network import SimTransport
from tests.simulation.virtual_loop import Process

KEEP_S = 10.0
CREDIT = 4
LINK_POLICY = LinkPolicy(
    unreachable_s=60.0, max_retry_s=0.5, refresh_s=2.0, call_s=5.0, keep_s=KEEP_S, credit=CREDIT
)
_NO_CACHE = Path("no-tokenizer")


class SimLink(CoordinatorLink):
    """A link that also takes over a request of another gateway as its reader, which the protocol allows."""

    async def attach(self, request_id: str, secret: str, from_token: Sequence[int]) -> RequestStream:
        """Read choice i from token `from_token[i]` on. Raises UpstreamFailure."""
        return await self._open(_TakenOver(request_id, secret, from_token))


class _TakenOver(NumberedRequest):
    def __init__(self, request_id: str, secret: str, from_token: Sequence[int]) -> None:
        super().__init__(request_id, secret, credit=CREDIT)
        self._observes = False
        self._received = dict(enumerate(from_token))


class Gateway:
    """A gateway's link, in one process after another."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"gateway-{number}"
        self.link: SimLink | None = None
        self.process: Process | None = None
        self._cluster = cluster

    @property
    def is_up(self) -> bool:
        """Whether it accepts requests."""
        return self.link is not None

    def start(self) -> None:
        """A new process, unless one is up or the cluster is closing."""
        if (self.process is not None and not self.process.is_dead) or self._cluster.is_closing:
            return
        self.process = Process(self.name, self._cluster.network)
        self._cluster.others.append(self.process)
        self.process.spawn(self._run())

    def kill(self) -> None:
        if self.process is not None and not self.process.is_dead:
            self.link = None
            self.process.die()
            self._cluster.network.forget(self.process)

    async def _run(self) -> None:
        link = SimLink(COORDINATOR, cache_directory=_NO_CACHE, policy=LINK_POLICY, transport=SimTransport())
        await link.start()
        self.link = link


class Gateways:
    """All gateways of a cluster; checks on the wire that no request gets more tokens than it has credit."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.all = [Gateway(cluster, number) for number in range(count)]
        self._cluster = cluster
        self._credit: defaultdict[tuple[int, int], int] = defaultdict(int)
        """By call and number: what has arrived at the coordinator, less the tokens that it has sent."""
        self._num_calls = 0
        cluster.network.on_call = self._watch
        for gateway in self.all:
            gateway.start()

    def some(self, random: Random, *, other_than: Gateway | None = None) -> Gateway | None:
        """One that is up, rather another one than the given one."""
        up = [gateway for gateway in self.all if gateway.is_up]
        others = [gateway for gateway in up if gateway is not other_than]
        return random.choice(others or up) if up else None

    def calls(self) -> list[ClientCall]:
        """The open Serve streams."""
        calls = self._cluster.network.calls
        return [call for call in calls if call.status is None and call.method.endswith("/Serve")]

    def check_bounds(self) -> None:
        """Buffers hold no more than what credit and live requests allow."""
        note = self._cluster.oracle.note
        for gateway in self.all:
            for request in gateway.link._requests if gateway.link is not None else ():
                if request._num_queued > CREDIT:
                    note(f"{gateway.name} holds {request._num_queued} tokens, the credit is {CREDIT}")
        for stream in self._cluster.coordinator._streams._streams:
            batch = stream.batch
            known = batch._streams.keys() | batch._reserved.keys()
            if not {changed.number for changed in batch._changed} <= known:
                note("numbers that have ended wait to be collected")
            if not stream._deadlines.keys() <= known:
                note(f"the deadlines of numbers {stream._deadlines.keys() - known} outlive them")

    def check_idle(self) -> None:
        """After all requests and the time that their output is kept: nothing is left of them."""
        note = self._cluster.oracle.note
        for gateway in self.all:
            if gateway.link is None:
                note(f"{gateway.name} is not up")
            elif gateway.link._requests:
                note(f"{gateway.name} still has {len(gateway.link._requests)} requests")
        server = self._cluster.coordinator
        for stream in server._streams._streams:
            batch = stream.batch
            if batch._streams or batch._reserved or batch._changed or stream._submitting or stream._deadlines:
                note(f"a Serve stream has numbers {[*batch._streams, *batch._reserved]} left")
        if server.engine.registry.num_kept:
            note(f"{server.engine.registry.num_kept} requests are kept for nobody")
        if server.journal is not None and (num_left := len(list(server.journal.ids))):
            note(f"{num_left} requests are left in the journal")

    def _watch(self, call: ClientCall) -> None:
        """Meter a Serve stream at the coordinator's end."""
        if not call.method.endswith("/Serve"):
            return
        self._num_calls += 1
        arrive, send = call.up.receiver, call.down.send
        call.up.receiver = partial(self._arrives, self._num_calls, arrive)
        untyped: Any = call.down
        untyped.send = partial(self._is_sent, self._num_calls, send)

    def _arrives(self, call: int, arrive: Any, item: Any) -> None:
        if isinstance(item, bytes):
            command = inference_pb2.ServeRequest.FromString(item)
            match command.WhichOneof("command"):
                case "submit":
                    self._credit[call, command.submit.number] += command.submit.credit
                case "attach":
                    self._credit[call, command.attach.number] += command.attach.credit
                case "credit":
                    for number, tokens in zip(command.credit.numbers, command.credit.tokens, strict=True):
                        self._credit[call, number] += tokens
        arrive(item)

    def _is_sent(self, call: int, send: Any, item: Any) -> None:
        if isinstance(item, bytes):
            message = inference_pb2.ServeResponse.FromString(item)
            for number, count in zip(message.numbers, message.counts, strict=True):
                self._credit[call, number] -= count
                if self._credit[call, number] < 0:
                    self._cluster.oracle.note(f"number {number} gets {count} tokens beyond its credit")
            self.check_bounds()
        send(item)
