"""Who taps all connections of a cluster reads prompts and hidden states, and with certificates neither."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from certificates.identity import Role
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from stage_worker import hop_payloads, next_stage_stream
from stage_worker.config import WorkerConfig
from stage_worker.server import Worker
from stageline import Client
from stageline_rpc.internal.v1 import step_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.faults.byte_proxy import ByteProxy
from tests.integration.cluster import DEADLINE_S, Cluster, RunningWorker
from tests.issued import Certificates
from tests.ports import unused_address
from wire.transport import PLAIN_SETTINGS, TransportSettings

PROMPT = "Lily found a very secret purple key under the old oak tree. She said to her mother that"
NEEDLE_BYTES = 48


class Taps(contextlib.AsyncExitStack):
    """A tap at every connection, by the name of who is dialled."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, ByteProxy] = {}

    async def at(self, name: str, target: str = "") -> ByteProxy:
        tap = self.by_name[name] = await self.enter_async_context(ByteProxy(target))
        tap.heard = bytearray()
        return tap

    @property
    def used(self) -> set[str]:
        """Taps that something passed."""
        return {name for name, tap in self.by_name.items() if tap.heard}

    def that_heard(self, needle: bytes) -> set[str]:
        return {name for name, tap in self.by_name.items() if needle in (tap.heard or b"")}


class TappedCluster(Cluster):
    """Two stages of the built-in model; every connection passes a tap, and so do large hidden states."""

    def __init__(self, taps: Taps, payload_min: int, **settings: Any) -> None:
        super().__init__(
            None, layers=(6, 6), num_workers=0, waits=False, has_text=True, self_check=False, **settings
        )
        self._taps, self._payload_min = taps, payload_min

    async def serve(self) -> None:
        """Start the workers behind their taps, and wait."""
        coordinator = await self._taps.at("coordinator", self.address)
        for name in ("w0", "w1"):
            forth, payloads = await self._taps.at(name), unused_address()
            config: WorkerConfig = replace(
                self.worker_config(name),
                coordinator=coordinator.address,
                advertise=forth.address,
                min_payload_bytes=self._payload_min,
                payload_listen=payloads,
                payload_advertise=(await self._taps.at(f"payloads of {name}", payloads)).address,
            )
            worker = Worker(config)
            await worker.start()
            forth.target = worker.listen_address
            self.workers[name] = RunningWorker(worker, None)
        await self.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)


@pytest.fixture
def hidden_states(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A part of all hidden states that FIRST has computed."""
    seen: list[bytes] = []
    encode, send = next_stage_stream.encode_hidden_states, hop_payloads.OutgoingPayloads.send

    def note(hidden: Any) -> None:
        large = (tensor for tensor in hidden or () if tensor.size_bytes >= NEEDLE_BYTES)
        seen.extend(bytes(tensor.data)[:NEEDLE_BYTES] for tensor in large)

    def encoding(step_id: int, checksum: int, hidden: Any, *more: Any, **others: Any) -> Any:
        note(hidden)
        return encode(step_id, checksum, hidden, *more, **others)

    async def sending(self: Any, hidden: Any) -> Any:
        note(hidden)
        return await send(self, hidden)

    monkeypatch.setattr(next_stage_stream, "encode_hidden_states", encoding)
    monkeypatch.setattr(hop_payloads.OutgoingPayloads, "send", sending)
    return seen


async def tap_everything(taps: Taps, certificates: Certificates | None, payload_min: int) -> list[int]:
    """Serve the prompt over gRPC and over HTTP; return its token ids."""

    def settings(name: str, role: Role) -> TransportSettings:
        if certificates is None:
            return PLAIN_SETTINGS
        return TransportSettings(tls_directory=certificates.of(name, role))

    async with TappedCluster(taps, payload_min, certificates=certificates) as cluster:
        await cluster.serve()
        at = taps.by_name["coordinator"].address
        async with Client(at, tls_dir=settings("me", Role.CLIENT).tls_directory) as client:
            (told,) = await client.complete(PROMPT, max_tokens=8)
            assert len(told.token_ids) == 8
        config = GatewayConfig(
            coordinator=at, listen="127.0.0.1:0", transport=settings("gateway", Role.GATEWAY)
        )
        gateway = GatewayServer(config, template=None)
        await gateway.start()
        try:
            front = await taps.at("gateway", gateway.address)
            scheme = "http" if certificates is None else "https"
            async with AsyncClient(
                base_url=f"{scheme}://{front.address}", timeout=DEADLINE_S, verify=_trust(certificates)
            ) as http:
                answer = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
                assert answer.status_code == 200, answer.text
                ids = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        finally:
            await gateway.stop()
    return list(ids)


def _trust(certificates: Certificates | None) -> Any:
    if certificates is None:
        return False
    return ssl.create_default_context(cafile=certificates.of("me", Role.CLIENT) / "ca.crt")


@pytest.mark.parametrize("payload_min", [1, 2**40], ids=["payload connection", "frames"])
async def test_a_tap_hears_all_in_plain_text_and_nothing_with_certificates(
    hidden_states: list[bytes], tmp_path: Path, payload_min: int
) -> None:
    async with Taps() as taps:
        ids = await tap_everything(taps, None, payload_min)
        tokens = step_pb2.TokenSequence(tokens=ids[1:-1]).SerializeToString()[2:]
        text = PROMPT.encode()
        assert taps.that_heard(text) == {"coordinator", "gateway"}
        assert taps.that_heard(tokens) >= {"w0", "w1"}
        way = "payloads of w1" if payload_min == 1 else "w1"
        assert hidden_states and all(way in taps.that_heard(hidden) for hidden in hidden_states)
        used = taps.used
    hidden_states.clear()
    async with Taps() as taps:
        await tap_everything(taps, Certificates(tmp_path), payload_min)
        assert hidden_states and taps.used == used
        assert [needle for needle in (text, tokens, *hidden_states) if taps.that_heard(needle)] == []
