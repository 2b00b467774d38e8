"""Kernel choice of a stage, made once and reported.

torch's operators replace the compiled module where no C compiler was available at installation, and for
shapes and CPUs that it does not support.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType

import torch

from checkpoint import Blueprint, Experts, Latent, LayerPlan, WeightFormat
from checkpoint.blueprint import Activation, NormKind
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable

_MODULE = "stage_worker.model._cpu_kernels"
_HEAD_DIMS = (32, 64, 96, 128, 256)
_MOST_ELEMENTS = 64 * 256
_LANES = 16


def load() -> ModuleType:
    """Import the compiled module. Raises ImportError if it was not built."""
    return importlib.import_module(_MODULE)


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
    attention, dense = layer.mixer, layer.feed_forward
    if isinstance(attention, Latent):
        return "latent attention is not supported by the kernels"
    if isinstance(dense, Experts):
        return "mixtures of experts are not supported by the kernels"
    if attention.head_dim not in _HEAD_DIMS or attention.q_size > _MOST_ELEMENTS:
        return f"{attention.num_heads} heads of {attention.head_dim} are not supported by the kernels"
    if hidden_size % _LANES or dense.width % _LANES:
        return f"widths {hidden_size} and {dense.width} are not multiples of {_LANES}"
    if layer.norm.kind is not NormKind.RMS:
        return f"norms with {layer.norm.kind.value} are not supported by the kernels"
    if not dense.is_gated or dense.activation is not Activation.SILU:
        return f"an MLP with {dense.activation.value} is not supported by the kernels"
    if attention.qk_norm is not None and attention.qk_norm.is_after_rotation:
        return "norms after the rotation are not supported by the kernels"
    if attention.has_sinks:
        return "attention sinks are not supported by the kernels"
    return "limited scores are not supported by the kernels" if attention.softcap is not None else None


class ProductMethod(Enum):
    """Matrix products of a layer; the value is their name in logs."""

    LINEAR = "plain weights"
    ONEDNN = "packed weights"
    COMPILED = "compiled products"
    INT8 = "int8 weights"
    INT4 = "int4 weights"
    COMPILED_INT4 = "compiled products of int4 weights"

    @property
    def can_gate(self) -> bool:
        """Whether one product computes silu(gate) * up."""
        return self in (ProductMethod.COMPILED, ProductMethod.COMPILED_INT4)


class AttentionMethod(Enum):
    """Attention implementation; the value is its name in logs."""

    SDPA = "scaled_dot_product_attention"
    PRODUCTS = "batched products"
    IN_PLACE = "compiled kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Functions of a stage's layers.

    `products`: oneDNN's are for CPUs with AMX, or without compiled kernels. `quantized`: products of layers
    with `--quantize`. `decode` and `prefill`: attention of one-token slices, and of longer ones. IN_PLACE for
    decodes implies compiled norms, rotation and gates (see `operations`).
    """

    products: ProductMethod
    decode: AttentionMethod
    prefill: AttentionMethod
    quantized: ProductMethod | None = None
    not_compiled_because: str | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        config: Blueprint,
        device: torch.device,
        dtype: torch.dtype,
        choice: KernelChoice = KernelChoice.AUTO,
    ) -> Kernels:
        """Select the kernels; AUTO takes the fastest for `dtype` on `device`, see bench/STUDIES.md.

        Only bfloat16 on a CPU differs. With AMX, SDPA packs keys, which pays off for prompts but not for
        one query per sequence. Compiled products and attention of prompts need torch's threads. Raises
        KernelsUnavailable for COMPILED where unsupported, and for quantised weights except on a CPU.
        """
        found = cls._of_run_dtype(config, device, dtype, choice)
        weights = config.weight_format
        if weights is None:
            return found
        if device.type != "cpu":
            raise KernelsUnavailable(f"--quantize {weights.value} is for workers on a CPU, not on {device}")
        return replace(found, quantized=_quantized_products(weights, dtype, choice))

    @classmethod
    def _of_run_dtype(
        cls, config: Blueprint, device: torch.device, dtype: torch.dtype, choice: KernelChoice
    ) -> Kernels:
        if choice is KernelChoice.PLAIN:
            return _plain(config, "chosen with --kernels plain")
        reason = _not_on(device) or _not_in(dtype) or unavailable_because(config)
        if choice is KernelChoice.COMPILED and reason is not None:
            raise KernelsUnavailable(f"--kernels compiled is not possible: {reason}")
        if device.type != "cpu" or dtype is not torch.bfloat16 or not _has_bf16_products():
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
    def choice(self) -> KernelChoice:
        """COMPILED where compiled functions compute a layer's operations, else PLAIN."""
        is_compiled = self.decode is AttentionMethod.IN_PLACE
        return KernelChoice.COMPILED if is_compiled else KernelChoice.PLAIN

    def __str__(self) -> str:
        reason = f" ({self.not_compiled_because})" if self.not_compiled_because else ""
        decode = f"decode by {self.decode.value}{reason}"
        return f"{self.layer_products.value}, {decode}, prefill by {self.prefill.value}"


PLAIN = Kernels(products=ProductMethod.LINEAR, decode=AttentionMethod.SDPA, prefill=AttentionMethod.SDPA)
"""Supported by every device and dtype, for attention over keys without a limit of scores and sinks."""

_PRODUCTS = replace(PLAIN, decode=AttentionMethod.PRODUCTS, prefill=AttentionMethod.PRODUCTS)
"""scaled_dot_product_attention has no limit of scores and no sinks, and no fast kernel for latents."""


def _plain(config: Blueprint, not_compiled_because: str | None) -> Kernels:
    """torch's operators that every device and dtype supports."""
    return replace(_PRODUCTS if _needs_products(config) else PLAIN, not_compiled_because=not_compiled_because)


def _needs_products(config: Blueprint) -> bool:
    mixers = (layer.mixer for layer in config.kinds)
    return any(isinstance(mixer, Latent) or mixer.softcap is not None or mixer.has_sinks for mixer in mixers)


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
    if choice is KernelChoice.COMPILED and (reason := _not_on(device) or missing_because()) is not None:
        raise KernelsUnavailable(f"--kernels compiled is not possible: {reason}")


def _not_on(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"the compiled kernels are for CPUs, not for {device}"


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
