"""Cluster status as tables: the topology fits into 80 columns, the status into 110."""

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stageline_rpc.v1 import cluster_pb2
from wire.device_rates import decode_rates
from wire.foreign_text import escaped
from wire.kernels import StageKernels, differing_kernels
from wire.sizes import format_size
from wire.tensors import WIRE_DTYPE_FROM_MESSAGE

_NOTHING = "-"
_COORDINATOR = "the coordinator"


def topology_view(status: cluster_pb2.GetStatusResponse) -> RenderableType:
    """Table of stages with worker, layers, device and memory."""
    table = plain_table("Stage", "Worker", "Layers", "Device", "Weights", "KV cache")
    for worker in workers_by_stage(status):
        table.add_row(*_place(worker), _device(worker), _size(worker.weight_bytes), _size(worker.kv_bytes))
    return Group("", table, "")


def status_view(status: cluster_pb2.GetStatusResponse) -> RenderableType:
    """The output of `stageline status`."""
    lines = [
        describe_kv_cache(status),
        describe_kv_use(status),
        describe_kv_accounting(status),
        _describe_requests(status),
        *_loop_lag(status),
        *_ending_certificates(status),
        f"Self-check {status.self_check.detail}",
        *_journal(status.journal),
        *_last_end(status.end_cause),
        *_describe_weights(status),
        *_gpus(status),
        *_rates(status),
        *_device_memory(status),
        *_cuda_graphs(status),
        *_fetches(status),
        *_links(status),
        *_hops(status),
        *_payload_fallbacks(status),
        *_details(status),
    ]
    text = _escaped_lines("\n".join(lines))
    return Group(Text(describe_cluster(status)), "", _workers_table(status), "", Text(text))


def _escaped_lines(text: str) -> str:
    """Escape what workers and files put into lines."""
    return "\n".join(map(escaped, text.split("\n")))


def _journal(journal: cluster_pb2.JournalStatus) -> list[str]:
    if journal.state == cluster_pb2.JOURNAL_STATE_WRITING:
        return ["Journal writing"]
    if journal.state == cluster_pb2.JOURNAL_STATE_FAILING:
        return [f"Journal failing, {journal.num_unwritten} records unwritten: {journal.detail}"]
    return []


def _last_end(cause: cluster_pb2.EpochEndCause.ValueType) -> list[str]:
    name = enum_text(cluster_pb2.EpochEndCause.Name(cause), "EPOCH_END_CAUSE_")
    return [f"Last epoch ended by: {name}"] if cause else []


def describe_cluster(status: cluster_pb2.GetStatusResponse) -> str:
    """Model and state, in two lines."""
    dtype = enum_text(cluster_pb2.Dtype.Name(status.dtype), "DTYPE_")
    reason = f": {status.detail}" if status.detail else ""
    epoch = f", epoch {status.epoch}" if status.epoch else ""
    stages = "1 stage" if status.num_stages == 1 else f"{status.num_stages} stages"
    num_planned = sum(worker.HasField("stage") for worker in status.workers)
    if 0 < num_planned < status.num_stages:
        stages = f"{num_planned} of {stages}"
    if status.weights:
        dtype += f" with {enum_text(cluster_pb2.WeightFormat.Name(status.weights), 'WEIGHT_FORMAT_')} weights"
    if status.wire_dtype:
        dtype += f" (between stages in {WIRE_DTYPE_FROM_MESSAGE[status.wire_dtype].value})"
    if status.implementation == cluster_pb2.IMPLEMENTATION_TRANSFORMERS:
        dtype += " by transformers' layers (slower and less tested)"
    text = f"{status.model} in {dtype}, {stages}{epoch}\n{_health(status)}{_state(status)}{reason}"
    return _escaped_lines(text)


def _health(status: cluster_pb2.GetStatusResponse) -> str:
    """Health, where it adds to the state; else empty."""
    if status.health in (cluster_pb2.HEALTH_DEGRADED, cluster_pb2.HEALTH_DRAINING):
        return f"{enum_text(cluster_pb2.Health.Name(status.health), 'HEALTH_')}, "
    return ""


def windowed_blocks(window_blocks: Iterable[tuple[int, int]]) -> str:
    """Blocks of layers with a window, to follow the number of all others; empty without such layers."""
    return "".join(f"; {num_blocks} in layers with window {window}" for window, num_blocks in window_blocks)


def recurrent_states(num_states: int) -> str:
    """Slots for recurrent states, to follow the blocks; empty for models without recurrent layers."""
    return f", {num_states} recurrent states" if num_states else ""


