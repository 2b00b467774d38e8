"""Decodes and validates the coordinator's assignments and reference requests."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from checkpoint import BoundaryTensor, DType, ScaledDType, WeightFormat
from checkpoint.implementation import Implementation
from checkpoint.pins import PinnedFile, Pins
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2
from weights.peers import PeerAddress
from wire.addresses import Address, parse_peer_address
from wire.errors import HandshakeMismatch, InvalidRequest
from wire.ids import StageRole
from wire.peer_secrets import RefusedPeers, is_secret
from wire.reference import Text
from wire.staging import StagingSizes
from wire.tensors import (
    DTYPE_FROM_MESSAGE,
    IMPLEMENTATION_FROM_MESSAGE,
    KV_DTYPE_FROM_MESSAGE,
    WEIGHT_FORMAT_FROM_MESSAGE,
    WIRE_DTYPE_FROM_MESSAGE,
    WireDType,
    can_carry,
    check_can_carry,
)

MAX_TOKENS = 1024
"""Limit over all texts of a request."""
MAX_TOP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """Texts to compute reference outputs for.

    `directory` is the coordinator's path ("" for the built-in model), `num_top` the number of most likely
    tokens reported per row, `wire_dtype` the dtype of hidden states between stages, `weights` the format of
    the matrices of layers, `kv_dtype` the dtype of keys and values (None: `dtype`). `has_long_rope`: see
    `RopeConfig.is_long`.
    """

    directory: str
    fingerprint: str
    dtype: DType
    texts: tuple[Text, ...]
    num_top: int
    wire_dtype: WireDType
    weights: WeightFormat | None = None
    kv_dtype: ScaledDType | None = None
    has_long_rope: bool = False

    def __post_init__(self) -> None:
        num_tokens = sum(map(len, self.texts))
        if not 1 <= num_tokens <= MAX_TOKENS or not all(self.texts):
            lengths = [len(text) for text in self.texts]
            raise InvalidRequest(f"texts of {lengths} tokens, must be 1 to {MAX_TOKENS} in all")
        if not 1 <= self.num_top <= MAX_TOP:
            raise InvalidRequest(f"num_top is {self.num_top}, must be in [1, {MAX_TOP}]")


def decode_request(message: forward_pb2.ComputeReferenceRequest, directory: str) -> ReferenceRequest:
    """Decode a request for the checkpoint in `directory`. Raises InvalidRequest."""
    dtype = DTYPE_FROM_MESSAGE.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"dtype number {message.dtype} is not known")
    wire_dtype = WIRE_DTYPE_FROM_MESSAGE.get(message.wire_dtype or message.dtype)
    if wire_dtype is None or not can_carry(wire_dtype, dtype):
        raise InvalidRequest(f"wire dtype number {message.wire_dtype} is not one for {dtype.value}")
    if message.weights not in WEIGHT_FORMAT_FROM_MESSAGE:
        raise InvalidRequest(f"weight format number {message.weights} is not known")
    if message.kv_dtype not in KV_DTYPE_FROM_MESSAGE:
        raise InvalidRequest(f"number {message.kv_dtype} is not a dtype of keys and values")
    return ReferenceRequest(
        directory=directory,
        fingerprint=message.fingerprint,
        dtype=dtype,
        texts=tuple(tuple(text.tokens) for text in message.texts),
        num_top=message.num_top,
        wire_dtype=wire_dtype,
        weights=WEIGHT_FORMAT_FROM_MESSAGE[message.weights],
        kv_dtype=KV_DTYPE_FROM_MESSAGE[message.kv_dtype],
        has_long_rope=message.has_long_rope,
    )


class ReferenceAccess:
    """Access to references, as granted by the coordinator's last Welcome; denied before the first one."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._model = join_pb2.ModelRef()
        self._secret = b""

    def grant(self, welcome: join_pb2.Welcome) -> None:
        """Grant access to the joined coordinator, for the model that it serves."""
        self._model, self._secret = welcome.model, welcome.reference_secret

    @property
    def directory(self) -> str:
        """The directory as in ModelRef."""
        return self._model.directory

    def check(self, secret: bytes, *, fingerprint: str, host: str) -> str:
        """Return the directory as in ModelRef. Raises SecretMismatch, or HandshakeMismatch for another
        checkpoint.
        """
        if not is_secret(secret, self._secret):
            raise self._refused.secret_mismatch("ComputeReference", "reference secret", host=host)
        if self._model.source:
            raise InvalidRequest("a worker has only its layers of a remote model, no reference")
        if fingerprint != self._model.fingerprint:
            raise HandshakeMismatch("fingerprint", expected=self._model.fingerprint, got=fingerprint)
        return self._model.directory


