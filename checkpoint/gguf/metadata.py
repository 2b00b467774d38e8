"""The metadata of a GGUF architecture as a config.json.

Values follow llama.cpp's loader, defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.gguf.files import GgufFile, Value
from checkpoint.headers import TensorEntry


class Fields:
    """The metadata of a model: `{architecture}.{key}` by key, and its tensors."""

    def __init__(self, file: GgufFile, architecture: str, tensors: Mapping[str, TensorEntry]) -> None:
        self.file, self.tensors = file, tensors
        self.prefix = f"{architecture}."
        self._read: set[str] = set()

    def find(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`; arrays are lists of numbers."""
        name = self.prefix + key
        self._read.add(name)
        value = self.file.metadata.get(name)
        if value is None:
            return default
        return value if isinstance(value, bool | int | float | str) else list(self.file.numbers(name))

    def get(self, key: str) -> Any:
        """Raises BadConfig for a missing key."""
        if (value := self.find(key)) is None:
            raise BadConfig(f"{self.file.path}: metadata key {self.prefix + key!r} is missing")
        return value

    def natural(self, key: str) -> int:
        """A key's positive integer. Raises BadConfig."""
        value = self.get(key)
        if not _is_natural(value):
            raise BadConfig(
                f"{self.file.path}: metadata key {self.prefix + key!r} must be a positive integer,"
                f" is {value!r:.80}"
            )
        return int(value)

    def expect(self, key: str, *values: object) -> None:
        """Raise UnsupportedModel unless the key is missing or has one of these values."""
        if (value := self.find(key)) is not None and value not in values:
            raise self._unsupported(self.prefix + key, value, f", expected {' or '.join(map(repr, values))}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel for the first key of the architecture that nothing has read."""
        for name, value in self.file.metadata.items():
            if name.startswith(self.prefix) and name not in self._read:
                raise self._unsupported(name, value, "")

    def _unsupported(self, name: str, value: Value, expected: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.file.path}: metadata key {name!r} = {value!r:.120} is not supported{expected}"
        )


RawFields = dict[str, Any]


def _is_natural(value: object) -> bool:
    return type(value) is int and value > 0


def _common(fields: Fields) -> RawFields:
    embeddings = fields.tensors.get("token_embd.weight")
    num_tokens = embeddings.shape[0] if embeddings is not None else fields.get("vocab_size")
    fields.expect("vocab_size", num_tokens)
    fields.find("rope.scaling.finetuned")  # tells of the training
    raw = {
        "hidden_size": fields.natural("embedding_length"),
        "num_hidden_layers": fields.natural("block_count"),
        "intermediate_size": fields.find("feed_forward_length"),
        "num_attention_heads": fields.natural("attention.head_count"),
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.find("rope.freq_base", 10_000.0),
        "vocab_size": num_tokens,
        "tie_word_embeddings": "output.weight" not in fields.tensors,
    }
    return {key: value for key, value in raw.items() if value is not None}


def _attention(fields: Fields) -> RawFields:
    """Heads of one width in all layers, rotated whole."""
    raw = _heads(fields)
    fields.expect("rope.dimension_count", raw["head_dim"])
    return raw