def describe_kv_cache(status: cluster_pb2.GetStatusResponse) -> str:
    """Capacity of the KV cache, in one line."""
    if status.num_blocks == 0:
        return "KV cache: none yet"
    num_tokens = status.num_blocks * status.block_size
    windowed = windowed_blocks((group.window, group.num_blocks) for group in status.window_blocks)
    blocks = f"{status.num_blocks} blocks of {status.block_size}{windowed}"
    dtype = f" in {WIRE_DTYPE_FROM_MESSAGE[status.kv_dtype].value}" if status.kv_dtype else ""
    states = recurrent_states(status.num_states)
    return f"KV cache: {num_tokens} tokens{dtype} on each stage ({blocks}){states}"


def describe_kv_accounting(status: cluster_pb2.GetStatusResponse) -> str:
    """Prefix cache and result of the accounting checks, in one line."""
    verdict = enum_text(cluster_pb2.KvIntegrityVerdict.Name(status.kv.integrity), "KV_INTEGRITY_VERDICT_")
    result = f"{verdict}: {status.kv.detail}" if status.kv.detail else verdict
    return f"Prefix cache {'on' if status.kv.prefix_cache else 'off'}, KV accounting {result}"


def describe_start(status: cluster_pb2.GetStatusResponse) -> str:
    """Progress of the start, in one line."""
    loading = [
        f"{worker.name} "
        + (_fetched(worker.fetch) if worker.HasField("fetch") else f"{worker.load_progress:.0%}")
        for worker in status.workers
        if worker.state == cluster_pb2.WORKER_STATE_LOADING
    ]
    return ", ".join([status.detail or _state(status), *loading])


def _fetched(fetch: cluster_pb2.WeightsFetch) -> str:
    """For example "fetches 1.2 GiB of 17.5 GiB, 112.0 MiB/s, 149 s left"."""
    verb = "prefetches" if fetch.is_prefetch else "fetches"
    rate, left_bytes = fetch.bytes_per_second, fetch.total_bytes - fetch.done_bytes
    speed = f"{format_size(rate)}/s, {left_bytes / rate:.0f} s left" if rate else "no bytes at present"
    return f"{verb} {format_size(fetch.done_bytes)} of {format_size(fetch.total_bytes)}, {speed}"


def _fetches(status: cluster_pb2.GetStatusResponse) -> list[str]:
    texts = [
        (worker.name, "; ".join(filter(None, (_now_fetched(worker), worker.fetch_detail))))
        for worker in status.workers
    ]
    return [f"Worker {name} {text}" for name, text in texts if text]


def _links(status: cluster_pb2.GetStatusResponse) -> list[str]:
    return [
        f"Link {link.from_worker or _COORDINATOR} to {link.to_worker or _COORDINATOR}: "
        f"round trip {link.round_trip.ToTimedelta().total_seconds() * 1e3:.1f} ms, "
        + (f"{format_size(link.bytes_per_second)}/s" if link.bytes_per_second else "rate not measured yet")
        + (f"; {link.advice}" if link.advice else "")
        for link in status.links
    ]


def _now_fetched(worker: cluster_pb2.WorkerStatus) -> str:
    return _fetched(worker.fetch) if worker.HasField("fetch") else ""


def _workers_table(status: cluster_pb2.GetStatusResponse) -> Table:
    table = plain_table(
        "Stage", "Worker", "Layers", "Device", "State", "Memory", "KV use", "Process", "Address"
    )
    for worker in _all_workers(status):
        table.add_row(
            *_place(worker),
            _device(worker),
            enum_text(cluster_pb2.WorkerState.Name(worker.state), "WORKER_STATE_"),
            _memory(worker),
            _kv_use(worker.kv),
            _size(worker.resident_bytes),
            worker.address or _NOTHING,
        )
    return table


def describe_kv_use(status: cluster_pb2.GetStatusResponse) -> str:
    """Blocks of each stage, cache hits and preemptions, one line each."""
    lines = [f"Stage {worker.stage}: {_kv_blocks(worker.kv)}" for worker in workers_by_stage(status)]
    counts = status.requests
    prompts = (
        f"Prompts: {_share(counts.cached_tokens, counts.prompt_tokens, 'tokens from the cache')}, "
        f"{counts.preemptions} preemptions"
    )
    return "\n".join([*lines, prompts])


def _kv_blocks(kv: cluster_pb2.KvUsage) -> str:
    counts = (kv.states_live, kv.states_saved, kv.states_free)
    states = "; recurrent states: {} live, {} saved, {} free".format(*counts) if any(counts) else ""
    return (
        f"{kv.blocks_active} blocks active, {kv.blocks_inactive} inactive, {kv.blocks_free} free, "
        f"{_share(kv.blocks_hit, kv.blocks_wanted, 'hits')}{states}"
    )


def _share(part: int, whole: int, what: str) -> str:
    share = f" ({part / whole:.1%})" if whole else ""
    return f"{part} of {whole} {what}{share}"


