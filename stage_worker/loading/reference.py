"""Reference outputs for self-checks, computed from checkpoint files row by row.

An independent implementation: it shares only the rotary frequencies with the stages, and holds
`BLOCK_ELEMENTS` weights in memory at a time, whatever the model's size. It computes in float32 on the CPU,
so that it is valid for every device, takes no GPU memory, and is unaffected by faults of a device or its
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from checkpoint import Checkpoint, CheckpointError, DType
from checkpoint.tensors import EMBEDDINGS, FINAL_NORM, OUTPUT_HEAD, layer_tensor_name
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends.backend import LoadProgress, StageLoadError
from stage_worker.backends.tensor_views import as_array, from_wire, project, to_wire
from stage_worker.loading.stage_loader import fingerprint_mismatch
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.rope import Rope
from stage_worker.model.weights import load_rows
from stage_worker.sampling.logits_processors import non_finite_rows
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import LayerReference, Reference, TextReference
from wire.steps import TokenLogprobs
from wire.tensors import WireDType


class NonFiniteReference(ValueError):
    def __init__(self, text: int, position: int) -> None:
        super().__init__(f"logits for position {position} of text {text} are not finite")
        self.text, self.position = text, position


class HeadSummary:
    """Log-probabilities of the most likely tokens and of the following tokens, from blocks of logits.

    Each block is [2, n, m], exact and rounded logits of m tokens, for the n tokens of all texts. Sums are
    float64.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        # No token follows a text's last one.
        following = [token for text in texts for token in (*text[1:], -1)]
        self._following = torch.tensor(following)
        size = len(following)
        self._of_following = torch.zeros((2, size), dtype=torch.float64)
        self._highest = torch.full((2, size), -math.inf, dtype=torch.float64)
        self._mass = torch.zeros((2, size), dtype=torch.float64)
        self._sum = torch.zeros(size, dtype=torch.float64)
        self._sum_of_squares = torch.zeros(size, dtype=torch.float64)
        self._vocab_size = 0
        self._top = torch.empty((2, size, 0), dtype=torch.float64)
        self._top_ids = torch.empty((size, 0), dtype=torch.int64)

    def add(self, first: int, logits: Tensor) -> None:
        """Add `logits` float32 [2, n, m] of the tokens from `first` on. Raises NonFiniteReference."""
        for row in non_finite_rows(logits[0]):
            raise NonFiniteReference(*self._place(row))
        wide = logits.double()
        highest = torch.maximum(self._highest, wide.amax(dim=2))
        self._mass = self._mass * (self._highest - highest).exp() + (wide - highest[..., None]).exp().sum(2)
        self._highest = highest
        self._sum += wide[0].sum(dim=1)
        self._sum_of_squares += wide[0].square().sum(dim=1)
        self._vocab_size += wide.shape[2]
        self._add_following(first, wide)
        self._add_top(first, wide)

    @property
    def logit_spread(self) -> float:
        """Standard deviation over the vocabulary, as the root mean square over the rows."""
        mean = self._sum / self._vocab_size
        variances = (self._sum_of_squares / self._vocab_size - mean.square()).clamp_min(0.0)
        return math.sqrt(float(variances.mean()))

    @property
    def rounding(self) -> float:
        """Root mean square difference between exact and rounded log-probabilities of all listed tokens."""
        top, following = self._logprobs()
        differences = torch.cat(((top[1] - top[0]).flatten(), (following[1] - following[0]).flatten()))
        return math.sqrt(float(differences.square().mean()))

    def rows(self) -> list[TokenLogprobs]:
        """One row per token: the following token, or the most likely one after a text's last token."""
        top, following = (exact_and_rounded[0].tolist() for exact_and_rounded in self._logprobs())
        return [
            TokenLogprobs(
                ids[0] if token < 0 else token,
                values[0] if token < 0 else logprob,
                0,
                tuple(zip(ids, values, strict=True)),
            )
            for token, logprob, ids, values in zip(
                self._following.tolist(), following, self._top_ids.tolist(), top, strict=True
            )
        ]

    def _logprobs(self) -> tuple[Tensor, Tensor]:
        """Of the most likely tokens [2, n, num_top], and of the following or else most likely ones [2, n]."""
        mass = self._highest + self._mass.log()
        following = torch.where(self._following < 0, self._top[..., 0], self._of_following)
        return self._top - mass[..., None], following - mass

    def _add_following(self, first: int, wide: Tensor) -> None:
        rows = torch.nonzero((self._following >= first) & (self._following < first + wide.shape[2]))[:, 0]
        self._of_following[:, rows] = wide[:, rows, self._following[rows] - first]

    def _add_top(self, first: int, wide: Tensor) -> None:
        chosen = wide[0].topk(min(self._num_top, wide.shape[2]), dim=1).indices
        values = torch.cat((self._top, wide.gather(2, chosen.expand(2, -1, -1))), dim=2)
        ids = torch.cat((self._top_ids, chosen + first), dim=1)
        kept = values[0].topk(min(self._num_top, ids.shape[1]), dim=1).indices
        self._top = values.gather(2, kept.expand(2, -1, -1))
        self._top_ids = ids.gather(1, kept)

    def _place(self, row: int) -> tuple[int, int]:
        """Text and position of the token that follows row `row`."""
        for number, text in enumerate(self._texts):
            if row < len(text):
                return number, row + 1
            row -= len(text)
        raise AssertionError("more rows than tokens")


