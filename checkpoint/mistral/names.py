"""Names of tensors in Mistral's own format, and how the lists of its quantised checkpoints name modules."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.names import TensorRole, renamed

_MODULES = {
    TensorRole.Q: "attention.wq",
    TensorRole.K: "attention.wk",
    TensorRole.V: "attention.wv",
    TensorRole.O: "attention.wo",
    TensorRole.Q_DOWN: "attention.wq_a",
    TensorRole.Q_LATENT_NORM: "attention.q_a_norm",
    TensorRole.Q_UP: "attention.wq_b",
    TensorRole.KV_DOWN: "attention.wkv_a_with_mqa",
    TensorRole.KV_LATENT_NORM: "attention.kv_a_norm",
    TensorRole.KV_UP: "attention.wkv_b",
    TensorRole.MIXER_NORM: "attention_norm",
    TensorRole.FFN_NORM: "ffn_norm",
    TensorRole.GATE: "feed_forward.w1",
    TensorRole.UP: "feed_forward.w3",
    TensorRole.DOWN: "feed_forward.w2",
    TensorRole.ROUTER: "gate",
    TensorRole.EXPERT_GATE: "experts.{expert}.w1",
    TensorRole.EXPERT_UP: "experts.{expert}.w3",
    TensorRole.EXPERT_DOWN: "experts.{expert}.w2",
    TensorRole.SHARED_GATE: "shared_experts.w1",
    TensorRole.SHARED_UP: "shared_experts.w3",
    TensorRole.SHARED_DOWN: "shared_experts.w2",
}
MISTRAL_NAMES = replace(
    renamed(_MODULES),
    prefix="",
    head="output.weight",
    embeddings_module="tok_embeddings",
    ignored=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
)
PARTS = {
    "output": "lm_head",
    "layers": "model.layers",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "wkv_b": "kv_b_proj",
    "feed_forward": "mlp",
    "gate": "mlp.gate",
    "experts": "mlp.experts",
    "shared_experts": "mlp.shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Parts of a module's name, and what they are in lists of modules, which have vLLM's names."""
