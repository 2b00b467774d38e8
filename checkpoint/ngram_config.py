"""Embeddings of n-grams in config.json: which layers have them, and their sizes."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.config_fields import RawConfig, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.ngrams import NgramEmbedding, table_rows

_MOST_HEADS = 1024
"""Of all layers together, far above any existing model: each has a prime that is searched for."""


def parse_ngrams(
    raw: RawConfig, are_recurrent: tuple[bool, ...], *, num_streams: int, eps: float
) -> dict[int, NgramEmbedding]:
    """The embeddings of each layer that has them; `eps` belongs to its norms.

    Raises BadConfig, and UnsupportedModel for a layer that is not recurrent.
    """
    layers = _layers(raw, len(are_recurrent))
    if not layers:
        return {}
    if wrong := [layer + 1 for layer in layers if not are_recurrent[layer]]:
        raise UnsupportedModel(
            f"config field 'ple_layer_ids' names layer {wrong[0]} (counted from 1), which has attention: only"
            " recurrent layers with n-grams are supported"
        )
    first = _parse_first(raw, len(layers), num_streams, eps)
    base, multiple = (
        positive_int(raw, key, default)
        for key, default in (
            ("ngram_vocab_size_base", 20_000_000),
            ("make_ngram_vocab_size_divisible_by", 128),
        )
    )
    heads = range(0, len(layers) * first.num_heads, first.num_heads)
    return {
        layer: replace(
            first,
            num_rows=table_rows(
                base=base, first_head=first_head, num_heads=first.num_heads, multiple=multiple
            ),
        )
        for layer, first_head in zip(layers, heads, strict=True)
    }


def _parse_first(raw: RawConfig, num_layers: int, num_streams: int, eps: float) -> NgramEmbedding:
    """What all of `num_layers` have, with no rows."""
    hidden_size, size = positive_int(raw, "hidden_size"), positive_int(raw, "ngram_size", 3)
    per_size, width = positive_int(raw, "heads_per_ngram", 8), positive_int(raw, "ple_embed_dim", hidden_size)
    num_heads = (size - 1) * per_size
    if not 0 < num_heads * num_layers <= _MOST_HEADS:
        raise BadConfig(
            f"{num_layers} layers with {per_size} heads (heads_per_ngram) for n-grams of 2 to {size} tokens"
            f" (ngram_size): their number must be from 1 to {_MOST_HEADS}"
        )
    if width % num_heads:
        raise BadConfig(f"config field 'ple_embed_dim' is {width}, not a multiple of {num_heads} heads")
    return NgramEmbedding(
        size=size,
        heads_per_size=per_size,
        head_dim=width // num_heads,
        num_rows=0,
        num_shards=positive_int(raw, "split_ngram_parts", 512),
        kernel_size=_kernel_size(raw),
        separator=_separator(raw),
        hidden_size=hidden_size,
        num_streams=num_streams,
        norm_eps=eps,
    )


def _layers(raw: RawConfig, num_layers: int) -> list[int]:
    """Numbers from 0; in config.json they are from 1."""
    listed = raw.get("ple_layer_ids") or []
    if not isinstance(listed, list) or any(type(x) is not int or not 1 <= x <= num_layers for x in listed):
        raise BadConfig(
            f"config field 'ple_layer_ids' must list layers from 1 to {num_layers}, is {listed!r:.200}"
        )
    return sorted({number - 1 for number in listed})


def _kernel_size(raw: RawConfig) -> int:
    kernel_size = positive_int(raw, "ple_conv_kernel_size", 4)
    if kernel_size < 2:
        raise BadConfig(f"config field 'ple_conv_kernel_size' is {kernel_size}, the minimum is 2")
    return kernel_size


def _separator(raw: RawConfig) -> int:
    """The first end-of-sequence token, which ends a text within a sequence."""
    given = raw.get("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    vocab_size = positive_int(raw, "vocab_size")
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < vocab_size:
        raise BadConfig(
            f"config field 'eos_token_id' = {given!r:.200} gives no token below vocab_size {vocab_size}:"
            " one is needed between n-grams of several texts"
        )
    return first