def _describe_requests(status: cluster_pb2.GetStatusResponse) -> str:
    counts = status.requests
    return (
        f"Requests: {counts.waiting} waiting, {counts.prefill} in prefill, {counts.decode} in decode, "
        f"{counts.steps_in_flight} steps in flight, {counts.detached} detached\n"
        f"Ended: {counts.finished} finished, {counts.cancelled} cancelled, {counts.failed} failed, "
        f"{counts.kept} kept"
        + (f"; {counts.orphaned} orphaned, which is a defect" if counts.orphaned else "")
    )


def _loop_lag(status: cluster_pb2.GetStatusResponse) -> list[str]:
    if not status.HasField("loop_lag"):
        return []
    p50, p99 = (f"{lag.ToMicroseconds() / 1e3:.1f} ms" for lag in (status.loop_lag.p50, status.loop_lag.p99))
    return [f"Coordinator: loop lag p50 {p50}, p99 {p99}"]


def _ending_certificates(status: cluster_pb2.GetStatusResponse) -> list[str]:
    """Certificates that should have been renewed."""
    owners = [("the coordinator", status.certificate)]
    owners += [(f"worker {worker.name}", worker.certificate) for worker in status.workers]
    return [
        f"The certificate of {owner} ends {certificate.expires_at.ToDatetime():%Y-%m-%d %H:%M} UTC: renew it"
        for owner, certificate in owners
        if certificate.is_ending
    ]


def _hops(status: cluster_pb2.GetStatusResponse) -> list[str]:
    """How hidden states travel on each hop, and why not faster between workers of one host."""
    hops = [worker for worker in workers_by_stage(status) if worker.hop_transport]
    ways = [f"{hop.stage} to {hop.stage + 1} {_transport(hop.hop_transport)}" for hop in hops]
    return [
        *([f"Hidden states: stage {', '.join(ways)}"] if ways else []),
        *(
            f"Stage {worker.stage}: {_slower(worker)}: {worker.same_host_fallback}"
            for worker in workers_by_stage(status)
            if worker.same_host_fallback
        ),
    ]


def _slower(worker: cluster_pb2.WorkerStatus) -> str:
    """What follows from a reason against the fastest way on one host."""
    if worker.hop_transport in (cluster_pb2.HOP_TRANSPORT_TCP, cluster_pb2.HOP_TRANSPORT_GRPC):
        return "hidden states do not travel in shared memory"
    return "hidden states are copied once more"


def _transport(number: cluster_pb2.HopTransport.ValueType) -> str:
    """As `tcp` or `shared-memory`."""
    return enum_text(cluster_pb2.HopTransport.Name(number), "HOP_TRANSPORT_").replace(" ", "-")


def _payload_fallbacks(status: cluster_pb2.GetStatusResponse) -> list[str]:
    return [
        f"Stage {worker.stage}: large hidden states travel over gRPC: {worker.payload_fallback}"
        for worker in workers_by_stage(status)
        if worker.payload_fallback
    ]


def _describe_weights(status: cluster_pb2.GetStatusResponse) -> list[str]:
    """Results of the comparison of weights; mock stages have none."""
    checked = [
        f"stage {worker.stage} {enum_text(cluster_pb2.WeightsCheck.Name(worker.weights), 'WEIGHTS_CHECK_')}"
        for worker in workers_by_stage(status)
        if worker.weights
    ]
    return [f"Weights compared: {', '.join(checked)}"] if checked else []


def _gpus(status: cluster_pb2.GetStatusResponse) -> list[str]:
    described = [
        f"{worker.name} {worker.gpu.model} (compute capability {worker.gpu.compute_capability}, "
        f"{format_size(worker.gpu.memory_bytes)}, driver {worker.gpu.driver or 'unknown'})"
        for worker in _all_workers(status)
        if worker.HasField("gpu")
    ]
    return [f"GPUs: {'; '.join(described)}"] if described else []


def _rates(status: cluster_pb2.GetStatusResponse) -> list[str]:
    described = [
        f"{worker.name} {decode_rates(worker.rates)}"
        for worker in _all_workers(status)
        if worker.HasField("rates")
    ]
    return [f"Device rates: {'; '.join(described)}"] if described else []


def _device_memory(status: cluster_pb2.GetStatusResponse) -> list[str]:
    described = [
        f"{worker.name} {format_size(memory.allocated_bytes)} in tensors (at most "
        f"{format_size(memory.peak_bytes)}), {format_size(memory.reserved_bytes)} reserved, "
        f"{format_size(memory.free_bytes)} free; {format_size(memory.pinned_bytes)} pinned on the host"
        for worker in _all_workers(status)
        if worker.HasField("device_memory") and (memory := worker.device_memory)
    ]
    return [f"GPU memory: {text}" for text in described]


