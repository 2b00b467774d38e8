from __future__ import annotations

import asyncio

from bench.harness.peer import Peer
from bench.harness.tcp_sink import send_frames


async def test_every_frame_is_received_whole_on_one_connection_after_another() -> None:
    frame = bytes(3 << 20)
    async with Peer("bench.harness.tcp_sink") as sink:
        for num_frames in (3, 1):
            port = (await sink.ask({"size_bytes": len(frame)}))["port"]
            times_s = await asyncio.to_thread(send_frames, port, frame, num_frames)
            assert len(times_s) == num_frames
            assert all(time_s > 0 for time_s in times_s)
