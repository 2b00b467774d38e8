"""Clients need inference.proto and a gRPC library, and no Stageline code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.clusters import Served
from tests.fake_processes import ROOT

STRANGER = """
import json, sys
import grpc
import inference_pb2, inference_pb2_grpc

address, prompt = sys.argv[1], json.loads(sys.argv[2])
with grpc.insecure_channel(address) as channel:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=48)
    tokens, last = [], None
    for last in stub.Generate(request, timeout=60):
        assert last.first_token_index == len(tokens)
        tokens += last.token_ids
    try:
        list(stub.Generate(inference_pb2.GenerateRequest(text="hello"), timeout=10))
    except grpc.RpcError as error:
        refused = error.code().name
    ours = sorted(n for n in sys.modules if n.split(".")[0] in ("stageline", "stageline_rpc", "wire"))
    print(json.dumps({
        "tokens": tokens,
        "finish_reason": inference_pb2.FinishReason.Name(last.finish_reason),
        "completion_tokens": last.usage.completion_tokens,
        "vocab_size": stub.GetModel(inference_pb2.GetModelRequest(), timeout=10).vocab_size,
        "refused": refused,
        "ours": ours,
    }))
"""


@pytest.mark.asyncio(loop_scope="package")
async def test_a_client_generated_from_the_proto_file_alone_is_served(served: Served, tmp_path: Path) -> None:
    shutil.copy(ROOT / "proto/stageline_rpc/v1/inference.proto", tmp_path)
    (tmp_path / "stranger.py").write_text(STRANGER)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=."]
    _run([*protoc, "inference.proto"], tmp_path)
    prompt = served.reference.prompts[3]
    answer = json.loads(_run([sys.executable, "stranger.py", served.address, json.dumps(prompt)], tmp_path))
    assert answer == {
        "tokens": served.reference.expected[3],
        "finish_reason": "FINISH_REASON_LENGTH",
        "completion_tokens": 48,
        "vocab_size": 128,
        "refused": "INVALID_ARGUMENT",  # a checkpoint without a tokenizer accepts no text
        "ours": [],
    }


def _run(command: list[str], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


OPERATOR = """
import json, sys
import grpc
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, kv_events_pb2, telemetry_pb2, telemetry_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    cluster = cluster_pb2_grpc.ClusterStub(channel)
    status = cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=10)
    events = cluster.WatchKvEvents(kv_events_pb2.WatchKvEventsRequest(), timeout=10)
    traces = telemetry_pb2_grpc.TelemetryServiceStub(channel)
    listed = traces.ListTraces(telemetry_pb2.ListTracesRequest(page_size=1), timeout=10)
    files = {sys.modules[name].__file__ for name in sys.modules if name.startswith("stageline")}
    print(json.dumps({
        "state": cluster_pb2.ClusterState.Name(status.state),
        "snapshot_epoch": next(events).snapshot.epoch == status.epoch,
        "traces": len(listed.traces) <= 1,
        "files": sorted(file for file in files if file),
    }))
"""


@pytest.mark.asyncio(loop_scope="package")
async def test_an_operator_needs_the_public_files_alone(served: Served, tmp_path: Path) -> None:
    public = tmp_path / "stageline_rpc/v1"
    public.mkdir(parents=True)
    for source in (ROOT / "proto/stageline_rpc/v1").glob("*.proto"):
        shutil.copy(source, public)
    for package in (public, public.parent):
        (package / "__init__.py").touch()
    (tmp_path / "operator_client.py").write_text(OPERATOR)
    names = [str(file.relative_to(tmp_path)) for file in public.glob("*.proto")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=."]
    _run([*protoc, *names], tmp_path)
    answer = json.loads(_run([sys.executable, "operator_client.py", served.address], tmp_path))
    assert answer["state"] == "CLUSTER_STATE_SERVING"
    assert answer["snapshot_epoch"]
    assert answer["traces"]
    assert answer["files"]
    assert all(Path(file).is_relative_to(tmp_path) for file in answer["files"])
