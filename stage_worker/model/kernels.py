"""Kernel choice of a stage, made once and reported.

torch's operators replace the compiled module where no C compiler was available at installation, and for
shapes and CPUs that it does not support. They replace Triton kernels where triton is missing, and on GPUs
that it does not support.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType

import torch

from checkpoint import (
    Attention,
    Blueprint,
    Compressed,
    Dense,
    Experts,
    Latent,
    LayerPlan,
    NoFeedForward,
    NoMixer,
    Pageless,
    Recurrent,
    WeightFormat,
)
from checkpoint.blueprint import Activation, ClampedSwiGlu, NormKind, NormSpan, QkNorm
from checkpoint.devices import no_kernels_because
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable

_MODULE = "stage_worker.model._cpu_kernels"
_HEAD_DIMS = (32, 64, 96, 128, 256)
_MOST_ELEMENTS = 64 * 256
_LANES = 16
_TRITON_KERNELS = "stage_worker.model.triton_kernels"
_LEAST_CAPABILITY = (8, 0)
"""Compute capability that Triton's products of bfloat16 need."""


def load() -> ModuleType:
    """Import the compiled module. Raises ImportError if it was not built."""
    return importlib.import_module(_MODULE)


def load_triton(name: str) -> ModuleType:
    """Import a module of Triton kernels. Raises ImportError without triton."""
    return importlib.import_module(f"{_TRITON_KERNELS}.{name}")


def missing_because() -> str | None:
    """Why compiled functions are unavailable in this installation or on this CPU; None if available."""
    try:
        module = load()
    except ImportError:
        return "the compiled kernels were not built when Stageline was installed"
    if not hasattr(module, "IN_FP8"):
        return "the compiled kernels are older than this Stageline: install it again"
    return None if module.is_supported() else "this CPU lacks AVX-512 with bfloat16"


def unavailable_because(config: Blueprint) -> str | None:
    """Why the compiled functions cannot compute this model on this host; None if they can."""
    if (reason := missing_because()) is not None:
        return reason
    reasons = (_not_for(config.hidden_size, layer) for layer in config.kinds)
    return next((reason for reason in reasons if reason is not None), None)


def _not_for(hidden_size: int, layer: LayerPlan) -> str | None:
    attention, dense = layer.mixer, layer.known_feed_forward
    if layer.num_streams > 1:
        return "several residual streams are not supported by the kernels"
    if isinstance(attention, Latent):
        return "latent attention is not supported by the kernels"
    if isinstance(attention, Compressed):
        return "compressed attention is not supported by the kernels"
    if isinstance(attention, Recurrent) or layer.beside is not None:
        return "recurrent layers are not supported by the kernels"
    if isinstance(attention, NoMixer) or isinstance(dense, NoFeedForward):
        return "layers of a mixer or a feed-forward alone are not supported by the kernels"
    if attention.indexer is not None:
        return "indexers are not supported by the kernels"
    if attention.has_output_gate:
        return "gates of attention's output are not supported by the kernels"
    if isinstance(dense, Experts):
        return "mixtures of experts are not supported by the kernels"
    if attention.head_dim not in _HEAD_DIMS or attention.q_size > _MOST_ELEMENTS:
        return f"{attention.num_heads} heads of {attention.head_dim} are not supported by the kernels"
    if hidden_size % _LANES or dense.width % _LANES:
        return f"widths {hidden_size} and {dense.width} are not multiples of {_LANES}"
    if layer.norm.kind is not NormKind.RMS:
        return f"norms with {layer.norm.kind.value} are not supported by the kernels"
    if not dense.is_gated or dense.activation is not Activation.SILU:
        return f"an MLP with {_activation_name(dense.activation)} is not supported by the kernels"
    if attention.qk_norm is not None and attention.qk_norm.is_after_rotation:
        return "norms after the rotation are not supported by the kernels"
    if attention.has_sinks:
        return "attention sinks are not supported by the kernels"
    return "limited scores are not supported by the kernels" if attention.softcap is not None else None


def _activation_name(activation: Activation | ClampedSwiGlu) -> str:
    return activation.value if isinstance(activation, Activation) else "clamped SwiGLU"


class ProductMethod(Enum):
    """Matrix products of a layer; the value is their name in logs."""

    LINEAR = "plain weights"
    TRITON_ROWS = "plain weights, single rows by Triton kernels"
    ONEDNN = "packed weights"
    COMPILED = "compiled products"
    INT8 = "int8 weights"
    INT4 = "int4 weights"
    COMPILED_INT4 = "compiled products of int4 weights"
    TRITON_INT8 = "Triton products of int8 weights"
    TRITON_INT4 = "Triton products of int4 weights"

    @property
    def can_gate(self) -> bool:
        """Whether one product computes silu(gate) * up."""
        return self in (ProductMethod.COMPILED, ProductMethod.COMPILED_INT4)


