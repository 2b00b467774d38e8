"""Epochs, and the hello that both ends of a hop compare before the first frame."""

from dataclasses import dataclass, field

from certificates.identity import Role
from stage_worker.assignment import Assignment
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.channels import PROTOCOL_VERSION
from wire.errors import HandshakeMismatch, StaleStream
from wire.ids import Incarnation, id_text
from wire.tensors import (
    CHOICES,
    DTYPE_FROM_MESSAGE,
    DTYPE_TO_MESSAGE,
    WIRE_DTYPE_FROM_MESSAGE,
    WireDType,
    can_carry,
    kv_dtype_text,
    number_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One stage of the epoch: its process and its address."""

    worker: str
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One activation of a plan: number, coordinator, stages in order, and secrets of the adjacent hops.

    With `hidden_states_in_frames` a stage neither offers nor takes another way, whatever its flags allow.
    """

    plan_id: int
    number: int
    coordinator_incarnation: Incarnation
    peers: tuple[Peer, ...]
    is_check: bool = False
    hidden_states_in_frames: bool = False
    incoming_secret: bytes = field(default=b"", repr=False)
    outgoing_secret: bytes = field(default=b"", repr=False)

    def stage_of(self, incarnation: Incarnation) -> int:
        """Stage of the process with this incarnation, 0 if it has none."""
        incarnations = [peer.incarnation for peer in self.peers]
        return incarnations.index(incarnation) if incarnation in incarnations else 0

    def sender_to(self, stage: int) -> tuple[Role, str]:
        """Role and name of the process that sends to `stage`; a coordinator has no name here."""
        return (Role.COORDINATOR, "") if stage == 0 else (Role.WORKER, self.peers[stage - 1].worker)

    def predecessor(self, stage: int) -> Incarnation:
        """The process that sends to `stage`; the coordinator for the first stage."""
        return self.coordinator_incarnation if stage == 0 else self.peers[stage - 1].incarnation


def decode_epoch(message: join_pb2.BeginEpoch) -> Epoch:
    return Epoch(
        plan_id=message.plan_id,
        number=message.epoch,
        coordinator_incarnation=Incarnation(message.coordinator_incarnation),
        peers=tuple(
            Peer(worker=stage.worker, incarnation=Incarnation(stage.incarnation), address=stage.address)
            for stage in message.stages
        ),
        incoming_secret=message.incoming_secret,
        outgoing_secret=message.outgoing_secret,
        is_check=message.is_check,
        hidden_states_in_frames=message.hidden_states_in_frames,
    )


def epoch_problem(
    epoch: Epoch, assignment: Assignment | None, *, incarnation: Incarnation, last_epoch: int
) -> str | None:
    """Return why a worker with this stage loaded cannot take part in `epoch`, or None."""
    if assignment is None or assignment.plan_id != epoch.plan_id:
        present = "none" if assignment is None else assignment.plan_id
        return f"epoch {epoch.number} is of plan {epoch.plan_id}, loaded is {present}"
    if epoch.number <= last_epoch:
        return f"epoch {epoch.number} begins after epoch {last_epoch}"
    if len(epoch.peers) != assignment.num_stages:
        return f"epoch {epoch.number} has {len(epoch.peers)} stages, the plan {assignment.num_stages}"
    if epoch.peers[assignment.stage].incarnation != incarnation:
        return f"epoch {epoch.number} has another process as stage {assignment.stage}"
    return None


def hop_hello(epoch: Epoch, assignment: Assignment, incarnation: Incarnation) -> forward_pb2.HopHello:
    """The hello that this stage sends to the next one."""
    return forward_pb2.HopHello(
        protocol_version=PROTOCOL_VERSION,
        coordinator_incarnation=epoch.coordinator_incarnation,
        epoch=epoch.number,
        sender_stage=assignment.stage,
        sender_incarnation=incarnation,
        fingerprint=assignment.fingerprint,
        dtype=DTYPE_TO_MESSAGE[assignment.dtype],
        layer_end=assignment.layer_end,
        block_size=assignment.block_size,
        num_blocks=assignment.num_blocks,
        other_num_blocks=assignment.other_num_blocks,
        num_states=assignment.num_states,
        wire_dtype=number_of(None if assignment.role.has_head else assignment.wire_dtype),
        kv_dtype=number_of(assignment.kv_dtype),
        secret=epoch.outgoing_secret,
    )


def check_hop(hello: forward_pb2.HopHello, epoch: Epoch, assignment: Assignment) -> None:
    """Compare `hello`, whose secret was checked, with this stage.

    Raises StaleStream unless it is from the current predecessor, HandshakeMismatch for a differing field.
    """
    if hello.epoch != epoch.number:
        raise StaleStream(f"stream of epoch {hello.epoch}, the current epoch is {epoch.number}")
    _check_identity("coordinator incarnation", epoch.coordinator_incarnation, hello.coordinator_incarnation)
    if hello.sender_stage != assignment.stage - 1:
        raise StaleStream(
            f"stream from stage {hello.sender_stage}, the predecessor of stage {assignment.stage} "
            f"is stage {assignment.stage - 1}"
        )
    _check_identity(
        f"incarnation of stage {hello.sender_stage}",
        epoch.predecessor(assignment.stage),
        hello.sender_incarnation,
    )
    for what, expected, got in (
        ("model fingerprint", assignment.fingerprint, hello.fingerprint),
        ("dtype", assignment.dtype.value, _dtype_text(hello.dtype)),
        (
            "dtype of keys and values",
            kv_dtype_text(number_of(assignment.kv_dtype)),
            kv_dtype_text(hello.kv_dtype),
        ),
        ("layer range", f"begin {assignment.layer_begin}", f"begin {hello.layer_end}"),
        ("block size", assignment.block_size, hello.block_size),
        ("number of blocks", assignment.num_blocks, hello.num_blocks),
        ("numbers of windowed blocks", assignment.other_num_blocks, tuple(hello.other_num_blocks)),
        ("number of states", assignment.num_states, hello.num_states),
    ):
        if expected != got:
            raise HandshakeMismatch(what, expected=expected, got=got)
    declared_dtype(hello, assignment)


def declared_dtype(hello: forward_pb2.HopHello, assignment: Assignment) -> WireDType:
    """The dtype of the stream's hidden states. Raises HandshakeMismatch for an unsupported one."""
    if hello.wire_dtype == cluster_pb2.DTYPE_UNSPECIFIED:
        return assignment.dtype
    wire_dtype = WIRE_DTYPE_FROM_MESSAGE.get(hello.wire_dtype)
    if wire_dtype is None or not can_carry(wire_dtype, assignment.dtype):
        possible = [
            assignment.dtype,
            *(dtype for dtype in CHOICES.values() if can_carry(dtype, assignment.dtype)),
        ]
        raise HandshakeMismatch(
            "wire dtype",
            expected=" or ".join(dict.fromkeys(dtype.value for dtype in possible)),
            got=f"number {hello.wire_dtype}" if wire_dtype is None else wire_dtype.value,
        )
    return wire_dtype


def _check_identity(what: str, expected: bytes, got: bytes) -> None:
    if expected != got:
        raise StaleStream(f"stream with {what} {id_text(got)}, the current one is {id_text(expected)}")


def _dtype_text(number: int) -> str:
    dtype = DTYPE_FROM_MESSAGE.get(number)
    return f"number {number}" if dtype is None else dtype.value