def _heads(fields: Fields) -> RawFields:
    """Heads of one width in all layers. Layers without attention may be listed with 0 heads."""
    raw = _common(fields)
    heads = raw["num_attention_heads"]
    head_dim = fields.find("attention.key_length", raw["hidden_size"] // heads)
    fields.expect("attention.value_length", head_dim)
    kv_heads = fields.find("attention.head_count_kv", heads)
    if isinstance(kv_heads, list) and len(numbers := set(kv_heads) - {0}) == 1:
        kv_heads = numbers.pop()
    return {**raw, "num_key_value_heads": kv_heads, "head_dim": head_dim, **_rope_scaling(fields)}


def _rope_scaling(fields: Fields) -> RawFields:
    kind = fields.find("rope.scaling.type", "none")
    factor, original = fields.find("rope.scaling.factor"), fields.find("rope.scaling.original_context_length")
    if kind == "none" and (linear := fields.find("rope.scale_linear")) not in (None, 1.0):
        kind, factor = "linear", linear
    fields.expect("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": original,
            "beta_fast": fields.find("rope.scaling.yarn_beta_fast"),
            "beta_slow": fields.find("rope.scaling.yarn_beta_slow"),
        }
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def read_llama(fields: Fields) -> RawFields:
    raw = _attention(fields)
    if not fields.find("expert_count", 0):
        has_bias = "blk.0.attn_q.bias" in fields.tensors
        fields.expect("expert_used_count", 0)
        return {**raw, "model_type": "llama", "attention_bias": has_bias}
    return {
        **raw,
        "model_type": "mixtral",
        "num_local_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "sliding_window": None,
    }


def read_qwen2(fields: Fields) -> RawFields:
    return {**_attention(fields), "model_type": "qwen2"}


def read_qwen3(fields: Fields) -> RawFields:
    return {**_attention(fields), "model_type": "qwen3"}


def _qwen_experts(fields: Fields) -> RawFields:
    return {**_attention(fields), **_experts(fields)}


def _experts(fields: Fields) -> RawFields:
    return {
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
    }


def read_qwen2_moe(fields: Fields) -> RawFields:
    """llama.cpp does not normalise the weights of experts here, and does for Qwen3."""
    raw = _qwen_experts(fields)
    width = fields.find("expert_shared_feed_forward_length", raw.get("intermediate_size"))
    return {
        **raw,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": False,
    }


def read_qwen3_moe(fields: Fields) -> RawFields:
    return {**_qwen_experts(fields), "model_type": "qwen3_moe", "norm_topk_prob": True}


def _delta(fields: Fields) -> RawFields:
    """Gated DeltaNet. The last blocks may be draft layers; for texts, all sections of a head rotate alike."""
    raw = _heads(fields)
    fields.find("rope.dimension_sections")
    num_drafts = fields.find("nextn_predict_layers", 0)
    num_layers = raw["num_hidden_layers"] - num_drafts
    num_heads = fields.natural("ssm.time_step_rank")
    return {
        **raw,
        **_delta_layers(fields, num_layers),
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_drafts,
        "partial_rotary_factor": fields.natural("rope.dimension_count") / raw["head_dim"],
        "linear_conv_kernel_dim": fields.natural("ssm.conv_kernel"),
        "linear_num_value_heads": num_heads,
        "linear_num_key_heads": fields.natural("ssm.group_count"),
        "linear_key_head_dim": fields.natural("ssm.state_size"),
        "linear_value_head_dim": fields.natural("ssm.inner_size") // num_heads,
    }


def _delta_layers(fields: Fields, num_layers: int) -> RawFields:
    every = fields.find("full_attention_interval", 4)
    are_recurrent = fields.find("attention.recurrent_layers")
    if are_recurrent is None:
        return {"full_attention_interval": every}
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in are_recurrent[:num_layers]]
    }


def _delta_experts(fields: Fields) -> RawFields:
    raw = {**_delta(fields), **_experts(fields)}
    fields.expect("expert_weights_norm", True)
    fields.expect("expert_weights_scale", 0.0, 1.0)
    fields.expect("expert_gating_func", _SOFTMAX)
    return {
        **raw,
        "shared_expert_intermediate_size": fields.find(
            "expert_shared_feed_forward_length", raw.get("intermediate_size")
        ),
    }


def read_qwen3_next(fields: Fields) -> RawFields:
    return {**_delta_experts(fields), "model_type": "qwen3_next", "norm_topk_prob": True}


def read_qwen35(fields: Fields) -> RawFields:
    return {**_delta(fields), "model_type": "qwen3_5_text"}


def read_qwen35_moe(fields: Fields) -> RawFields:
    return {**_delta_experts(fields), "model_type": "qwen3_5_moe_text"}


def _mamba(fields: Fields) -> RawFields:
    """Mamba2: a block has attention if it has KV heads. Rotation is a flag that names the training."""
    raw = _heads(fields)
    fields.expect("rope.dimension_count", raw["head_dim"])
    is_rotated = fields.find("rope.scaling.finetuned", False)
    return {**raw, "position_embedding_type": "rope" if is_rotated else "nope"}


def _state_sizes(fields: Fields) -> tuple[int, int]:
    """Number of heads, and their width together. Raises BadConfig."""
    num_heads, inner_size = fields.natural("ssm.time_step_rank"), fields.natural("ssm.inner_size")
    if inner_size % num_heads:
        raise BadConfig(
            f"{fields.file.path}: metadata key {fields.prefix + 'ssm.inner_size'!r} is {inner_size},"
            f" no multiple of {num_heads} heads (ssm.time_step_rank)"
        )
    return num_heads, inner_size


