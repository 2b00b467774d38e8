"""What a decoder computes, layer by layer: pure descriptions, equal by value, read from config.json.

Two layers with equal plans share kernels, sizes and costs; the layers of a model may differ. Numerics follow
transformers, see stage_worker/model/decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from checkpoint.block_indexer import BlockIndexer
from checkpoint.boundary import HIDDEN_STATES, BoundaryTensor
from checkpoint.compressed import Compressed, PageShape, has_entries
from checkpoint.dtypes import DType, WeightFormat
from checkpoint.multipliers import RowScale
from checkpoint.names import LLAMA_NAMES, NameTable
from checkpoint.ngrams import NgramEmbedding
from checkpoint.quantization import BlockTensors, Quantization
from checkpoint.recurrent import Mamba2, NoMixer, Pageless, Recurrent, StatePart
from checkpoint.rope_config import QueryGrowth, RopeConfig, RopeKind
from checkpoint.streams import GatedCollapse, GatedConnection, HyperConnection, WeightedCollapse


class Activation(Enum):
    """Function between the matrices of a feed-forward; the value is its name in config.json."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"
    """The square of max(x, 0). Source: So et al. 2021, arXiv:2109.08668."""


class NormKind(Enum):
    """Normalisation of rows in float32; they differ in where the weight enters and what is rounded."""

    RMS = "RMS, rounded, times the weight"
    RMS_WIDE = "RMS times the weight, rounded"
    RMS_OFFSET = "RMS times (1 + weight), rounded"
    LAYER = "mean 0 and variance 1, times the weight, rounded"
    LAYER_OFFSET = "mean 0 and variance 1, times (1 + weight), rounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation; `eps` is added to the mean square or variance, `has_bias` to the result."""

    kind: NormKind = NormKind.RMS
    eps: float
    has_bias: bool = False


class NormSpan(Enum):
    """Elements that a norm of queries or keys sees together."""

    HEAD = "head"
    EACH_HEAD = "head, with weights of its own"
    WIDTH = "all heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """Norms of queries and of keys; `is_after_rotation` instead of before it."""

    norm: Norm
    span: NormSpan = NormSpan.HEAD
    is_after_rotation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over paged keys and values. Widths are in elements.

    `head_dim` is independent of hidden size and number of heads. Without `rope`, positions do not enter.
    `window` is the number of positions, the query's own included, that a query sees; None for all. Scores
    are multiplied by `scale`, then limited to softcap * tanh(score / softcap). With `has_sinks`, each head
    has a learned score that takes part in the softmax and has no value.

    With `value_is_key`, values are projected like keys, by the same matrix, and lack the norm and the
    rotation of keys. With `value_norm_eps`, values are scaled to unit mean square per head; it is added to
    the mean square. With `has_output_gate`, the output is multiplied by the sigmoid of a gate as wide, which
    the query projection has, too. With `indexer`, queries attend to chosen blocks of tokens only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    scale: float
    window: int | None = None
    softcap: float | None = None
    qk_norm: QkNorm | None = None
    query_growth: QueryGrowth | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    has_sinks: bool = False
    value_is_key: bool = False
    value_norm_eps: float | None = None
    has_output_gate: bool = False
    indexer: BlockIndexer | None = None

    @property
    def q_size(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the query projection, which has gates beside the queries, head by head."""
        return 2 * self.q_size if self.has_output_gate else self.q_size

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_shape(self) -> PageShape:
        """A key and a value of each KV head."""
        return PageShape(2, self.num_kv_heads, self.head_dim)

    @property
    def index_width(self) -> int:
        """Elements of a token's key of the indexer, which the layer keeps beside `page_shape`."""
        return 0 if self.indexer is None else self.indexer.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Scores of the tokens that a query may attend to; the highest are chosen, see `Latent.top_k`.

    A token has a key of `head_dim` elements, projected from the layer's input and normalised by `norm`. A
    query has `num_heads` queries of the same width, projected from its latent. The first `Latent.rope_dim`
    elements of keys and queries, or the last ones if it `rotates_end`, are rotated by `Latent.rope`, with
    pairs side by side if `is_interleaved`. The score is the sum over the heads of max(0, query * key), each
    times a weight which is another projection of the layer's input.

    Source: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1 (lightning indexer); transformers'
    DeepseekV32Indexer, whose constant factors are left out: they do not change the order.
    """

    num_heads: int
    head_dim: int
    norm: Norm
    is_interleaved: bool = False
    rotates_end: bool = False

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    def rotated(self, rope_dim: int) -> slice:
        """The elements of a key or query that are rotated."""
        return slice(self.head_dim - rope_dim, None) if self.rotates_end else slice(rope_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are projections of one latent per token.

    A token has a normed latent of `kv_rank` elements, and a rotated key of `rope_dim` elements which all
    heads share; only these are kept. A head's key is a projection of the latent to `nope_dim` elements, then
    the shared key; its value is another projection, to `value_dim` elements. Queries have
    `nope_dim + rope_dim` elements, of which the last `rope_dim` are rotated; with `query_rank` they are
    projected through a normed latent of their own. `norm` normalises both latents. Scores are multiplied by
    `scale`. `has_bias`: the projections to latents, and the one of the output, have biases. `is_split`: files
    have a matrix [kv_rank, nope_dim] of each head for its keys and one [value_dim, kv_rank] for its values,
    and not all of them in one, [heads * (nope_dim + value_dim), kv_rank]. `has_sinks`: see `Attention`. With
    `has_output_gate`, the output is multiplied by the sigmoid of a projection of the layer's input.

    With `top_k`, a query attends to that many tokens only, if it may see more: those that `indexer` chooses
    or, without one, those that the last layer with one has chosen. An indexer needs `query_rank`.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig | None
    scale: float
    norm: Norm
    query_growth: QueryGrowth | None = None
    has_bias: bool = False
    is_split: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    top_k: int | None = None
    indexer: Indexer | None = None

    @property
    def query_dim(self) -> int:
        """Width of a query, and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.query_dim

    @property
    def o_size(self) -> int:
        """Width of the values of all heads."""
        return self.num_heads * self.value_dim

    @property
    def window(self) -> None:
        """There is no sliding window."""
        return None

    @property
    def softcap(self) -> None:
        """There is no limit of scores."""
        return None

    @property
    def page_shape(self) -> PageShape:
        """A latent and the shared key after it."""
        return PageShape(1, 1, self.kv_rank + self.rope_dim)

    @property
    def index_width(self) -> int:
        """Elements of a token's key of the indexer, which the layer keeps beside `page_shape`."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def needs_choice(self) -> bool:
        """Whether tokens are those that an earlier layer has chosen, so that no cut may lie between."""
        return self.top_k is not None and self.indexer is None


Mixer = Attention | Latent | Compressed | Recurrent | NoMixer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGlu:
    """(up + offset) * gate * sigmoid(alpha * gate), of gates up to `limit` and ups from -limit to limit.

    Source: gpt-oss, torch/model.py, swiglu; with `alpha` 1 and `offset` 0 transformers' HYV4Experts.
    """

    alpha: float
    limit: float
    offset: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """MLP: down(act(gate(x)) * up(x)), or down(act(up(x))) if not gated, with `width` elements between."""

    width: int
    activation: Activation | ClampedSwiGlu = Activation.SILU
    is_gated: bool = True
    has_bias: bool = False


class RouterScore(Enum):
    """How logits of experts become scores, from 0 on."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "square root of softplus"


