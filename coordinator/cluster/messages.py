"""Encodes and decodes the messages between coordinator and workers."""

from collections.abc import Iterable, Sequence

from checkpoint import stage_tensor_names
from coordinator.cluster.actions import AssignStage, BeginEpoch
from coordinator.cluster.membership import WorkerIdentity
from coordinator.model import ServedModel
from coordinator.planner.links import Link
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.policy import RecoveryPolicy
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.addresses import parse_peer_address
from wire.channels import PROTOCOL_VERSION, check_protocol_version
from wire.device_rates import decode_rates
from wire.errors import HandshakeMismatch, InvalidRequest
from wire.gpu import decode_gpu
from wire.ids import Incarnation, StageRole
from wire.tensors import (
    DTYPE_TO_MESSAGE,
    IMPLEMENTATION_TO_MESSAGE,
    WEIGHT_FORMAT_TO_MESSAGE,
    HopRoute,
    kv_dtype_text,
    number_of,
)

MAX_TEXT = 255
"""Maximum characters of each text in a hello."""

ROLE_TO_MESSAGE: dict[StageRole, cluster_pb2.StageRole.ValueType] = {
    StageRole.FIRST: cluster_pb2.STAGE_ROLE_FIRST,
    StageRole.MIDDLE: cluster_pb2.STAGE_ROLE_MIDDLE,
    StageRole.LAST: cluster_pb2.STAGE_ROLE_LAST,
    StageRole.ONLY: cluster_pb2.STAGE_ROLE_ONLY,
}


def decode_hello(message: join_pb2.JoinRequest) -> WorkerIdentity:
    """Decode a hello. Raises HandshakeMismatch for another protocol version, and InvalidRequest."""
    if message.WhichOneof("message") != "hello":
        raise InvalidRequest("first message of Join must be hello")
    hello = message.hello
    check_protocol_version(hello.protocol_version)
    if not hello.name or not hello.address or len(hello.incarnation) != 16:
        raise InvalidRequest("hello of a worker needs a name, an address and a 16-byte incarnation")
    gpu = decode_gpu(hello.gpu) if hello.HasField("gpu") else None
    gpu_texts = () if gpu is None else gpu.texts
    for text in (hello.name, hello.address, hello.device, hello.hostname, hello.memory_domain, *gpu_texts):
        if not text.isprintable() or len(text) > MAX_TEXT:
            raise InvalidRequest(
                f"hello of a worker has {text[:MAX_TEXT]!r}, the limit is {MAX_TEXT} printable characters"
            )
    try:
        parse_peer_address(hello.address)
        rates = decode_rates(hello.rates) if hello.HasField("rates") else None
    except ValueError as error:
        raise InvalidRequest(f"worker {hello.name}: {error}") from None
    return WorkerIdentity(
        name=hello.name,
        incarnation=Incarnation(hello.incarnation),
        address=hello.address,
        device=hello.device,
        memory_bytes=hello.memory_bytes,
        last_epoch=hello.last_epoch,
        pid=hello.pid,
        is_mock=hello.is_mock,
        supports_bf16=hello.supports_bf16,
        supports_f16=hello.supports_f16,
        gpu=gpu,
        reads_pages_in_place=hello.reads_pages_in_place,
        rates=rates,
        warm_spare_bytes=hello.warm_spare_bytes,
        memory_domain=hello.memory_domain,
        host_memory_bytes=hello.host_memory_bytes,
    )


def encode_assign(
    action: AssignStage, model: ServedModel, sources: join_pb2.WeightSources
) -> join_pb2.JoinResponse:
    plan, stage = action.plan, action.stage
    assign = join_pb2.AssignStage(
        plan_id=action.plan_id,
        stage=stage.stage,
        num_stages=len(plan.stages),
        role=ROLE_TO_MESSAGE[stage.role],
        layer_begin=stage.layer_begin,
        layer_end=stage.layer_end,
        model=_encode_model(model),
        dtype=DTYPE_TO_MESSAGE[plan.dtype],
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        other_num_blocks=plan.other_num_blocks,
        num_states=plan.num_states,
        max_step_tokens=plan.limits.max_step_tokens,
        max_step_sequences=plan.limits.max_step_sequences,
        max_sequence_tokens=plan.max_sequence_tokens,
        wire_dtype=number_of(model.wire_dtype),
        weights=WEIGHT_FORMAT_TO_MESSAGE[model.weight_format],
        kv_dtype=number_of(plan.kv_dtype),
        has_long_rope=model.has_long_rope,
        force_reload=action.force_reload,
        manifest=_encode_manifest(model, [stage]),
        sources=sources,
        implementation=IMPLEMENTATION_TO_MESSAGE[model.implementation],
        activation_bytes=stage.activation_bytes,
        holds_stored=plan.holds_stored,
    )
    return join_pb2.JoinResponse(assign=assign)