def _listed(found: int | list[int], num_layers: int) -> list[int]:
    """A number of each of the first layers; one number counts for all."""
    return found[:num_layers] if isinstance(found, list) else [found] * num_layers


def _has(fields: Fields, tensor: str) -> bool:
    """Whether a block has a tensor of this name."""
    return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in fields.tensors)


def read_granite_hybrid(fields: Fields) -> RawFields:
    """Granite 4.0. Without experts, the MLP is the shared one."""
    raw, (num_heads, inner_size) = _mamba(fields), _state_sizes(fields)
    num_experts = fields.find("expert_count", 0)
    kv_heads = _listed(fields.get("attention.head_count_kv"), raw["num_hidden_layers"])
    types = ["attention" if count else "mamba" for count in kv_heads]
    return {
        **raw,
        "model_type": "granitemoehybrid",
        "layer_types": types,
        "attention_bias": _has(fields, "attn_q.bias"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": fields.find("expert_used_count", 0) or None,
        "shared_intermediate_size": fields.find("expert_shared_feed_forward_length")
        or raw["intermediate_size"],
        "embedding_multiplier": fields.find("embedding_scale", 1.0),
        "residual_multiplier": fields.find("residual_scale", 1.0),
        "attention_multiplier": fields.find("attention.scale") or raw["head_dim"] ** -0.5,
        "logits_scaling": fields.find("logit_scale", 1.0),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner_size // num_heads,
        "mamba_expand": inner_size // raw["hidden_size"],
        "mamba_n_groups": fields.natural("ssm.group_count"),
        "mamba_d_state": fields.natural("ssm.state_size"),
        "mamba_d_conv": fields.natural("ssm.conv_kernel"),
        "mamba_conv_bias": _has(fields, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(fields, "ssm_in.bias"),
    }


def read_nemotron_h(fields: Fields) -> RawFields:
    """Nemotron-H, without and with experts: a block has attention if it has KV heads, a feed-forward if that
    has a width, and else Mamba2. The last blocks may be draft layers.
    """
    raw, (num_heads, inner_size) = _mamba(fields), _state_sizes(fields)
    num_drafts = fields.find("nextn_predict_layers", 0)
    num_layers, eps = raw.pop("num_hidden_layers") - num_drafts, raw.pop("rms_norm_eps")
    widths = _listed(raw.pop("intermediate_size"), num_layers)
    if raw.pop("position_embedding_type") != "nope":
        raise BadConfig(f"{fields.file.path}: {fields.prefix[:-1]!r} has no layers with rotation")
    has_experts = fields.find("expert_count", 0) > 0
    of_width = "moe" if has_experts else "mlp"
    kv_heads = _listed(fields.get("attention.head_count_kv"), num_layers)
    kinds = zip(kv_heads, widths, strict=True)
    types = ["attention" if count else of_width if width else "mamba" for count, width in kinds]
    return {
        **raw,
        **(_nemotron_experts(fields) if has_experts else {"intermediate_size": max(widths)}),
        "model_type": "nemotron_h",
        "num_nextn_predict_layers": num_drafts,
        "layers_block_type": types,
        "layer_norm_epsilon": eps,
        "mlp_bias": _has(fields, "ffn_up.bias"),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner_size // num_heads,
        "n_groups": fields.natural("ssm.group_count"),
        "ssm_state_size": fields.natural("ssm.state_size"),
        "conv_kernel": fields.natural("ssm.conv_kernel"),
        "use_conv_bias": _has(fields, "ssm_conv1d.bias"),
        "use_bias": _has(fields, "ssm_in.bias"),
    }


def _nemotron_experts(fields: Fields) -> RawFields:
    """llama.cpp's gate is a sigmoid; it chooses from all experts, or within the best groups."""
    fields.expect("expert_gating_func", 0, _SIGMOID)
    fields.expect("expert_shared_count", 1)
    return {
        "n_routed_experts": fields.natural("expert_count"),
        "num_experts_per_tok": fields.natural("expert_used_count"),
        "moe_intermediate_size": fields.natural("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.natural("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.find("moe_latent_size"),
        "norm_topk_prob": fields.find("expert_weights_norm", False),
        "routed_scaling_factor": fields.find("expert_weights_scale", 0.0) or 1.0,
        **_expert_groups(fields, "sigmoid"),
    }


def read_kimi_linear(fields: Fields) -> RawFields:
    """Kimi Linear: a block has latent attention if it has KV heads, and else Kimi Delta Attention.

    There are as many heads in either, and value_length is the width of a head that no block has.
    """
    raw = _common(fields)
    num_heads, rank = raw["num_attention_heads"], fields.natural("attention.kv_lora_rank")
    rope_dim, key = fields.natural("rope.dimension_count"), fields.natural("attention.key_length_mla")
    fields.expect("attention.key_length", rank + rope_dim)
    fields.find("attention.value_length")
    fields.expect("expert_gating_func", _SIGMOID)
    fields.expect("expert_weights_norm", True)
    kv_heads = _listed(fields.get("attention.head_count_kv"), raw["num_hidden_layers"])
    return {
        **raw,
        **_expert_groups(fields, "sigmoid"),
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "num_key_value_heads": num_heads,
        "q_lora_rank": fields.find("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": fields.natural("attention.value_length_mla"),
        "linear_num_heads": num_heads,
        "linear_head_dim": fields.natural("kda.head_dim"),
        "linear_conv_kernel_dim": fields.natural("ssm.conv_kernel"),
        "num_experts": fields.natural("expert_count"),
        "num_experts_per_tok": fields.natural("expert_used_count"),
        "moe_intermediate_size": fields.natural("expert_feed_forward_length"),
        "n_shared_experts": fields.find("expert_shared_count", 1) or 1,
        "first_k_dense_replace": fields.find("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.find("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": True,
    }


def read_falcon_h1(fields: Fields) -> RawFields:
    """Falcon H1, whose multipliers are in the weights of the file."""
    raw, (num_heads, inner_size) = _attention(fields), _state_sizes(fields)
    return {
        **raw,
        "model_type": "falcon_h1",
        "attention_bias": _has(fields, "attn_q.bias"),
        "mlp_bias": _has(fields, "ffn_up.bias"),
        "mamba_d_ssm": inner_size,
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner_size // num_heads,
        "mamba_n_groups": fields.natural("ssm.group_count"),
        "mamba_d_state": fields.natural("ssm.state_size"),
        "mamba_d_conv": fields.natural("ssm.conv_kernel"),
        "mamba_conv_bias": _has(fields, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(fields, "ssm_in.bias"),
        "projectors_bias": _has(fields, "ssm_out.bias"),
        "mamba_rms_norm": _has(fields, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


_GEMMA_3_27B_LAYERS = 62
"""Its scores are scaled by hidden_size / heads instead of a head's width; the metadata does not tell."""


def read_gemma3(fields: Fields) -> RawFields:
    raw = _attention(fields)
    is_27b = raw["num_hidden_layers"] == _GEMMA_3_27B_LAYERS
    pattern = fields.find("attention.sliding_window_pattern", 6)
    windows: RawFields = {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):
        names = {True: "sliding_attention", False: "full_attention"}
        windows = {"layer_types": [names.get(is_windowed, is_windowed) for is_windowed in pattern]}
    return {
        **raw,
        **windows,
        "model_type": "gemma3_text",
        "sliding_window": fields.get("attention.sliding_window"),
        "rope_theta": fields.find("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.find("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"]
        if is_27b
        else raw["head_dim"],
        "final_logit_softcapping": fields.find("final_logit_softcapping"),
        "attn_logit_softcapping": fields.find("attn_logit_softcapping"),
    }


def read_gpt_oss(fields: Fields) -> RawFields:
    raw = _attention(fields)
    scaling = raw.get("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return {
        **raw,
        "model_type": "gpt_oss",
        "intermediate_size": fields.get("expert_feed_forward_length"),
        "num_local_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "sliding_window": fields.get("attention.sliding_window"),
        "rope_scaling": scaling,
    }


_SOFTMAX, _SIGMOID = 1, 2
_GATES = {0: "softmax", _SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
"""Of expert_gating_func; files of DeepSeek V2 lack it."""
_GATED_TYPES = {"softmax": "deepseek_v2", "sigmoid": "deepseek_v3"}


def read_deepseek2(fields: Fields) -> RawFields:
    """DeepSeek V2 and V3, and others that llama.cpp computes like them: Kimi K2, GLM-4.7-Flash.

    Older files have the keys and values of all heads in one matrix, newer ones a matrix of each head, and
    other widths: there, key_length is the width of a row of the cache.
    """
    fields.expect("expert_gating_func", *_GATES)
    gate = _GATES[fields.find("expert_gating_func", 0)]
    return {**_latents(fields, gate), "model_type": _GATED_TYPES[gate], "num_nextn_predict_layers": 0}


def read_deepseek32(fields: Fields) -> RawFields:
    """DeepSeek V3.2."""
    return {**_indexed(fields), "model_type": "deepseek_v32"}


def read_glm_dsa(fields: Fields) -> RawFields:
    """GLM-5. Files of GLM-5.2 without a list of indexers have one in layers 0, 1, 2, 6, 10 and so on."""
    fields.find("rope.dimension_sections")
    raw = _indexed(fields)
    own = fields.find("attention.indexer.types")
    if own is not None:
        raw["indexer_types"] = ["full" if is_own else "shared" for is_own in own[: raw["num_hidden_layers"]]]
    elif raw["max_position_embeddings"] >= _GLM_5_2_LENGTH:
        raw |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    return {**raw, "model_type": "glm_moe_dsa"}


_GLM_5_2_LENGTH = 1 << 20
"""By which llama.cpp distinguishes it from GLM-5 and 5.1, whose layers have an indexer each."""


def _indexed(fields: Fields) -> RawFields:
    """Latents with an indexer. The last blocks may be draft layers."""
    fields.expect("expert_gating_func", 0, _SIGMOID)
    raw = _latents(fields, "sigmoid")
    num_drafts = fields.find("nextn_predict_layers", 0)
    return {
        **raw,
        "num_hidden_layers": raw["num_hidden_layers"] - num_drafts,
        "num_nextn_predict_layers": num_drafts,
        "index_n_heads": fields.natural("attention.indexer.head_count"),
        "index_head_dim": fields.natural("attention.indexer.key_length"),
        "index_topk": fields.natural("attention.indexer.top_k"),
    }


def _latents(fields: Fields, gate: str) -> RawFields:
    raw = _common(fields)
    return {
        **raw,
        **_latent_widths(fields, raw["num_attention_heads"]),
        **_latent_rope(fields),
        "q_lora_rank": fields.find("attention.q_lora_rank"),
        "n_routed_experts": fields.natural("expert_count"),
        "num_experts_per_tok": fields.natural("expert_used_count"),
        "n_shared_experts": fields.find("expert_shared_count", 0),
        "moe_intermediate_size": fields.natural("expert_feed_forward_length"),
        "first_k_dense_replace": fields.find("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.find("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": fields.find("expert_weights_norm", False),
        **_expert_groups(fields, gate),
    }


def _latent_widths(fields: Fields, num_heads: int) -> RawFields:
    rank, rope_dim = fields.natural("attention.kv_lora_rank"), fields.natural("rope.dimension_count")
    key, value = fields.find("attention.key_length_mla"), fields.find("attention.value_length_mla")
    if key is None or value is None:
        key, value = fields.natural("attention.key_length"), fields.natural("attention.value_length")
    fields.expect("attention.key_length", key, rank + rope_dim)
    fields.expect("attention.value_length", value, rank)
    fields.expect("attention.head_count_kv", 1, num_heads)
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "num_key_value_heads": num_heads,
    }


def _latent_rope(fields: Fields) -> RawFields:
    """yarn, with the temperature of scores: the file has a tenth of mscale_all_dim, and cos and sin have no
    temperature, which is mscale = mscale_all_dim.
    """
    scaling: RawFields = _rope_scaling(fields)
    if not scaling or scaling["rope_scaling"]["rope_type"] != "yarn":
        return scaling
    mscale = round(10 * fields.get("rope.scaling.yarn_log_multiplier"), 6)
    return {"rope_scaling": {**scaling["rope_scaling"], "mscale": mscale, "mscale_all_dim": mscale}}


def _expert_groups(fields: Fields, gate: str) -> RawFields:
    """llama.cpp ranks groups by their two best experts, as DeepSeek V3 does and V2 does not."""
    if gate == "softmax":
        fields.expect("expert_group_count", 0, 1)
        fields.expect("expert_group_used_count", 0, 1)
        return {}
    count = fields.find("expert_group_count", 0) or 1
    return {"n_group": count, "topk_group": fields.find("expert_group_used_count", 0) or count}