_ROLES: dict[int, StageRole] = {
    cluster_pb2.STAGE_ROLE_FIRST: StageRole.FIRST,
    cluster_pb2.STAGE_ROLE_MIDDLE: StageRole.MIDDLE,
    cluster_pb2.STAGE_ROLE_LAST: StageRole.LAST,
    cluster_pb2.STAGE_ROLE_ONLY: StageRole.ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Facts about the model that the coordinator decides or that mock stages need.

    Sizes are for mock stages, 0 if unknown; real ones read their own files. `eos_token_ids` end a sequence:
    the tokenizer of the coordinator has one, and workers load no tokenizer.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where weights are besides their source: peers, weights of other coordinators, and of this one."""

    peers: tuple[PeerAddress, ...] = ()
    trackers: tuple[str, ...] = ()
    coordinator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """A model whose weights are fetched; `manifest` has the SHA-256 of the wanted tensors, if known."""

    pins: Pins
    fingerprint: str
    manifest: Mapping[str, bytes]
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchedLayers:
    """Layers [layer_begin, layer_end) of a stage, and what comes before and after them."""

    layer_begin: int
    layer_end: int
    has_embeddings: bool
    has_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Layers that a worker may have to load later, the most needed ones first, and their form in memory.

    `model` is None for one that is in `model_directory` of this host only; other fields as in `Assignment`.
    """

    model: WantedModel | None
    layers: tuple[PrefetchedLayers, ...]
    fingerprint: str
    dtype: DType
    model_directory: str = ""
    weights: WeightFormat | None = None
    has_long_rope: bool = False
    implementation: Implementation = Implementation.NATIVE
    holds_stored: bool = False

    @property
    def has_head(self) -> bool:
        """Whether a stage with the output head is among them."""
        return any(part.has_head for part in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One stage of a plan: layers [layer_begin, layer_end), KV capacity, and the upper bounds of a step.

    `num_blocks` are the KV blocks of the first block group, `other_num_blocks` of the others.
    `wire_dtype` is the dtype of sent hidden states (None: the computed one). `force_reload` forbids reuse of
    parts in memory. `weights` is the format of the matrices of layers, `kv_dtype` the dtype of keys and
    values in the cache (None: `dtype`). `has_long_rope`: see `RopeConfig.is_long`. `pins` are those of a
    remote model, whose `model_directory` is empty, or of the coordinator's directory; `manifest` has the
    SHA-256 of the stage's tensors, if they are known. `implementation` computes the layers. The plan counts
    `activation_bytes` for the largest step. `holds_stored`: see `Blueprint.with_stored`.
    `num_states` are the slots for recurrent states, 0 for models without recurrent layers.
    """

    plan_id: int
    stage: int
    num_stages: int
    role: StageRole
    layer_begin: int
    layer_end: int
    model_directory: str
    fingerprint: str
    dtype: DType
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    model_shape: ModelShape = field(default_factory=ModelShape)
    wire_dtype: WireDType | None = None
    force_reload: bool = False
    weights: WeightFormat | None = None
    has_long_rope: bool = False
    other_num_blocks: tuple[int, ...] = ()
    kv_dtype: ScaledDType | None = None
    pins: Pins | None = None
    manifest: Mapping[str, bytes] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)
    implementation: Implementation = Implementation.NATIVE
    activation_bytes: int = 0
    holds_stored: bool = False
    num_states: int = 0

    def __post_init__(self) -> None:
        expected = StageRole.of_stage(self.stage, self.num_stages)
        if self.role is not expected:
            raise ValueError(
                f"stage {self.stage} of {self.num_stages} is {expected.value}, assigned as {self.role.value}"
            )
        if self.wire_dtype is not None:
            check_can_carry(self.wire_dtype, self.dtype)
        if not 0 <= self.layer_begin < self.layer_end:
            raise ValueError(f"layers [{self.layer_begin}, {self.layer_end}) are not a range of layers")
        for name in (
            "block_size",
            "num_blocks",
            "max_step_tokens",
            "max_step_sequences",
            "max_sequence_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if min(self.other_num_blocks, default=1) < 1:
            raise ValueError(f"other_num_blocks are {self.other_num_blocks}, but must be at least 1")

    @property
    def group_blocks(self) -> tuple[int, ...]:
        """KV blocks of each block group."""
        return (self.num_blocks, *self.other_num_blocks)

    def staging_sizes(self, boundary: Sequence[BoundaryTensor]) -> StagingSizes:
        """Staging memory of a GPU for the steps of this stage."""
        return StagingSizes.of(
            max_step_tokens=self.max_step_tokens,
            max_step_sequences=self.max_step_sequences,
            max_sequence_tokens=self.max_sequence_tokens,
            block_size=self.block_size,
            num_groups=len(self.group_blocks),
            has_head=self.role.has_head,
            boundary=boundary,
            dtypes=(self.dtype, self.sent_dtype),
        )

    @property
    def sent_dtype(self) -> WireDType:
        """Dtype of the hidden states that this stage sends."""
        return self.wire_dtype or self.dtype

    @property
    def wanted_model(self) -> WantedModel | None:
        """The model to fetch; None for one that is in a directory of this host only."""
        if self.pins is None:
            return None
        return WantedModel(
            pins=self.pins, fingerprint=self.fingerprint, manifest=self.manifest, sources=self.sources
        )

    def loads_like(self, other: "Assignment") -> bool:
        """Whether a stage loaded for `other` serves this assignment unchanged."""
        return self._without_place() == other._without_place()

    def _without_place(self) -> "Assignment":
        """This assignment without the fields that do not affect loading."""
        num_stages = 1 if self.role is StageRole.ONLY else 3
        stage = {StageRole.FIRST: 0, StageRole.ONLY: 0, StageRole.MIDDLE: 1, StageRole.LAST: 2}[self.role]
        return replace(
            self,
            plan_id=0,
            stage=stage,
            num_stages=num_stages,
            model_directory="",
            force_reload=False,
            sources=Sources(),
            activation_bytes=0,
        )


def decode_assignment(
    message: join_pb2.AssignStage, *, wire_dtype: WireDType | None = None, coordinator: str = ""
) -> Assignment:
    """Decode an assignment of the coordinator at HOST:PORT. Raises ValueError.

    `wire_dtype` overrides the coordinator's.
    """
    return Assignment(
        plan_id=message.plan_id,
        stage=message.stage,
        num_stages=message.num_stages,
        role=_assigned_role(message.role),
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
        model_directory=message.model.directory,
        fingerprint=message.model.fingerprint,
        dtype=_assigned_dtype(message.dtype),
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        other_num_blocks=tuple(message.other_num_blocks),
        num_states=message.num_states,
        max_step_tokens=message.max_step_tokens,
        max_step_sequences=message.max_step_sequences,
        max_sequence_tokens=message.max_sequence_tokens,
        model_shape=_shape(message.model),
        wire_dtype=wire_dtype or _assigned_wire_dtype(message.wire_dtype),
        force_reload=message.force_reload,
        weights=_assigned_weights(message.weights),
        kv_dtype=_assigned_kv_dtype(message.kv_dtype),
        has_long_rope=message.has_long_rope,
        pins=_pins(message.model),
        manifest=_manifest(message.manifest),
        sources=_sources(message.sources, coordinator),
        implementation=_assigned_implementation(message.implementation),
        activation_bytes=message.activation_bytes,
        holds_stored=message.holds_stored,
    )


def decode_prefetch(message: join_pb2.PrefetchWeights, *, coordinator: str) -> Prefetch | None:
    """Decode an order of the coordinator at HOST:PORT; None for one without layers. Raises ValueError."""
    if not message.layers:
        return None
    if (dtype := DTYPE_FROM_MESSAGE.get(message.dtype)) is None:
        raise ValueError(f"dtype number {message.dtype} is not known")
    model = None
    if (pins := _pins(message.model)) is not None:
        model = WantedModel(
            pins=pins,
            fingerprint=message.model.fingerprint,
            manifest=_manifest(message.manifest),
            sources=_sources(message.sources, coordinator),
        )
    return Prefetch(
        model=model,
        fingerprint=message.model.fingerprint,
        dtype=dtype,
        model_directory=message.model.directory,
        weights=_assigned_weights(message.weights),
        has_long_rope=message.has_long_rope,
        implementation=_assigned_implementation(message.implementation),
        holds_stored=message.holds_stored,
        layers=tuple(
            PrefetchedLayers(
                layer_begin=layers.layer_begin,
                layer_end=layers.layer_end,
                has_embeddings=layers.has_embeddings,
                has_head=layers.has_head,
            )
            for layers in message.layers
        ),
    )


def _shape(model: join_pb2.ModelRef) -> ModelShape:
    return ModelShape(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
    )


def _manifest(tensors: Iterable[join_pb2.TensorSha256]) -> dict[str, bytes]:
    return {tensor.name: tensor.sha256 for tensor in tensors}


def _sources(message: join_pb2.WeightSources, coordinator: str) -> Sources:
    """Raises ValueError for an address that is none."""
    own = message.coordinator
    if own.startswith(":") and coordinator:
        own = str(Address(parse_peer_address(coordinator).host, int(own[1:])))
    return Sources(
        peers=tuple(
            PeerAddress(
                name=peer.worker,
                address=str(parse_peer_address(peer.address)),
                units=None if peer.is_complete else frozenset(peer.units),
            )
            for peer in message.peers
        ),
        trackers=tuple(str(parse_peer_address(address)) for address in message.trackers),
        coordinator=own,
    )


def _pins(model: join_pb2.ModelRef) -> Pins | None:
    """None for a model that this worker cannot fetch."""
    if not model.files:
        return None
    files = tuple(
        PinnedFile(name=file.name, size_bytes=file.size_bytes, validator=file.validator)
        for file in model.files
    )
    if not model.source:
        return Pins(source=model.directory, files=files, sampled_values=model.sampled_values)
    return Pins(source=model.source, files=files, manifest_sha256=model.manifest_sha256)


def _assigned_role(number: int) -> StageRole:
    role = _ROLES.get(number)
    if role is None:
        raise ValueError(f"role number {number} is not known")
    return role


def _assigned_wire_dtype(number: int) -> WireDType | None:
    if number == cluster_pb2.DTYPE_UNSPECIFIED:
        return None
    wire_dtype = WIRE_DTYPE_FROM_MESSAGE.get(number)
    if wire_dtype is None:
        raise ValueError(f"wire dtype number {number} is not known")
    return wire_dtype


def _assigned_dtype(number: int) -> DType:
    if (dtype := DTYPE_FROM_MESSAGE.get(number)) is None:
        raise ValueError(f"dtype number {number} is not known")
    return dtype


def _assigned_weights(number: int) -> WeightFormat | None:
    if number not in WEIGHT_FORMAT_FROM_MESSAGE:
        raise ValueError(f"weight format number {number} is not known")
    return WEIGHT_FORMAT_FROM_MESSAGE[number]


def _assigned_implementation(number: int) -> Implementation:
    if number not in IMPLEMENTATION_FROM_MESSAGE:
        raise ValueError(f"implementation number {number} is not known")
    return IMPLEMENTATION_FROM_MESSAGE[number]


def _assigned_kv_dtype(number: int) -> ScaledDType | None:
    if number not in KV_DTYPE_FROM_MESSAGE:
        raise ValueError(f"number {number} is not a dtype of keys and values")
    return KV_DTYPE_FROM_MESSAGE[number]


def wants(message: join_pb2.AssignStage, loading: Assignment, *, wire_dtype: WireDType | None = None) -> bool:
    """Whether `message` assigns `loading` with the worker's `wire_dtype`; true if undecodable."""
    try:
        return decode_assignment(message, wire_dtype=wire_dtype).loads_like(loading)
    except ValueError:
        return True