class GroupScore(Enum):
    """Score of a group of experts."""

    BEST_TWO = "sum of the two best experts"
    BEST = "the best expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Choice of the experts of each token, and their weights.

    Experts with the highest scores are chosen; with `has_choice_bias`, the experts with the highest sums
    of score and bias. If there are `num_groups` groups, only experts of the `num_kept_groups` best groups are
    chosen, by `group_score`. Weights are the scores of the chosen experts: divided by their sum if
    `is_normalised`, then times `scaling`, and with `has_expert_scale` times a learned number for each expert.
    Logits are computed in float32 if `is_wide`. With `num_hashed_tokens`, a table has the experts of
    each of as many tokens, a vocabulary's, instead; their scores are their weights as before.
    """

    score: RouterScore = RouterScore.SOFTMAX
    is_normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: GroupScore = GroupScore.BEST_TWO
    has_choice_bias: bool = False
    has_expert_scale: bool = False
    is_wide: bool = False
    has_bias: bool = False
    num_hashed_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of `count` MLPs; each token is computed by the `per_token` that `router` chooses.

    `width` is the number of elements between the matrices of one expert; `is_gated`: see `Dense`. `shared` is
    an MLP of all tokens, which `has_shared_gate` multiplies by the sigmoid of a projection to one element.

    With `branch_norm`, `shared` and the mixture are branches that both read the residual: each output has
    such a norm, and so has the mixture's input; the input of `shared` has the feed-forward's norm. The
    router's input has a norm of `NormKind.RMS` with the same epsilon, and is divided by the square root of
    hidden_size.

    With `latent_width`, experts compute on a projection of their input to this width, and another projects
    their weighted sum back; router and `shared` see the input itself.
    """

    count: int
    per_token: int
    width: int
    router: Router
    activation: Activation | ClampedSwiGlu = Activation.SILU
    is_gated: bool = True
    has_bias: bool = False
    shared: Dense | None = None
    has_shared_gate: bool = False
    branch_norm: Norm | None = None
    latent_width: int | None = None


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """A layer that has a mixer alone."""