BLOCK_ELEMENTS = 1 << 22


class StreamedModel:
    """Computes several texts in one pass over the weights, without a KV cache, on the CPU.

    Hidden states are [2, n, width] for the n tokens of all texts in order: exact, and rounded after every
    operation.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: DType,
        *,
        wire_dtype: WireDType | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_progress` receives the fraction of computed layers per matrix or more often; may raise."""
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._dtype = TORCH_DTYPES[dtype]
        self._wire_dtype = None if wire_dtype is dtype else wire_dtype
        self._on_progress = on_progress
        self._fraction = 0.0
        # Reused by all blocks: freed ones of megabytes stay with the allocator, which then holds several.
        self._stored_block = torch.empty(0, dtype=self._dtype)
        self._block = torch.empty(0)

    @staticmethod
    def memory_bytes(checkpoint: Checkpoint, dtype: DType, lengths: Sequence[int]) -> int:
        """Upper bound, of a block of weights (as read and float32), a file window, and activations of the
        tokens.
        """
        config = checkpoint.config
        width = max(config.hidden_size, config.intermediate_size, config.q_size)
        largest = max(math.prod(entry.shape) for entry in checkpoint.tensors.values())
        block = min(largest, max(BLOCK_ELEMENTS, width))
        of_a_layer = 6 * config.hidden_size + 3 * (
            config.q_size + 2 * config.kv_size + config.intermediate_size
        )
        of_the_head = 6 * config.hidden_size + 10 * min(config.vocab_size, _num_rows(config.hidden_size))
        of_scores = 3 * config.num_attention_heads * max(lengths) ** 2
        of_tokens = sum(lengths) * max(of_a_layer, of_the_head) + of_scores
        return block * (8 + dtype.size_bytes) + 8 * of_tokens

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the hidden states [2, n, width] after each layer. Raises like `load_tensors`."""
        embedded = torch.cat([self._rows(EMBEDDINGS, token, token + 1) for text in texts for token in text])
        hidden = torch.stack((embedded, embedded))
        lengths = [len(text) for text in texts]
        for layer in range(self._config.num_layers):
            self._fraction = layer / self._config.num_layers
            hidden = self._as_sent(self._mlp(self._attention(hidden, layer, lengths), layer))
            yield hidden

    def logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first token, logits float32 [2, n, m]) per block of m tokens."""
        head = EMBEDDINGS if self._config.tie_word_embeddings else OUTPUT_HEAD
        normed = self._norm(hidden, FINAL_NORM)
        for first, block in self._blocks(head):
            yield first, self._rounded(linear(normed, block))

    def _as_sent(self, hidden: Tensor) -> Tensor:
        if self._wire_dtype is not None:
            sent = to_wire(hidden[1], self._wire_dtype)
            hidden[1] = from_wire(sent, device=hidden.device, dtype=self._dtype)
        return hidden

    def _attention(self, hidden: Tensor, layer: int, lengths: Sequence[int]) -> Tensor:
        config, name = self._config, f"{layer_tensor_name(layer, 'self_attn')}."
        normed = self._norm(hidden, layer_tensor_name(layer, "input_layernorm.weight"))
        query, key, value = (
            self._heads(self._project(normed, f"{name}{projection}_proj", has_bias=config.qkv_bias))
            for projection in "qkv"
        )
        if config.qk_norm:
            query = self._norm(query, f"{name}q_norm.weight")
            key = self._norm(key, f"{name}k_norm.weight")
        texts = zip(
            *(heads.split_with_sizes(list(lengths), dim=1) for heads in (query, key, value)), strict=True
        )
        window = config.layer_windows[layer]
        mixed = torch.cat([self._mix(self._rotated(q), self._rotated(k), v, window) for q, k, v in texts], 1)
        return self._rounded(hidden + self._project(mixed, f"{name}o_proj", has_bias=config.o_bias))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._config.head_dim)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[2, n, heads * head_dim] for query [2, n, heads, head_dim], key and value [2, n, kv_heads,
        head_dim].
        """
        num_tokens, num_heads, head_dim = query.shape[1:]
        queries, keys, values = (
            x.repeat_interleave(num_heads // x.shape[2], dim=2).transpose(1, 2) for x in (query, key, value)
        )
        positions = torch.arange(num_tokens)
        distance = positions[:, None] - positions
        is_hidden = (distance < 0) | (distance >= (window or num_tokens))
        scores = queries @ keys.transpose(2, 3) / math.sqrt(head_dim)
        weights = self._rounded(scores.masked_fill(is_hidden, -math.inf).softmax(dim=-1))
        return self._rounded((weights @ values).transpose(1, 2).flatten(2))

    def _rotated(self, heads: Tensor) -> Tensor:
        """Rotate by the position's angles; element i of a head is paired with i + head_dim / 2."""
        rope = Rope(self._config, torch.float32, heads.device)
        cos, sin = rope.cos_sin(range(heads.shape[1]))
        first, second = heads.chunk(2, dim=-1)
        return self._rounded(heads * cos + torch.cat((second, first), dim=-1) * sin)

    def _mlp(self, hidden: Tensor, layer: int) -> Tensor:
        has_bias, name = self._config.mlp_bias, f"{layer_tensor_name(layer, 'mlp')}."
        normed = self._norm(hidden, layer_tensor_name(layer, "post_attention_layernorm.weight"))
        gate = self._rounded(silu(self._project(normed, f"{name}gate_proj", has_bias=has_bias)))
        inner = self._rounded(gate * self._project(normed, f"{name}up_proj", has_bias=has_bias))
        return self._rounded(hidden + self._project(inner, f"{name}down_proj", has_bias=has_bias))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return self._rounded(self._rounded(x * scale) * self._rows(name, 0, x.shape[-1]))

    def _project(self, x: Tensor, name: str, *, has_bias: bool) -> Tensor:
        return self._product(x, f"{name}.weight", f"{name}.bias" if has_bias else None)

    def _product(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """[2, n, out] for x [2, n, in]."""
        product = torch.cat([linear(x, block) for _, block in self._blocks(weight)], dim=-1)
        return self._rounded(product if bias is None else product + self._rows(bias, 0, product.shape[-1]))

    def _blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) per block of a matrix; the next block overwrites the rows."""
        num_rows, width = self._checkpoint.tensors[name].shape
        step = min(_num_rows(width), num_rows)
        if self._block.numel() < step * width:
            self._stored_block = torch.empty(step * width, dtype=self._dtype)
            self._block = torch.empty(step * width)
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), width)
            size = math.prod(shape)
            rows = self._block[:size].view(shape)
            yield first, rows.copy_(self._load(name, first, self._stored_block[:size].view(shape)))

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a tensor, rounded to the run dtype, in float32."""
        shape = (end - begin, *self._checkpoint.tensors[name].shape[1:])
        return self._load(name, begin, torch.empty(shape, dtype=self._dtype)).float()

    def _load(self, name: str, first_row: int, rows: Tensor) -> Tensor:
        self._on_progress(self._fraction)
        load_rows(self._checkpoint, name, rows, first_row=first_row)
        return rows

    def _rounded(self, x: Tensor) -> Tensor:
        """Round the second of `x` [2, ...]."""
        x[1] = x[1].to(self._dtype)
        return x


