"""Choices of tokens, blocks of them and entries in sparse attention that kernels of GPUs compute."""

from __future__ import annotations

from collections.abc import Collection

from checkpoint.block_indexer import BlockIndexer
from checkpoint.blueprint import Attention, Latent, LayerPlan
from checkpoint.compressed import Compressed
from checkpoint.recurrent import Pageless
from checkpoint.step_sizes import MOST_CHOSEN

_MOST_HEADS, _MOST_WIDTH = 128, 256
"""Heads of an indexer, and their width, that registers and shared memory of one program hold."""


def top_k_of(layers: Collection[LayerPlan]) -> int | None:
    """Tokens that queries of all layers with latents choose; None if they attend to all."""
    found = {layer.mixer.top_k for layer in layers if isinstance(layer.mixer, Latent)}
    return found.pop() if len(found) == 1 else None


def block_indexer_of(layers: Collection[LayerPlan]) -> BlockIndexer | None:
    """The indexer of blocks that all layers with pages have; None if they have none, or several."""
    mixers = [layer.mixer for layer in layers if not isinstance(layer.mixer, Pageless)]
    found = {mixer.indexer if isinstance(mixer, Attention) else None for mixer in mixers}
    return found.pop() if len(found) == 1 else None


def no_choice_kernels_because(layers: Collection[LayerPlan]) -> str | None:
    """Why kernels of GPUs do not choose what queries of `layers` attend to; None if they do, or if queries
    attend to all tokens.
    """
    mixers = [layer.mixer for layer in layers if not isinstance(layer.mixer, Pageless)]
    with_blocks = [mixer for mixer in mixers if isinstance(mixer, Attention) and mixer.indexer is not None]
    if with_blocks:
        are_alike = len(with_blocks) == len(mixers) and block_indexer_of(layers) is not None
        return _no_block_kernels_because(with_blocks, are_alike=are_alike)
    reasons = (_no_entries_because(mixer) for mixer in mixers if isinstance(mixer, Compressed))
    if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
        return reason
    latents = [mixer for mixer in mixers if isinstance(mixer, Latent)]
    if all(mixer.top_k is None for mixer in latents):
        return None
    if len({mixer.top_k for mixer in latents}) > 1 or len(latents) < len(mixers):
        return "Triton kernels choose as many tokens in each layer with pages"
    for mixer in latents:
        assert mixer.top_k is not None, "layers with a choice"
        if mixer.top_k > MOST_CHOSEN:
            return f"Triton kernels choose up to {MOST_CHOSEN} tokens, not {mixer.top_k}"
        if (indexer := mixer.indexer) is None:
            continue
        if indexer.num_heads > _MOST_HEADS or indexer.head_dim > _MOST_WIDTH or mixer.rope_dim < 2:
            size = f"{indexer.num_heads} heads of {indexer.head_dim}, {mixer.rope_dim} of them rotated"
            return f"Triton kernels have no indexer of {size}"
    return None


def _no_entries_because(mixer: Compressed) -> str | None:
    """Why kernels of GPUs do not choose entries of `mixer`; None if they do, or if there is no choice."""
    indexer = None if mixer.compressor is None else mixer.compressor.indexer
    if indexer is None:
        return None
    if indexer.num_chosen > MOST_CHOSEN:
        return f"Triton kernels choose up to {MOST_CHOSEN} entries, not {indexer.num_chosen}"
    if indexer.num_heads > _MOST_HEADS or indexer.head_dim > _MOST_WIDTH:
        return f"Triton kernels have no indexer of {indexer.num_heads} heads of {indexer.head_dim}"
    return None


def _no_block_kernels_because(mixers: Collection[Attention], *, are_alike: bool) -> str | None:
    if not are_alike or any(mixer.window is not None for mixer in mixers):
        return "Triton kernels choose as many blocks of all tokens in each layer with pages"
    for mixer in mixers:
        assert mixer.indexer is not None, "layers with an indexer"
        indexer = mixer.indexer
        if indexer.top_blocks > MOST_CHOSEN:
            return f"Triton kernels choose up to {MOST_CHOSEN} blocks, not {indexer.top_blocks}"
        if indexer.num_heads > _MOST_HEADS or indexer.head_dim > _MOST_WIDTH:
            return f"Triton kernels have no indexer of {indexer.num_heads} heads of {indexer.head_dim}"
    return None