def _cuda_graphs(status: cluster_pb2.GetStatusResponse) -> list[str]:
    described = [
        f"{worker.name} {_graph_steps(graphs)}; {_graph_sizes(graphs)}, {format_size(graphs.pool_bytes)}"
        for worker in workers_by_stage(status)
        if worker.HasField("cuda_graphs") and (graphs := worker.cuda_graphs)
    ]
    return [f"CUDA graphs: {text}" for text in described]


def _graph_steps(graphs: cluster_pb2.CudaGraphs) -> str:
    reasons = [
        f"{entry.num_steps} {enum_text(cluster_pb2.EagerReason.Name(entry.reason), 'EAGER_REASON_')}"
        for entry in graphs.eager
    ]
    num_eager = sum(entry.num_steps for entry in graphs.eager)
    detail = f" ({', '.join(reasons)})" if reasons else ""
    return f"{graphs.num_replayed} steps replayed, {num_eager} eager{detail}"


def _graph_sizes(graphs: cluster_pb2.CudaGraphs) -> str:
    """Such as "9 graphs for decodes of 1, 2, 4 and prompts of 64 tokens"."""
    kinds = []
    for kind, has_prompts in (("decodes", False), ("prompts", True)):
        if sizes := [str(size.num_tokens) for size in graphs.sizes if size.has_prompts == has_prompts]:
            kinds.append(f"{kind} of {', '.join(sizes)}")
    count = sum(size.num_graphs for size in graphs.sizes)
    failed = f", {graphs.num_failed} failed" if graphs.num_failed else ""
    return f"{count} graphs{failed}" + (f" for {' and '.join(kinds)} tokens" if kinds else "")


def _details(status: cluster_pb2.GetStatusResponse) -> list[str]:
    # The cluster's detail often repeats a failed worker's.
    details = [
        f"{worker.name}: {worker.detail}"
        for worker in status.workers
        if worker.detail and worker.detail not in status.detail
    ]
    stages = [StageKernels(worker.device, worker.kernels) for worker in workers_by_stage(status)]
    differing = differing_kernels(stages)
    return [differing, *details] if differing else details


def plain_table(*columns: str) -> Table:
    """A table without borders, as all commands print."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=0)
    for column in columns:
        is_number = column in ("Weights", "KV cache", "KV use", "Memory", "Process")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    return table


def workers_by_stage(status: cluster_pb2.GetStatusResponse) -> list[cluster_pb2.WorkerStatus]:
    """Workers that have a stage, FIRST to LAST."""
    staged = (worker for worker in status.workers if worker.HasField("stage"))
    return sorted(staged, key=lambda worker: (worker.stage, worker.name))


def _all_workers(status: cluster_pb2.GetStatusResponse) -> list[cluster_pb2.WorkerStatus]:
    """Workers by stage, then the others by name."""
    others = (worker for worker in status.workers if not worker.HasField("stage"))
    return [*workers_by_stage(status), *sorted(others, key=lambda worker: worker.name)]


def _place(worker: cluster_pb2.WorkerStatus) -> tuple[str, str, str]:
    if not worker.HasField("stage"):
        return _NOTHING, worker.name, _NOTHING
    role = cluster_pb2.StageRole.Name(worker.role).removeprefix("STAGE_ROLE_")
    return f"{worker.stage} {role}", worker.name, _layers(worker)


def _device(worker: cluster_pb2.WorkerStatus) -> str:
    return f"{worker.device} {worker.kernels}" if worker.kernels else worker.device


def _layers(worker: cluster_pb2.WorkerStatus) -> str:
    num_layers = worker.layer_end - worker.layer_begin
    if num_layers == 1:
        return f"{worker.layer_begin} (1)"
    return f"{worker.layer_begin} to {worker.layer_end - 1} ({num_layers})"


def _kv_use(kv: cluster_pb2.KvUsage) -> str:
    num_blocks = kv.blocks_active + kv.blocks_inactive + kv.blocks_free
    return f"{kv.blocks_active / num_blocks:.1%}" if num_blocks else _NOTHING


def _memory(worker: cluster_pb2.WorkerStatus) -> str:
    """Memory used by weights and KV cache out of the worker's budget."""
    held = worker.weight_bytes + worker.kv_bytes
    return f"{_size(held)} of {_size(worker.memory_bytes)}" if worker.memory_bytes else _NOTHING


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else _NOTHING


def _state(status: cluster_pb2.GetStatusResponse) -> str:
    return enum_text(cluster_pb2.ClusterState.Name(status.state), "CLUSTER_STATE_")


def enum_text(value: str, prefix: str) -> str:
    """The name of an enum value without its prefix, in lower case."""
    return value.removeprefix(prefix).lower().replace("_", " ")
