"""docs/models.md: the families and weight formats that are served."""

from textwrap import fill

from checkpoint.catalog import (
    BF16_SPREAD,
    GGUF_ARCHITECTURES,
    GGUF_TYPES,
    NUM_CUTS,
    OTHER_FAMILIES,
    TRANSFORMERS,
    WEIGHT_FORMATS,
    families,
)
from tools.reference_pages.markdown import GENERATED, table

_MODELS = f"""\
# Models

`stageline models` prints these tables. {GENERATED}

## Families

A checkpoint is served by native layers if its `model_type` is in the table. Every row is built from the code
that reads config.json (`checkpoint/architectures.py`). [Other families](#other-families) are served by
transformers' layers.

"""
_WINDOWS = f"""
A `model_type` after a plus sign has images, too: its text model is served, the tensors of other modalities
are not read.

A field of config.json that is not known for a family is refused by name, unless it cannot change a logit:
fields of training, exports and kernels are ignored, and others may have the value that says what the family
computes anyway. Code beside the weights, which published checkpoints name in `auto_map`, is never run.

A head that is stored is used, also where `tie_word_embeddings` is true, as in transformers. In quantised
checkpoints, the stored tensors decide which matrices are quantised, not the lists of modules in
`quantization_config`; tensors that contradict each other, such as a packed matrix without its scales, are
refused by name.

## Other families

{fill(OTHER_FAMILIES, 110)}

```bash
pip install 'transformers>=5.23,<5.24'        # on every host
stageline plan --check DIR                    # is it served, or what prevents it?
stageline up --model DIR --workers 2
```

`--implementation` of `stageline coordinator`, `up` and `plan` chooses the code for all stages: `native`
refuses other families, `transformers` computes families of the table by transformers' layers, too, to
compare. With `auto` (the default) the coordinator warns in its log if transformers' layers are used, and
`stageline plan` and `stageline status` say so.

A worker builds transformers' model without weights, examines what its layers compute, and reads the tensors
of its stage only. It never runs code of a checkpoint (`auto_map`). Keys and values are in Stageline's pages,
so that chunked prefill, prefix hits, preemption and `--kv-dtype` work as with native layers. These are
refused by name:

| what | why |
|---|---|
| encoder-decoders, cross-attention, text models inside others | stages have decoder layers only |
| recurrent or convolutional state | it has no pages |
| several residual streams | transformers' layers take them in another form |
| layers that reuse keys and values, or read the embeddings | a cut hands on hidden states only |
| layers that mix tokens other than by attention | a step has several sequences |
| attention without transformers' interface | its keys and values cannot be cached |
| masks other than causal ones and sliding windows | pages are read whole or by windows |
| values of another width than keys (latent attention) | pages hold one width |
| embeddings that depend on positions | FIRST computes them from tokens alone |
| `longrope` | rotations depend on the longest sequence of a step |
| quantised weights, `--quantize`, `--kernels compiled` | native layers only |

| limit | instead |
|---|---|
| slower: operators are not fused, and run one by one | a row for the family |
| the self-check has no reference, as native code would compute it | compare with transformers |

## Weight formats

Plain weights are safetensors in bf16, f16 or f32. Quantised weights are unpacked when a stage is loaded
([weight-formats.md](weight-formats.md)).

"""
_GGUF = f"""
## GGUF files

`--model FILE.gguf` serves a file of llama.cpp's format ([gguf.md](gguf.md)) with tensors of
{", ".join(GGUF_TYPES[:9])},
{", ".join(GGUF_TYPES[9:])}.

"""
_MISTRAL = """
## Mistral's own format

A directory, or a repository of a hub, with params.json and no config.json is read as Mistral publishes it:
Mistral Large 3, and dense models, with weights in consolidated.safetensors or in the files of
consolidated.safetensors.index.json. With a config.json, that and its files are read instead.

| params.json | computed as |
|---|---|
| `moe` and `qk_nope_head_dim` | `mistral4`: Mistral Large 3, Mistral Small 4 |
| `yarn`, with or without `llama_4_scaling` | `ministral3` |
| else | `mistral` |

* A field that is not known is refused by name. So are mixtures of experts without latent attention, windows
  that differ between layers, and audio. `vision_encoder` and its tensors are counted and not read.
* `yarn` with `"apply_scale": false`, as published, leaves scores as they are. With it, or without the field,
  scores are multiplied by the square of yarn's temperature. This is vLLM's rule; a config.json of Mistral
  Small 4 always multiplies them, as transformers does.
* `quantization` is fp8 with a scale per tensor (`qscale_weight`); it, or `quantization_config`, may also be
  an object of compressed-tensors, whose `ignore` has vLLM's names of modules, as published.
* Without `max_position_embeddings` and `max_seq_len`, sequences have up to 128,000 tokens. Id 1 begins a
  text, unless generation_config.json says otherwise, and id 2 ends it.
* The tokenizer is made of tekken.json, without further packages, if there is no tokenizer.json; structured
  output uses it, too. A `chat_template.jinja` beside it is the chat template. Where it is missing,
  mistral-common writes it:

```bash
pip install mistral-common
python -c "from mistral_common.integrations.chat_templates.chat_templates import \\
convert_tokenizer_to_chat_template as t; print(t('tekken.json'))" > chat_template.jinja
```

A file elsewhere is given to the gateway with `--chat-template`.
"""
_FILES = """
## Files of a checkpoint

* A text ends at the ids of `eos_token_id` in generation_config.json and in config.json, and at the
  tokenizer's `eos_token`: at all of them, also if one of them is an empty list.
* Rotary frequencies that older checkpoints store (`rotary_emb.inv_freq`) are compared with those of
  config.json, and refused by name if they differ.
* `temperature`, `top_k`, `top_p`, `min_p`, `typical_p` and `repetition_penalty` of generation_config.json are
  defaults of HTTP requests. A value that no request may have is an error when a coordinator starts.
* The chat template is in chat_template.jinja, in tokenizer_config.json, or else in chat_template.json.
* Links are followed to files of the same name, into the directory, and into one store: `blobs` of the model
  in Hugging Face's cache, or files named by their hash in a folder beside the directory. Any other link of a
  text file is refused with its target, as clients get these texts: `cp -rL DIR COPY` makes a copy without
  links.
* Pointers of Git LFS in place of files are refused by name: `git lfs pull` fetches the files.
* model.safetensors.index.json lists all tensors of its files.
* Numbers in JSON files and headers have at most 64 digits, shapes at most 16 dimensions.
"""
_VERIFIED = f"""
## Check of a checkpoint

`stageline plan --check DIR|FILE.gguf` reads config.json, the headers and samples of the weights, and loads
tokenizer and chat template as coordinator and gateway do: the template runs in Jinja's sandbox on one
message. Layers of other families are examined without weights. It prints memory and legal cuts of a
checkpoint that is served, or else every reason why it is not, and exits with 0 or 1. Another reason is a
tokenizer or template that cannot be loaded. A missing tokenizer or template is a note, and so is a
tokenizer with more ids than the model has embeddings: prompts that have such ids are rejected. With
`--json` it prints one object:

| key | value |
|---|---|
| `directory`, `is_served` | |
| `reasons[].code`, `reasons[].text` | why it is not served |
| `notes` | what is not available: text, chat or structured output |
| `has_tokenizer`, `has_chat_template` | they were loaded |
| `tokenizer_vocab_size` | the tokenizer's largest id plus 1; null without tokenizer |

If config and weights are served also:

| key | value |
|---|---|
| `model_type`, `dtype`, `num_layers` | |
| `implementation` | `native`, or `transformers` for a family that is not in the table |
| `weight_format` | null: plain |
| `legal_cuts` | layers above 0 that a stage can begin with |
| `resident_bytes`, `file_bytes` | weights in `dtype`, and in files |
| `num_ignored_tensors` | tensors of other modalities |

## Verification

Every family is compared with transformers {TRANSFORMERS} on random checkpoints whose weights make each field
visible (`tests/unit/stage_worker/model/test_families.py`):

| run dtype | must hold |
|---|---|
| float32 | greedy tokens are equal at {NUM_CUTS} cuts, with chunked prefill, prefix hits and preemption |
| bf16 | logits differ by less than {BF16_SPREAD:g} of their standard deviation (root mean square) |

The bf16 logits are compared with transformers' in bf16 and in float32, whichever are nearer: rounding may
choose another expert.

A change of any field that enters the computation must change the logits, so that a field which is read and
not used fails the tests; a change of any other field must be refused, as the tensors do not fit it. `make
test` has some families, `make test-full` families with every kind of block and four others each day, `make
test-models` all.

transformers' layers are compared with native ones at every cut, family by family
(`tests/unit/transformers_stage/test_rows.py`), and with transformers' own tokens for families without native
layers (`test_families.py` beside it). Mistral's own format is compared with transformers on the same weights,
renamed, at every cut (`tests/unit/stage_worker/model/test_mistral_format.py`), and tekken.json with
transformers' conversion of it.

Every weight format is compared bit by bit with an independent unpacker (`tests/quantized.py`). GGUF types
are compared bit by bit with the `gguf` package, and each architecture with the same weights in safetensors.

## JSON

`stageline models --json` prints one object:

| key | value |
|---|---|
| `families[].title` | models of the family |
| `families[].model_type`, `families[].class_name` | names in config.json |
| `families[].differences` | what is computed otherwise than in Llama: a list of texts |
| `families[].windows` | layers with a sliding window |
| `families[].wrappers` | model types with images whose text model is of this family |
| `families[].verified` | how the family is verified |
| `other_families` | how families that are not listed are served |
| `weight_formats[].method` | `quant_method` in config.json |
| `weight_formats[].variants` | what is read of it |
| `weight_formats[].verified` | how the format is verified |
| `gguf.architectures[].architecture` | `general.architecture` of GGUF files |
| `gguf.architectures[].model_types` | the families that it stands for |
| `gguf.types` | types of tensors in GGUF files |

## Long sequences

Sequences have up to `max_position_embeddings` tokens by default. Where config.json scales the rotary
embedding (`rope_scaling` or `rope_parameters` with `linear`, `yarn`, `llama3` or `longrope`),
`--max-model-len` may be up to `factor` times `original_max_position_embeddings`, if that is more. Without the
original length, it may be up to `factor` times `max_position_embeddings`, except in families with rotary
embeddings per type of layer, whose length counts the factor. For YaRN as in Qwen's model cards, edit
config.json and start the coordinator with `--max-model-len 131072`.

Phi-3 and Phi-4 checkpoints with `longrope` have two lists of rotary factors, for sequences up to
`original_max_position_embeddings` and for longer ones. All keys of a cache need the same list, so the longest
sequence that is served decides, as in vLLM: with `--max-model-len` up to the original length the short
factors are used, else the long ones, for short sequences, too. transformers changes the factors when a
sequence reaches the original length, and keeps the keys that it computed before. Set `--max-model-len` to the
original length (4096 for Phi-3-mini-128k) if no sequence is longer.

## Not served

LoRA adapters (merge them into the checkpoint), images, audio, embeddings and reranking;
[limitations.md](limitations.md) has the alternatives.
"""


def models() -> str:
    """The whole page."""
    rows = [
        (
            family.title,
            " + ".join(f"`{name}`" for name in (family.model_type, *family.wrappers)),
            "; ".join(family.differences) or "-",
            family.windows,
        )
        for family in families()
    ]
    header = ("models", "`model_type`", "differs from Llama in", "layers with a window")
    architectures = [
        (f"`{one.architecture}`", " or ".join(f"`{name}`" for name in one.model_types))
        for one in GGUF_ARCHITECTURES
    ]
    formats = [(f"`{one.method}`", one.variants) for one in WEIGHT_FORMATS]
    return "".join(
        (
            *(_MODELS, table(header, rows), _WINDOWS, table(("`quant_method`", "formats"), formats)),
            *(
                _GGUF,
                table(("`general.architecture`", "`model_type`"), architectures),
                _MISTRAL,
                _FILES,
                _VERIFIED,
            ),
        )
    )