class AttentionMethod(Enum):
    """Attention implementation; the value is its name in logs."""

    SDPA = "scaled_dot_product_attention"
    PRODUCTS = "batched products"
    IN_PLACE = "compiled kernels"
    TRITON = "Triton kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Functions of a stage's layers.

    `products`: oneDNN's are for CPUs with AMX, or without compiled kernels. `quantized`: products of layers
    with `--quantize`. `decode` and `prefill`: attention of one-token slices, and of longer ones. IN_PLACE for
    decodes implies compiled norms, rotation and gates, and TRITON those by Triton (see `operations`).
    `holds_stored`: Triton multiplies by matrices as a checkpoint stores them, see `held_matrices`.
    `by_torch` names what a TRITON stage leaves to torch's operators.
    """

    products: ProductMethod
    decode: AttentionMethod
    prefill: AttentionMethod
    quantized: ProductMethod | None = None
    holds_stored: bool = False
    not_compiled_because: str | None = field(default=None, compare=False)
    by_torch: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls,
        config: Blueprint,
        device: torch.device,
        dtype: torch.dtype,
        choice: KernelChoice = KernelChoice.AUTO,
    ) -> Kernels:
        """Select the kernels; AUTO takes the fastest for `dtype` on `device`, see bench/STUDIES.md.

        On a CPU, only bfloat16 differs. With AMX, SDPA packs keys, which pays off for prompts but not for
        one query per sequence. Compiled products and attention of prompts need torch's threads. Raises
        KernelsUnavailable for COMPILED where unsupported, and for quantised weights on a GPU without Triton
        kernels.
        """
        found = cls._of_run_dtype(config, device, dtype, choice)
        weights = config.weight_format
        if config.holds_stored:
            _check_held("quantised weights as they are stored", device, choice)
            found = replace(found, holds_stored=True)
        if weights is None:
            return found
        if device.type == "cpu":
            return replace(found, quantized=_quantized_products(weights, dtype, choice))
        _check_held(f"--quantize {weights.value}", device, choice)
        is_int8 = weights is WeightFormat.INT8
        return replace(found, quantized=ProductMethod.TRITON_INT8 if is_int8 else ProductMethod.TRITON_INT4)

    @classmethod
    def _of_run_dtype(
        cls, config: Blueprint, device: torch.device, dtype: torch.dtype, choice: KernelChoice
    ) -> Kernels:
        if choice is KernelChoice.PLAIN:
            return _plain(config, "chosen with --kernels plain")
        if device.type == "cuda":
            return _on_gpu(config, device, dtype, choice)
        reason = _not_in(dtype) or unavailable_because(config)
        if choice is KernelChoice.COMPILED and reason is not None:
            raise KernelsUnavailable(f"--kernels compiled is not possible: {reason}")
        if dtype is not torch.bfloat16 or not _has_bf16_products():
            return _plain(config, reason)
        has_amx = torch.cpu._is_amx_tile_supported()
        if reason is None and not has_amx and _has_threads_of_torch():
            return ALL_COMPILED
        return cls(
            products=ProductMethod.ONEDNN,
            decode=AttentionMethod.IN_PLACE if reason is None else AttentionMethod.PRODUCTS,
            prefill=AttentionMethod.SDPA
            if has_amx and not _needs_products(config)
            else AttentionMethod.PRODUCTS,
            not_compiled_because=reason,
        )

    @property
    def layer_products(self) -> ProductMethod:
        """Products of the layers; the output head has `products`, since its matrix is not quantised."""
        return self.products if self.quantized is None else self.quantized

    @property
    def are_triton(self) -> bool:
        """Whether Triton kernels compute what is not a product, the sampled tokens included."""
        return self.decode is AttentionMethod.TRITON

    @property
    def choice(self) -> KernelChoice:
        """COMPILED where compiled functions compute a layer's operations, else PLAIN."""
        is_compiled = self.decode in (AttentionMethod.IN_PLACE, AttentionMethod.TRITON)
        return KernelChoice.COMPILED if is_compiled else KernelChoice.PLAIN

    def __str__(self) -> str:
        reason = f" ({self.not_compiled_because})" if self.not_compiled_because else ""
        decode = f"decode by {self.decode.value}{reason}"
        stored = ", quantised weights as stored" if self.holds_stored else ""
        by_torch = f"; by torch's operators: {', '.join(self.by_torch)}" if self.by_torch else ""
        return f"{self.layer_products.value}, {decode}, prefill by {self.prefill.value}{stored}{by_torch}"


PLAIN = Kernels(products=ProductMethod.LINEAR, decode=AttentionMethod.SDPA, prefill=AttentionMethod.SDPA)
"""Supported by every device and dtype, for attention over keys without a limit of scores and sinks."""

PRODUCTS = replace(PLAIN, decode=AttentionMethod.PRODUCTS, prefill=AttentionMethod.PRODUCTS)
"""scaled_dot_product_attention has no limit of scores and no sinks, and no fast kernel for latents."""


BY_TRITON = Kernels(
    products=ProductMethod.TRITON_ROWS, decode=AttentionMethod.TRITON, prefill=AttentionMethod.TRITON
)
"""For GPUs of compute capability 8.0 or higher, and every model."""