def encode_prefetch(
    model: ServedModel, plan: Plan, stages: Sequence[StagePlan], sources: join_pb2.WeightSources
) -> join_pb2.JoinResponse:
    """Encode the order to prefetch the layers of `stages`, the first one first, in the form of `plan`."""
    layers = [
        join_pb2.PrefetchedLayers(
            layer_begin=stage.layer_begin,
            layer_end=stage.layer_end,
            has_embeddings=stage.role.has_embeddings,
            has_head=stage.role.has_head,
        )
        for stage in stages
    ]
    prefetch = join_pb2.PrefetchWeights(
        model=_encode_model(model),
        layers=layers,
        manifest=_encode_manifest(model, stages),
        sources=sources,
        dtype=DTYPE_TO_MESSAGE[plan.dtype],
        weights=WEIGHT_FORMAT_TO_MESSAGE[model.weight_format],
        has_long_rope=model.has_long_rope,
        implementation=IMPLEMENTATION_TO_MESSAGE[model.implementation],
        holds_stored=plan.holds_stored,
    )
    return join_pb2.JoinResponse(prefetch_weights=prefetch)


def encode_measure(
    worker: WorkerIdentity, others: Iterable[WorkerIdentity], *, round_trips_only: bool
) -> join_pb2.JoinResponse | None:
    """Encode the order to measure the ways to workers on other hosts; None if there are none."""
    peers = [
        join_pb2.LinkPeer(worker=other.name, address=other.address)
        for other in others
        if other.name != worker.name and not worker.hosts & other.hosts
    ]
    order = join_pb2.MeasureLinks(peers=peers, round_trips_only=round_trips_only)
    return join_pb2.JoinResponse(measure_links=order) if peers else None


def decode_links(message: join_pb2.MeasuredLinks) -> dict[str, Link]:
    """Measured links by the other worker's name, without those that could not be measured."""
    return {
        link.worker: Link(round_trip_s=link.round_trip_us / 1e6, bytes_per_s=float(link.bytes_per_second))
        for link in message.links
        if not link.problem
    }


def tensor_names(model: ServedModel, stages: Iterable[StagePlan]) -> list[str]:
    """Stored tensors of stages, each once."""
    found: dict[str, None] = {}
    for stage in stages:
        names = stage_tensor_names(
            model.config,
            stage.layer_begin,
            stage.layer_end,
            has_embeddings=stage.role.has_embeddings,
            has_head=stage.role.has_head,
        )
        found |= dict.fromkeys(names)
    return list(found)


def _encode_manifest(model: ServedModel, stages: Iterable[StagePlan]) -> list[join_pb2.TensorSha256]:
    if not model.manifest:
        return []
    return [
        join_pb2.TensorSha256(name=name, sha256=model.manifest[name]) for name in tensor_names(model, stages)
    ]