FeedForwardPlan = Dense | Experts | NoFeedForward
"""What native code computes after a mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A whole layer of a family without a row, which transformers computes.

    `tensors` are the names within the layer and the shapes of its tensors in files. `inner_elements` are
    those of one token that are in memory at once. Of the plan that has it, only `mixer` counts beside: its
    page shape and its window.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    inner_elements: int


class Placement(Enum):
    """Norms of a layer around its mixer and its feed-forward."""

    BEFORE = "before mixer and feed-forward"
    AFTER = "after mixer and feed-forward"
    AROUND = "before and after mixer and feed-forward"
    SHARED = "one before mixer and feed-forward, which run in parallel"
    NONE = "within the connections to residual streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer: `mixer`, then `feed_forward`, or one of them; each is added to its input after
    `residual_scale`. `beside`, if any, reads the input of `mixer`, and their outputs are added.

    `row_scales` are factors of rows of its matrices. `weights` is their format in memory, None for the run
    dtype. With `has_scale`, the layer's output is multiplied by a number among its weights. With
    `connection`, there are several residual streams: mixer and feed-forward each have a connection of this
    kind instead of a residual, with norms before them only, and nothing is `beside` the mixer. `ngrams` come
    before the mixer, which is recurrent.
    """

    mixer: Mixer
    beside: Mamba2 | None = None
    feed_forward: FeedForwardPlan | Opaque
    norm: Norm
    row_scales: tuple[RowScale, ...] = ()
    placement: Placement = Placement.BEFORE
    residual_scale: float = 1.0
    has_scale: bool = False
    weights: WeightFormat | None = None
    connection: HyperConnection | GatedConnection | None = None
    ngrams: NgramEmbedding | None = None

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer with a state: its own, or the one beside it; None without one."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.beside

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence beside pages: the state of its mixer, then the state of `ngrams`."""
        of_mixer = () if self.recurrent is None else self.recurrent.state_parts
        return of_mixer if self.ngrams is None else (*of_mixer, *self.ngrams.state_parts)

    @property
    def num_streams(self) -> int:
        """Residual streams that it reads and writes."""
        return 1 if self.connection is None else self.connection.num_streams

    @property
    def is_hashed(self) -> bool:
        """Whether the tokens themselves choose experts."""
        inner = self.feed_forward
        return isinstance(inner, Experts) and inner.router.num_hashed_tokens is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether it reads the ids of tokens, and not their hidden states alone."""
        return self.is_hashed or self.ngrams is not None

    @property
    def known_feed_forward(self) -> FeedForwardPlan:
        """The feed-forward of a layer that native code computes."""
        assert not isinstance(self.feed_forward, Opaque), "a layer that only transformers knows"
        return self.feed_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterTensors:
    """Names and shapes of the tensors outside the layers of a family without a row.

    `in_layer` is the prefix of layer number `{layer}`. `before` are needed with the embeddings, `after` with
    the head; a tied matrix is in both.
    """

    in_layer: str
    before: tuple[tuple[str, tuple[int, ...]], ...]
    after: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A whole decoder. Lengths are in tokens.

    `model_type` is the family's name in config.json. `dtype` is the checkpoint's dtype, the default run
    dtype. Embeddings are multiplied by `embedding_scale`, rounded to the run dtype; logits by `logit_scale`,
    then limited to logit_softcap * tanh(logit / logit_softcap). A stage of a pipeline begins with layer 0 or
    with one of `legal_cuts`, which are layers above 0. Files may have `num_draft_layers` more layers, for
    speculation, which are not read. `quantization` is the format of matrices in files, None if they are
    plain; with `holds_stored`, those that `held_plans` names stay in it in memory. `handed_on` crosses every
    cut beside the hidden states. `outer` replaces `names` in a family without a row, all of whose layers are
    `Opaque`. `collapse` ends the streams of layers with a `LayerPlan.connection`, which all layers have then.
    `scaled_length`: see `rope_config.scaled_length`.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerPlan, ...]
    final_norm: Norm | None
    tie_word_embeddings: bool
    dtype: DType
    legal_cuts: frozenset[int]
    num_draft_layers: int = 0
    quantization: Quantization | BlockTensors | None = None
    names: NameTable = LLAMA_NAMES
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    handed_on: tuple[BoundaryTensor, ...] = ()
    outer: OuterTensors | None = None
    holds_stored: bool = False
    collapse: WeightedCollapse | GatedCollapse | None = None
    scaled_length: int = 0

    def __post_init__(self) -> None:
        if any(layer.num_streams != self.num_streams for layer in self.kinds):
            raise ValueError(f"layers of other residual streams than {self.num_streams}")
        if wrong := sorted(self.legal_cuts - set(range(1, self.num_layers))):
            raise ValueError(f"a stage cannot begin with layer {wrong[0]} of {self.num_layers}")
        names = [tensor.name for tensor in self.boundary]
        if len(set(names)) < len(names):
            raise ValueError(f"tensors of one name cross a cut: {', '.join(names)}")

    @property
    def boundary(self) -> tuple[BoundaryTensor, ...]:
        """What crosses a cut, in the order of a frame; the same at every cut.

        Residual streams are one tensor: every layer reads all of them, one copy and one check move them, and
        a stage takes and leaves them in the form that its layers have.
        """
        return (BoundaryTensor(name=HIDDEN_STATES, width=self.residual_width), *self.handed_on)

    @property
    def longest_sequence(self) -> int:
        """Limit of --max-model-len in tokens; max_position_embeddings is its default."""
        return max(self.max_position_embeddings, self.scaled_length)

    @property
    def num_streams(self) -> int:
        """Residual streams of a token, one in most models."""
        return 1 if self.collapse is None else self.collapse.num_streams

    @property
    def residual_width(self) -> int:
        """Elements of a token between two layers: all its residual streams."""
        return self.num_streams * self.hidden_size

    @property
    def boundary_width(self) -> int:
        """Elements per token that cross a cut."""
        return sum(tensor.width for tensor in self.boundary)

    def boundary_bytes(self, dtype: DType) -> int:
        """Bytes per token that cross a cut uncompressed, with the run dtype `dtype`."""
        return sum(tensor.width * (tensor.dtype or dtype).size_bytes for tensor in self.boundary)

    @property
    def has_row(self) -> bool:
        """Whether the family has a row of its own, so that native code can compute it."""
        return self.outer is None

    @property
    def num_layers(self) -> int:
        """Number of layers, at least one."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerPlan, ...]:
        """The distinct layers, in order of their first use."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def weight_format(self) -> WeightFormat | None:
        """`LayerPlan.weights`, which is the same for all layers."""
        return self.layers[0].weights

    def with_weights(self, weights: WeightFormat | None) -> Blueprint:
        """This decoder with matrices in another format in memory."""
        layers = {kind: replace(kind, weights=weights) for kind in self.kinds}
        return replace(self, layers=tuple(layers[layer] for layer in self.layers))

    def with_stored(self, *, holds_stored: bool) -> Blueprint:
        """This decoder with matrices as they are stored, where a GPU multiplies by them, or unpacked."""
        return replace(self, holds_stored=holds_stored)

    @property
    def has_long_rope(self) -> bool:
        """Whether layers have `RopeConfig.is_long`."""
        return any(rope.is_long for rope in self._ropes)

    def for_length(self, max_tokens: int) -> Blueprint:
        """This decoder for sequences of at most `max_tokens`, which decide on `RopeConfig.is_long`."""
        ropes = [rope for rope in self._ropes if rope.kind is RopeKind.LONGROPE]
        is_long = any(max_tokens > rope.original_max_position_embeddings for rope in ropes)
        return self.with_long_rope(is_long=is_long)

    def with_long_rope(self, *, is_long: bool) -> Blueprint:
        """This decoder with the long factors of LONGROPE, or with the short ones."""
        layers = {kind: _with_long_rope(kind, is_long=is_long) for kind in self.kinds}
        return replace(self, layers=tuple(layers[layer] for layer in self.layers))

    @property
    def _ropes(self) -> tuple[RopeConfig, ...]:
        ropes = (layer.mixer.rope for layer in self.kinds)
        return tuple(rope for rope in ropes if rope is not None)

    def page_shape(self, window: int | None) -> PageShape:
        """What the layers with `window`, which share blocks, keep of a token.

        Raises ValueError for layers of several shapes, or none.
        """
        shapes = {
            layer.mixer.page_shape
            for layer in self.kinds
            if layer.mixer.window == window and not isinstance(layer.mixer, Pageless)
        }
        if len(shapes) != 1:
            sizes = sorted((shape.heads, shape.width) for shape in shapes)
            found = " and ".join(f"{heads} heads of {width}" for heads, width in sizes) or "no shape"
            raise ValueError(f"layers with window {window} have keys of {found}, need one shape")
        return shapes.pop()

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has recurrent states."""
        return any(layer.recurrent is not None for layer in self.kinds)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, see `Attention`."""
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """Windows of all that layers keep: theirs, and None for the entries of compressors, which stay."""
        return self.layer_windows + ((None,) if any(has_entries(kind.mixer) for kind in self.kinds) else ())


def _with_long_rope(layer: LayerPlan, *, is_long: bool) -> LayerPlan:
    mixer = layer.mixer
    if isinstance(mixer, Pageless) or mixer.rope is None or mixer.rope.kind is not RopeKind.LONGROPE:
        return layer
    rope = mixer.rope
    return replace(layer, mixer=replace(mixer, rope=replace(rope, is_long=is_long)))
