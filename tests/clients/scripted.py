"""A checkpoint that plays a script: it calls a tool that the client offers, then answers.

The loops of agents are tested with it end to end, which no small trained model can drive. Its layers add
nothing, and attend to few tokens, so that long prompts are cheap: each token has a direction of its own, and
the head a transition table, so that a token decides the next one. The chat template chooses the script, by
the last token of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from builtin_model import MODEL_DIRECTORY

CONTEXT_TOKENS = 200_000
NUM_LAYERS = 2
WIDTH = 128
"""More than the number of tokens with a direction of their own."""
HEAD_DIM = 16
INTERMEDIATE_WIDTH = 32
WINDOW = 64
SHARPNESS = 100.0
END = "<|end|>"
NOTE = "note.txt"
NOTED = "scripted"
_WRITE = f"echo {NOTED} > {NOTE}"
CALLS: Mapping[str, Mapping[str, Any]] = {
    "Bash": {"command": _WRITE, "description": "Write a note"},
    "exec_command": {"cmd": _WRITE},
    "weather": {"city": "Oslo"},
}
"""Arguments by tool, of Claude Code, Codex, and programs of these tests."""
REASONING = "It takes a call of {}."
TEXT = "I call {}."
ANSWER = ("<think>\nThe result", " is here.", "\n</think>\n\n", "The job", " is done.")
ANSWER_TEXT = "The job is done."
_CALL_END = "}\n</tool_call>"

TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' + tools | tojson + '<|end|>' -}}{%- endif -%}"
    "{%- set state = namespace(has_result=false, script='answer') -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{%- set state.has_result = true -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}{%- set state.has_result = false -%}{%- endif -%}"
    "{{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- for tool in tools or [] if tool.function.name in NAMES and not state.has_result -%}"
    "{%- set state.script = tool.function.name -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><|script ' + state.script + '|>' -}}{%- endif -%}"
).replace("NAMES", str(list(CALLS)))


def write_scripted_checkpoint(directory: Path) -> Path:
    """Write the checkpoint with its tokenizer, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((MODEL_DIRECTORY / "tokenizer.json").read_text())
    ids = _add_tokens(tokenizer)
    vocab_size = max(ids.values()) + 1
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((MODEL_DIRECTORY / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "model_max_length": CONTEXT_TOKENS, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(_config(vocab_size, ids[END])))
    save_file(_weights(vocab_size, ids), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _scripts() -> dict[str, Sequence[str]]:
    """The tokens of each script after its first one, which ends the prompt."""
    scripts: dict[str, Sequence[str]] = {"<|script answer|>": ANSWER}
    for name, arguments in CALLS.items():
        scripts[f"<|script {name}|>"] = (
            f"<think>\n{REASONING.format(name)}",
            f"\n</think>\n\n{TEXT.format(name)}",
            f'\n<tool_call>\n{{"name": "{name}", "arguments": ',
            json.dumps(arguments),
            _CALL_END,
        )
    return scripts


def _add_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Add the tokens of the scripts; return the ids of all added tokens by their texts."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    next_id = max([*ids.values(), *tokenizer["model"]["vocab"].values()]) + 1
    for first, others in _scripts().items():
        for text in (first, *others):
            if text not in ids:
                ids[text] = next_id
                tokenizer["added_tokens"].append(_added_token(next_id, text, is_special=text == first))
                next_id += 1
    return ids


def _added_token(token_id: int, text: str, *, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": is_special}


def _config(vocab_size: int, end_id: int) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "hidden_size": WIDTH,
        "intermediate_size": INTERMEDIATE_WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": end_id,
        "dtype": "float32",
    }


def _weights(vocab_size: int, ids: Mapping[str, int]) -> dict[str, torch.Tensor]:
    embeddings, head = torch.zeros(vocab_size, WIDTH), torch.zeros(vocab_size, WIDTH)
    embeddings[:, 0] = 1.0
    head[ids[END], 0] = SHARPNESS  # all tokens that are of no script
    directions: dict[int, int] = {}
    for first, others in _scripts().items():
        tokens = [ids[text] for text in (first, *others, END)]
        for token, following in pairwise(tokens):
            direction = directions.setdefault(token, len(directions) + 1)
            embeddings[token] = torch.nn.functional.one_hot(torch.tensor(direction), WIDTH)
            head[following, direction] = SHARPNESS
    weights = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(WIDTH),
    }
    for layer in range(NUM_LAYERS):
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer().items()}
    return weights


def _layer() -> dict[str, torch.Tensor]:
    """A layer that adds nothing, since its last matrices are zero."""
    return {
        "input_layernorm.weight": torch.ones(WIDTH),
        "post_attention_layernorm.weight": torch.ones(WIDTH),
        "self_attn.q_proj.weight": torch.zeros(HEAD_DIM, WIDTH),
        "self_attn.k_proj.weight": torch.zeros(HEAD_DIM, WIDTH),
        "self_attn.v_proj.weight": torch.zeros(HEAD_DIM, WIDTH),
        "self_attn.o_proj.weight": torch.zeros(WIDTH, HEAD_DIM),
        "mlp.gate_proj.weight": torch.zeros(INTERMEDIATE_WIDTH, WIDTH),
        "mlp.up_proj.weight": torch.zeros(INTERMEDIATE_WIDTH, WIDTH),
        "mlp.down_proj.weight": torch.zeros(WIDTH, INTERMEDIATE_WIDTH),
    }