def _num_rows(width: int) -> int:
    """Rows per block of a matrix with rows of `width` elements."""
    return max(1, BLOCK_ELEMENTS // width)


def compute_reference(
    request: ReferenceRequest, directory: Path, *, free_bytes: int, progress: LoadProgress
) -> Reference:
    """Compute the reference of the checkpoint in `directory`, within `free_bytes`.

    Raises:
        HandshakeMismatch: The checkpoint differs, is unreadable, or has non-finite logits.
        Overloaded: The computation needs more memory.
        InvalidRequest: A token is outside the vocabulary.
        StaleStream: `progress` was cancelled.
    """
    try:
        checkpoint = Checkpoint.open(directory)
        if checkpoint.fingerprint != request.fingerprint:
            raise fingerprint_mismatch(checkpoint, expected=request.fingerprint)
        _check_size(request, checkpoint, free_bytes)
        return _compute(request, checkpoint, progress)
    except (CheckpointError, ValueError, OSError) as error:
        raise HandshakeMismatch(
            "checkpoint", expected="one to compute a reference from", got=f"{type(error).__name__}: {error}"
        ) from error
    except StageLoadError as error:
        raise StaleStream("the reference was cancelled") from error


def _check_size(request: ReferenceRequest, checkpoint: Checkpoint, free_bytes: int) -> None:
    vocab_size = checkpoint.config.vocab_size
    largest = max(max(text) for text in request.texts)
    if largest >= vocab_size:
        raise InvalidRequest(f"token {largest} is outside the vocabulary [0, {vocab_size})")
    lengths = [len(text) for text in request.texts]
    needed_bytes = StreamedModel.memory_bytes(checkpoint, request.dtype, lengths)
    if needed_bytes > free_bytes:
        raise Overloaded(f"the reference needs {needed_bytes} bytes of memory, {free_bytes} are free")


@torch.inference_mode()
def _compute(request: ReferenceRequest, checkpoint: Checkpoint, progress: LoadProgress) -> Reference:
    model = StreamedModel(
        checkpoint,
        request.dtype,
        wire_dtype=request.wire_dtype,
        on_progress=lambda _: progress.advance(0),
    )
    layers: list[LayerReference] = []
    for hidden in model.hidden_states(request.texts):
        layers.append(LayerReference(as_array(project(hidden[0])), _relative_rounding(hidden)))
    summary = HeadSummary(request.texts, num_top=request.num_top)
    try:
        for first, logits in model.logits(hidden):
            summary.add(first, logits)
    except NonFiniteReference as error:
        raise HandshakeMismatch(
            f"logits of the checkpoint in {request.dtype.value}",
            expected="finite numbers",
            got=f"others for position {error.position} of text {error.text}",
        ) from error
    rows = iter(summary.rows())
    texts = tuple(TextReference(text, tuple(next(rows) for _ in text)) for text in request.texts)
    return Reference(texts, tuple(layers), summary.logit_spread, summary.rounding)


def _relative_rounding(hidden: Tensor) -> float:
    """Norm of the rounding difference of hidden states [2, n, width], relative to their norms."""
    exact, rounded = hidden.double()
    norms = exact.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((rounded - exact).norm(dim=1) / norms).square().mean().sqrt())
