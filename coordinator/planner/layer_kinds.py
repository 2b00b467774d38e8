"""Memory and cost of each kind of layer in a plan, for people who size a cluster."""

from __future__ import annotations

from checkpoint import (
    Attention,
    Blueprint,
    Compressed,
    Experts,
    GatedDelta,
    KimiDelta,
    Latent,
    LayerPlan,
    Mamba2,
    Mixer,
    NoFeedForward,
    NoMixer,
    Opaque,
    Pageless,
    Recurrent,
)
from coordinator.planner.plan import LayerKind, LayerKinds, Plan, layer_ranges
from coordinator.planner.stage_memory import StageMemory


def layer_kinds(config: Blueprint, plan: Plan) -> LayerKinds:
    """Return the kinds of layers of a planned model, with the planner's own numbers."""
    memory = StageMemory(
        config=config.with_stored(holds_stored=plan.holds_stored),
        dtype=plan.dtype,
        limits=plan.limits,
        block_size=plan.block_size,
        num_stages=len(plan.stages),
        kv_dtype=plan.kv_dtype,
    )
    return LayerKinds(
        step_sequences=memory.step_sequences, legal_cuts=config.legal_cuts, kinds=_kinds(memory, plan)
    )


def _kinds(memory: StageMemory, plan: Plan) -> tuple[LayerKind, ...]:
    """In order of their first layers."""
    costs = memory.layer_costs()
    windows = [None if window is None else window.num_tokens for window in memory.windows]
    found: dict[tuple[str, int, int, int, int], list[int]] = {}
    for index, layer in enumerate(memory.config.layers):
        kv_bytes = memory.block_bytes[index] // memory.block_size
        group = windows.index(layer.mixer.window)
        name = _name(layer)
        if entries := memory.entry_bytes[index]:
            name += f", entries {entries / memory.block_size:g} B per token"
        key = (name, memory.layer_bytes[index], costs[index], kv_bytes, group)
        found.setdefault(key, []).append(index)
    num_blocks = (plan.num_blocks, *plan.other_num_blocks)
    return tuple(
        LayerKind(
            name=name,
            layers=layer_ranges(layers),
            weight_bytes=weight_bytes,
            step_bytes=step_bytes,
            step_cost=step_bytes / min(costs),
            kv_bytes_per_token=kv_bytes,
            group=group,
            num_blocks=num_blocks[group],
        )
        for (name, weight_bytes, step_bytes, kv_bytes, group), layers in found.items()
    )


def _name(layer: LayerPlan) -> str:
    mixer, inner = layer.mixer, layer.feed_forward
    words = [] if isinstance(mixer, NoMixer) else [_mixer_name(mixer)]
    words += [] if layer.ngrams is None else ["n-grams"]
    if isinstance(inner, Opaque):
        return f"{words[0]} by transformers"
    if mixer.rope is None and not isinstance(mixer, Pageless):
        words[0] += " without rotation"
    if layer.beside is not None:
        words[0] += f" beside {_RECURRENT_NAMES[type(layer.beside)]}"
    if isinstance(inner, NoFeedForward):
        return words[0]
    if isinstance(inner, Experts):
        words.append(f"{inner.per_token} of {inner.count} experts")
        words += [] if inner.shared is None else ["shared expert"]
    else:
        words.append("dense")
    return " + ".join(words)


_RECURRENT_NAMES: dict[type[Recurrent], str] = {
    GatedDelta: "Gated DeltaNet",
    KimiDelta: "Kimi Delta Attention",
    Mamba2: "Mamba2",
}


def _mixer_name(mixer: Mixer) -> str:
    if isinstance(mixer, Recurrent):
        return _RECURRENT_NAMES[type(mixer)]
    if isinstance(mixer, Compressed):
        return _compressed_name(mixer)
    name = "latent attention" if isinstance(mixer, Latent) else "attention"
    if mixer.window is not None:
        name += f" window {mixer.window}"
    if isinstance(mixer, Latent) and mixer.top_k is not None:
        name += f" to {mixer.top_k} {'earlier' if mixer.needs_choice else 'indexed'} tokens"
    if isinstance(mixer, Attention) and (indexer := mixer.indexer) is not None:
        name += f" to {indexer.top_blocks} indexed blocks of {indexer.block_size} tokens"
    return name


def _compressed_name(mixer: Compressed) -> str:
    name = f"attention window {mixer.window}"
    if (compressor := mixer.compressor) is None:
        return name
    name += f" and entries of {compressor.ratio} tokens"
    return name if compressor.indexer is None else f"{name}, {compressor.indexer.num_chosen} indexed"