def _encode_model(model: ServedModel) -> join_pb2.ModelRef:
    reference = join_pb2.ModelRef(
        directory=model.directory_for_workers,
        fingerprint=model.fingerprint,
        hidden_size=model.config.boundary_width,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    if (pins := model.pins or model.shared) is not None:
        if pins.sampled_values is None:
            reference.source, reference.manifest_sha256 = pins.source, pins.manifest_sha256
        else:
            reference.sampled_values = pins.sampled_values
        for file in pins.files:
            reference.files.add(name=file.name, size_bytes=file.size_bytes, validator=file.validator)
    return reference


def encode_begin(
    action: BeginEpoch,
    *,
    incarnation: Incarnation,
    incoming_secret: bytes,
    outgoing_secret: bytes,
    hop_route: HopRoute,
) -> join_pb2.JoinResponse:
    """Encode `BeginEpoch` for the stage with these secrets."""
    stages = [
        join_pb2.StageEndpoint(
            worker=worker.name,
            incarnation=worker.incarnation,
            address=worker.address,
            layer_begin=stage.layer_begin,
            layer_end=stage.layer_end,
        )
        for worker, stage in zip(action.workers, action.plan.stages, strict=True)
    ]
    begin = join_pb2.BeginEpoch(
        plan_id=action.plan_id,
        epoch=action.epoch,
        coordinator_incarnation=incarnation,
        stages=stages,
        incoming_secret=incoming_secret,
        outgoing_secret=outgoing_secret,
        is_check=action.is_check,
        hidden_states_in_frames=hop_route is HopRoute.GRPC,
    )
    return join_pb2.JoinResponse(begin_epoch=begin)


def encode_welcome(
    incarnation: Incarnation,
    policy: RecoveryPolicy,
    model: ServedModel,
    *,
    reference_secret: bytes,
    rejoin_secret: bytes,
) -> join_pb2.JoinResponse:
    welcome = join_pb2.Welcome(
        coordinator_incarnation=incarnation,
        heartbeat_interval_ms=round(policy.heartbeat_interval_s * 1000),
        lease_ms=round(max(policy.lease_s, policy.loading_lease_s) * 1000),
        drain_timeout_ms=round(policy.drain_timeout_s * 1000),
        model=_encode_model(model),
        reference_secret=reference_secret,
        rejoin_secret=rejoin_secret,
    )
    return join_pb2.JoinResponse(welcome=welcome)


def encode_serving(epoch: int, *, is_serving: bool) -> join_pb2.JoinResponse:
    """Encode whether new requests are served in `epoch`."""
    return join_pb2.JoinResponse(serving=join_pb2.Serving(epoch=epoch, is_serving=is_serving))


def encode_hop_hello(
    action: BeginEpoch, *, incarnation: Incarnation, fingerprint: str
) -> forward_pb2.HopHello:
    """Encode the hello of the coordinator to FIRST."""
    return forward_pb2.HopHello(
        protocol_version=PROTOCOL_VERSION,
        coordinator_incarnation=incarnation,
        epoch=action.epoch,
        sender_stage=-1,
        sender_incarnation=incarnation,
        fingerprint=fingerprint,
        dtype=DTYPE_TO_MESSAGE[action.plan.dtype],
        layer_end=0,
        block_size=action.plan.block_size,
        num_blocks=action.plan.num_blocks,
        other_num_blocks=action.plan.other_num_blocks,
        num_states=action.plan.num_states,
        kv_dtype=number_of(action.plan.kv_dtype),
    )


def check_results_hello(
    hello: forward_pb2.HopHello, action: BeginEpoch, *, incarnation: Incarnation, fingerprint: str
) -> None:
    """Check the hello of LAST's result stream. Raises HandshakeMismatch with both values."""
    plan, last = action.plan, action.workers[-1]
    check_protocol_version(hello.protocol_version)
    for what, expected, got in (
        ("coordinator incarnation", incarnation.hex(), hello.coordinator_incarnation.hex()),
        ("epoch", action.epoch, hello.epoch),
        ("stage", len(plan.stages) - 1, hello.sender_stage),
        ("worker incarnation", last.incarnation.hex(), hello.sender_incarnation.hex()),
        ("fingerprint", fingerprint, hello.fingerprint),
        ("dtype", DTYPE_TO_MESSAGE[plan.dtype], hello.dtype),
        ("dtype of keys and values", kv_dtype_text(number_of(plan.kv_dtype)), kv_dtype_text(hello.kv_dtype)),
        ("number of layers", plan.num_layers, hello.layer_end),
        ("block size", plan.block_size, hello.block_size),
        ("number of blocks", plan.num_blocks, hello.num_blocks),
        ("numbers of windowed blocks", plan.other_num_blocks, tuple(hello.other_num_blocks)),
        ("number of states", plan.num_states, hello.num_states),
    ):
        if expected != got:
            raise HandshakeMismatch(what, expected=expected, got=got)