def by_triton(config: Blueprint) -> Kernels:
    """Triton kernels for the parts of the model that they cover; the rest is named."""
    by_torch = dict.fromkeys(part for layer in config.kinds for part in _parts_by_torch(layer))
    found = replace(BY_TRITON, by_torch=tuple(by_torch))
    if any(isinstance(layer.mixer, Latent) for layer in config.kinds):
        return replace(found, prefill=AttentionMethod.PRODUCTS)
    return found


def _parts_by_torch(layer: LayerPlan) -> Iterator[str]:
    mixer, feed_forward = layer.mixer, layer.known_feed_forward
    if isinstance(mixer, Latent):
        yield "norms and rotation of latents"
    elif isinstance(mixer, Attention) and mixer.qk_norm is not None and not has_head_kernel(mixer.qk_norm):
        yield f"norms of queries and keys over {mixer.qk_norm.span.value}"
    if isinstance(feed_forward, Experts):
        yield "choice of experts"
        if feed_forward.branch_norm is not None:
            yield "norms of branches"
    elif isinstance(feed_forward, Dense) and not feed_forward.is_gated:
        yield f"activation {_activation_name(feed_forward.activation)}"
    if layer.has_scale:
        yield "scale of layers"


def has_head_kernel(qk_norm: QkNorm) -> bool:
    """Whether the Triton kernel of rotation and writes norms queries and keys, too."""
    is_rms = qk_norm.norm.kind not in (NormKind.LAYER, NormKind.LAYER_OFFSET)
    return qk_norm.span is NormSpan.HEAD and is_rms and not qk_norm.norm.has_bias


def _on_gpu(config: Blueprint, device: torch.device, dtype: torch.dtype, choice: KernelChoice) -> Kernels:
    reason = no_triton_because(device)
    reason = reason or no_kernels_because(config.kinds, is_float32=dtype is torch.float32)
    if reason is None:
        return by_triton(config)
    if choice is KernelChoice.COMPILED:
        raise KernelsUnavailable(f"--kernels compiled is not possible: {reason}")
    return _plain(config, reason)


def has_triton_kernels(choice: KernelChoice, device: torch.device) -> bool:
    """Whether Triton kernels compute a stage on `device`, of most models."""
    return device.type == "cuda" and choice is not KernelChoice.PLAIN and no_triton_because(device) is None


def no_triton_because(device: torch.device) -> str | None:
    """Why Triton kernels are unavailable on a GPU; None if available."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which comes with torch's builds for CUDA"
    if not torch.cuda.is_available():
        return f"torch sees no GPU for {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        return f"{device} has compute capability {found}, Triton kernels need {least}"
    return None


def _plain(config: Blueprint, not_compiled_because: str | None) -> Kernels:
    """torch's operators that every device and dtype supports."""
    return replace(PRODUCTS if _needs_products(config) else PLAIN, not_compiled_because=not_compiled_because)


def _needs_products(config: Blueprint) -> bool:
    mixers = (layer.mixer for layer in config.kinds if not isinstance(layer.mixer, Pageless))
    return any(
        isinstance(mixer, Latent | Compressed)
        or mixer.softcap is not None
        or mixer.has_sinks
        or mixer.indexer is not None
        for mixer in mixers
    )


def _check_held(what: str, device: torch.device, choice: KernelChoice) -> None:
    """Raise KernelsUnavailable without the products of `triton_kernels.held_products`."""
    reason = "it is no GPU" if device.type == "cpu" else no_triton_because(device)
    if choice is KernelChoice.PLAIN:
        reason = "chosen with --kernels plain"
    if reason is not None:
        raise KernelsUnavailable(f"{what} needs Triton kernels on {device}: {reason}")


def _quantized_products(weights: WeightFormat, dtype: torch.dtype, choice: KernelChoice) -> ProductMethod:
    if weights is WeightFormat.INT8:
        return ProductMethod.INT8
    is_compiled = choice is not KernelChoice.PLAIN and dtype is torch.bfloat16 and missing_because() is None
    return ProductMethod.COMPILED_INT4 if is_compiled and _has_threads_of_torch() else ProductMethod.INT4


def _has_threads_of_torch() -> bool:
    return bool(load().num_threads() == torch.get_num_threads())


ALL_COMPILED = Kernels(
    products=ProductMethod.COMPILED, decode=AttentionMethod.IN_PLACE, prefill=AttentionMethod.IN_PLACE
)
"""The fastest without AMX."""


def check_choice(choice: KernelChoice, device: torch.device) -> None:
    """Raises KernelsUnavailable for a choice that `device` supports for no model and dtype."""
    if choice is not KernelChoice.COMPILED:
        return
    reason = missing_because() if device.type == "cpu" else no_triton_because(device)
    if reason is not None:
        raise KernelsUnavailable(f"--kernels compiled is not possible: {reason}")


def _not_in(dtype: torch.dtype) -> str | None:
    if dtype is not torch.bfloat16:
        return f"the compiled kernels are for bf16, not for {str(dtype).removeprefix('torch.')}"
    return None if _has_bf16_products() else "oneDNN has no bfloat16 products for this CPU"


def _has_bf16_products() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU, and this torch build the operators for them."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in names)
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
