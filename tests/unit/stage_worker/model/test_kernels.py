"""Every kernel of a bfloat16 stage equals float32 within bfloat16 rounding."""

from __future__ import annotations

import functools
import gc
import importlib.util
import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkpoint import Blueprint, Checkpoint, Compressed, DType, parse_config
from checkpoint.blueprint import Indexer
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.decoder_layer import DecoderLayer
from stage_worker.model.kernels import (
    ALL_COMPILED,
    BY_TRITON,
    PLAIN,
    AttentionMethod,
    Kernels,
    ProductMethod,
    check_choice,
    load,
)
from stage_worker.model.layer_weights import DenseWeights, allocate_layer
from stage_worker.model.operations import operations
from stage_worker.model.projections import CompiledProjection, PackedProjection, PlainProjection
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.families import config_of
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.kernel_choices import CHOICES, IN_PLACE, PACKED_SDPA, skip_unless_possible
from tests.unit.stage_worker.model.pipeline import NanPages

BLOCK, NUM_BLOCKS, LAYERS = 8, 80, 3
MODELS = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 21}),
    "wide window": ("mistral", {"sliding_window": 150}),
    "normed heads": ("qwen3", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
}
RMS_ERROR = 0.02
"""Of the hidden states' standard deviation, after 3 layers. One rounding to the 8 bits of bfloat16 costs
0.0011 on average; measured are 0.005 to 0.012, for each model and all kernels."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made = {}
    for name, (family, overrides) in MODELS.items():
        sizes = {"head_dim": 32, "max_position_embeddings": 1024}
        directory = tmp_path_factory.mktemp("kernels")
        make_checkpoint(directory, family, num_layers=LAYERS, dtype="bfloat16", **(sizes | overrides))
        made[name] = Checkpoint.open(directory)
    return made


class Runner:
    """One stage with pages that are NaN at first, and sequences that take pages in turns."""

    def __init__(self, checkpoint: Checkpoint, dtype: DType, kernels: Kernels) -> None:
        config = checkpoint.config
        self._stage = DecoderStage(
            config,
            layer_begin=0,
            layer_end=LAYERS,
            has_embeddings=True,
            has_head=True,
            dtype=dtype,
            kernels=kernels,
        )
        self._stage.load(checkpoint)
        self.pages = NanPages.of(
            config.page_shape(config.layer_windows[0]), LAYERS, NUM_BLOCKS, BLOCK, self._stage.torch_dtype
        )
        self._generator = torch.Generator().manual_seed(5)
        self._done: dict[int, int] = {}

    def step(self, *work: tuple[int, int]) -> Tensor:
        """The next tokens of sequences: (sequence, number of tokens). Hidden states after all layers."""
        slices, num_tokens = [], sum(count for _, count in work)
        for sequence, count in work:
            first = self._done.get(sequence, 0)
            # Four sequences share the pool: every fourth page, out of memory order.
            pages = tuple((7 * block % 20) * 4 + sequence for block in range(-(-(first + count) // BLOCK)))
            slices.append(SliceLayout(first_position=first, num_tokens=count, pages=pages))
            self._done[sequence] = first + count
        tokens = torch.randint(0, 128, (num_tokens,), generator=self._generator)
        hidden = self._stage.embed(tokens)
        return self._stage.forward(hidden, layout_for(self._stage, slices, block_size=BLOCK), self.pages)


def scenario(runner: Runner) -> list[Tensor]:
    """Prompts alone, side by side and in chunks; decodes of 1 to 4 sequences; both in one step."""
    steps = [[(0, 140)], [(1, 9), (2, 30)], [(1, 1)], [(0, 1), (1, 1)], [(0, 3), (2, 1), (3, 16), (1, 1)]]
    steps += [[(3, 1), (0, 1), (1, 1), (2, 1)]] * 9
    return [runner.step(*work) for work in steps]


@pytest.fixture(scope="module")
def exact(checkpoints: dict[str, Checkpoint]) -> dict[str, Tensor]:
    return {
        name: torch.cat(scenario(Runner(checkpoint, DType.F32, PLAIN)))
        for name, checkpoint in checkpoints.items()
    }


@pytest.mark.matrix(10)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_choice_is_as_near_to_float32_as_bfloat16_allows(
    model: str, choice: str, checkpoints: dict[str, Checkpoint], exact: dict[str, Tensor]
) -> None:
    skip_unless_possible(CHOICES[choice], checkpoints[model].config)
    found = torch.cat(scenario(Runner(checkpoints[model], DType.BF16, CHOICES[choice]))).float()
    error = (found - exact[model]) / exact[model].std()
    assert float(error.square().mean().sqrt()) < RMS_ERROR
    assert float(error.square().mean(dim=1).sqrt().max()) < 3 * RMS_ERROR  # no single token is far off


def test_a_position_off_by_one_exceeds_the_tolerance(
    checkpoints: dict[str, Checkpoint], exact: dict[str, Tensor]
) -> None:
    runner = Runner(checkpoints["llama"], DType.BF16, PLAIN)
    runner.step((0, 140))
    runner._done[0] += 1
    runner.pages.fill(0, slice(68, 72))  # a skipped slot shows as a wrong value, not as NaN
    wrong = runner.step((0, 1)).float()
    error = (wrong - exact["llama"][140]) / exact["llama"].std()
    assert float(error.square().mean().sqrt()) > 3 * RMS_ERROR


@pytest.mark.parametrize("choice", CHOICES)
def test_the_nan_of_a_failed_sequence_stays_in_its_pages_and_rows(
    choice: str, checkpoints: dict[str, Checkpoint]
) -> None:
    kernels, checkpoint = CHOICES[choice], checkpoints["llama"]
    skip_unless_possible(kernels, checkpoint.config)
    clean, poisoned = (Runner(checkpoint, DType.BF16, kernels) for _ in range(2))
    for runner in (clean, poisoned):
        runner.step((0, 20))
        runner.step((1, 33))
    for block in range(20):  # sequence 1's pages
        poisoned.pages.fill(float("nan"), slice(4 * block + 1, 4 * block + 2))
    expected, found = clean.step((0, 1), (1, 1)), poisoned.step((0, 1), (1, 1))
    assert torch.equal(found[0], expected[0])
    assert not bool(torch.isfinite(found[1]).any())
    for runner in (clean, poisoned):
        del runner._done[1]  # the next owner of the same pages
    assert torch.equal(poisoned.step((1, 9), (0, 2)), clean.step((1, 9), (0, 2)))
    assert torch.equal(poisoned.step((1, 1)), clean.step((1, 1)))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_rows_that_fill_up_a_small_batch_change_nothing(
    num_tokens: int, checkpoints: dict[str, Checkpoint]
) -> None:
    skip_unless_possible(IN_PLACE, checkpoints["llama"].config)
    runner = Runner(checkpoints["llama"], DType.BF16, IN_PLACE)
    hidden = runner.step(*((sequence, 1) for sequence in range(num_tokens)))
    logits = runner._stage.logits(hidden)
    assert hidden.shape == (num_tokens, 64)
    assert logits.shape == (num_tokens, 128)
    together = torch.cat((hidden, hidden.flip(0), hidden))
    torch.testing.assert_close(logits, runner._stage.logits(together)[:num_tokens], atol=0.05, rtol=0)


@pytest.mark.parametrize("bias", [None, torch.randn(48, generator=torch.Generator().manual_seed(2))])
def test_packed_products_equal_those_of_plain_weights(
    bias: Tensor | None, checkpoints: dict[str, Checkpoint]
) -> None:
    skip_unless_possible(PACKED_SDPA, checkpoints["llama"].config)
    generator = torch.Generator().manual_seed(1)
    weight, x, residual = (torch.randn(size, generator=generator) for size in ((48, 80), (5, 80), (5, 48)))
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    if bias is not None:
        bias = bias.bfloat16()
        exact += bias.double()
    for made in (PackedProjection, PlainProjection):
        projection = made(weight.bfloat16(), bias)
        torch.testing.assert_close(projection(x.bfloat16()).double(), exact, rtol=2**-8, atol=1e-4)
        total = projection.added_to(residual.bfloat16(), x.bfloat16()).double()
        torch.testing.assert_close(total, exact + residual.bfloat16().double(), rtol=2**-7, atol=0.15)


SHAPES = [(48, 16, 1), (64, 80, 5), (130, 96, 7), (192, 64, 33), (30, 1030, 12)]
"""(out, in, rows): parts of panels and of tiles, whole ones, and several panels."""


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_products_equal_those_of_plain_weights(
    shape: tuple[int, int, int], has_bias: bool, checkpoints: dict[str, Checkpoint]
) -> None:
    skip_unless_possible(ALL_COMPILED, checkpoints["llama"].config)
    out, width, rows = shape
    generator = torch.Generator().manual_seed(1)
    weight, x, residual, bias = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((out, width), (rows, width), (rows, out), (out,))
    )
    given = bias if has_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    projection = CompiledProjection(weight, given)
    found = projection(x)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3)
    total = projection.added_to(residual, x).double()
    torch.testing.assert_close(total, exact + residual.double(), rtol=2**-8, atol=1e-3)
    gated = CompiledProjection(weight, given, is_gated=True)(x)
    halves = torch.nn.functional.pad(found.unflatten(1, (2, -1)), (0, -(out // 2) % 16))
    assert torch.equal(gated, operations(IN_PLACE).gate(halves.flatten(1))[:, : out // 2])
    for row in range(rows):  # alone, and behind another number of rows
        assert torch.equal(projection(x[row : row + 1]), found[row : row + 1])
        assert torch.equal(projection(x[: row + 1])[-1], found[row])


def test_compiled_products_take_rows_of_a_wider_tensor(checkpoints: dict[str, Checkpoint]) -> None:
    skip_unless_possible(ALL_COMPILED, checkpoints["llama"].config)
    weight, wide = torch.randn(70, 32).bfloat16(), torch.randn(9, 96).bfloat16()
    projection = CompiledProjection(weight, None)
    assert torch.equal(projection(wide[::2, 32:64]), projection(wide[::2, 32:64].contiguous()))
    assert projection(wide[:0, :32]).shape == (0, 70)
    with pytest.raises(ValueError, match="70 x 31 elements for groups of 2"):
        CompiledProjection(weight[:, :31].contiguous(), None)


def test_compiled_products_refuse_memory_that_they_would_misread(checkpoints: dict[str, Checkpoint]) -> None:
    skip_unless_possible(ALL_COMPILED, checkpoints["llama"].config)
    weight, x = torch.randn(64, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    for misread in ((weight.t(), None), (weight.float(), None), (weight, torch.randn(128).bfloat16()[::2])):
        with pytest.raises(AssertionError, match="not contiguous bfloat16"):
            CompiledProjection(*misread)
    with pytest.raises(AssertionError, match="a residual of another shape"):
        CompiledProjection(weight, None).added_to(torch.zeros(1, 64).bfloat16(), x)


@pytest.mark.parametrize("has_threads", [True, False])
def test_compiled_products_need_the_threads_of_torch_and_no_amx(
    has_threads: bool, checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cpu = checkpoints["llama"].config, torch.device("cpu")
    skip_unless_possible(ALL_COMPILED, config)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: load().num_threads() + (not has_threads))
    assert Kernels.of(config, cpu, torch.bfloat16) == (ALL_COMPILED if has_threads else IN_PLACE)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    chosen = Kernels.of(config, cpu, torch.bfloat16)
    assert chosen.products is ProductMethod.ONEDNN
    assert chosen.prefill is AttentionMethod.SDPA


def with_threads(num_threads: int, compute: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert load().num_threads() == num_threads
        return compute()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_gated", [False, True])
def test_the_number_of_threads_changes_no_product(is_gated: bool, checkpoints: dict[str, Checkpoint]) -> None:
    skip_unless_possible(ALL_COMPILED, checkpoints["llama"].config)
    projection = CompiledProjection(torch.randn(2500, 256).bfloat16(), None, is_gated=is_gated)
    x = torch.randn(9, 256).bfloat16()
    assert torch.equal(with_threads(4, lambda: projection(x)), with_threads(1, lambda: projection(x)))


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_the_number_of_threads_changes_no_attention(
    num_threads: int, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints["llama"]
    skip_unless_possible(ALL_COMPILED, checkpoint.config)

    def compute() -> Tensor:
        runner = Runner(checkpoint, DType.BF16, ALL_COMPILED)
        return torch.cat([runner.step((0, 155), (1, 139)), runner.step((0, 1), (1, 1))])

    assert torch.equal(with_threads(num_threads, compute), with_threads(1, compute))


@pytest.mark.parametrize(("kernels", "is_kept"), [(PLAIN, True), (PACKED_SDPA, False), (ALL_COMPILED, False)])
def test_packed_weights_are_in_memory_once(
    kernels: Kernels, is_kept: bool, checkpoints: dict[str, Checkpoint]
) -> None:
    config = checkpoints["llama"].config
    skip_unless_possible(kernels, config)
    new = functools.partial(torch.zeros, dtype=torch.bfloat16)
    weights, destinations = allocate_layer(config, 0, new)
    assert isinstance(weights.feed_forward, DenseWeights)
    matrix = weakref.ref(weights.feed_forward.up)
    layer = DecoderLayer(config.layers[0], weights, kernels)
    del weights, destinations
    gc.collect()
    assert (matrix() is not None) is is_kept, layer


def test_only_bfloat16_on_a_cpu_uses_special_kernels(
    checkpoints: dict[str, Checkpoint],
) -> None:
    config = checkpoints["llama"].config
    for dtype in (torch.float32, torch.float16):
        chosen = Kernels.of(config, torch.device("cpu"), dtype)
        assert chosen == PLAIN
        assert chosen.choice is KernelChoice.PLAIN
        assert "the compiled kernels are for" in str(chosen)
    skip_unless_possible(IN_PLACE, config)
    chosen = Kernels.of(config, torch.device("cpu"), torch.bfloat16)
    assert chosen.products is not ProductMethod.LINEAR
    assert chosen.decode is AttentionMethod.IN_PLACE
    assert "compiled kernels" in str(chosen)
    assert chosen.choice is KernelChoice.COMPILED
    assert Kernels.of(config, torch.device("cpu"), torch.bfloat16, KernelChoice.PLAIN) == PLAIN
    assert Kernels.of(config, torch.device("cpu"), torch.bfloat16, KernelChoice.COMPILED) == chosen


def test_unavailable_compiled_kernels_are_rejected_with_the_reason(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cpu = checkpoints["llama"].config, torch.device("cpu")
    skip_unless_possible(IN_PLACE, config)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, head_dim=16)) for layer in config.layers)
    narrow = replace(config, layers=layers)
    for shape, device, dtype, reason in (
        (config, "cpu", torch.float32, "for bf16, not for float32"),
        (narrow, "cpu", torch.bfloat16, "heads of 16"),
    ):
        with pytest.raises(KernelsUnavailable, match=f"--kernels compiled is not possible: .*{reason}"):
            Kernels.of(shape, torch.device(device), dtype, KernelChoice.COMPILED)
    check_choice(KernelChoice.COMPILED, cpu)
    monkeypatch.setattr("stage_worker.model.kernels._MODULE", "stage_worker.model._not_built")
    with pytest.raises(KernelsUnavailable, match="were not built"):
        check_choice(KernelChoice.COMPILED, cpu)
    check_choice(KernelChoice.AUTO, cpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of compute capability 8.6 beside an installed triton, for choices."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    return torch.device("cuda:1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpus_use_triton_kernels(
    dtype: torch.dtype, checkpoints: dict[str, Checkpoint], gpu: torch.device
) -> None:
    chosen = Kernels.of(checkpoints["llama"].config, gpu, dtype)
    assert chosen == BY_TRITON
    assert chosen.choice is KernelChoice.COMPILED
    assert str(chosen) == (
        "plain weights, single rows by Triton kernels, decode by Triton kernels, prefill by Triton kernels"
    )
    assert Kernels.of(checkpoints["llama"].config, gpu, dtype, KernelChoice.PLAIN) == PLAIN
    check_choice(KernelChoice.COMPILED, gpu)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("importlib.util.find_spec", None, "triton is not installed"),
        ("torch.cuda.is_available", False, "torch sees no GPU for cuda:1"),
        ("torch.cuda.get_device_capability", (7, 5), "cuda:1 has compute capability 7.5, .* need 8.0"),
    ],
)
def test_gpus_without_triton_kernels_say_why(
    name: str,
    value: object,
    reason: str,
    checkpoints: dict[str, Checkpoint],
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name, lambda *_: value)
    config = checkpoints["llama"].config
    chosen = Kernels.of(config, gpu, torch.bfloat16)
    assert chosen == PLAIN
    assert re.search(reason, str(chosen))
    for refuse in (
        lambda: Kernels.of(config, gpu, torch.bfloat16, KernelChoice.COMPILED),
        lambda: check_choice(KernelChoice.COMPILED, gpu),
    ):
        with pytest.raises(KernelsUnavailable, match=f"--kernels compiled is not possible: .*{reason}"):
            refuse()


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", ()),
        ("gemma3_text", ()),
        ("olmo2", ("norms of queries and keys over all heads",)),
        ("nemotron", ("activation relu2",)),
        ("deepseek_v3", ("norms and rotation of latents", "choice of experts")),
    ],
)
def test_what_triton_kernels_leave_to_torch_is_named(
    family: str, parts: tuple[str, ...], gpu: torch.device
) -> None:
    chosen = Kernels.of(parse_config(config_of(family)), gpu, torch.bfloat16)
    assert chosen.decode is AttentionMethod.TRITON
    assert chosen.by_torch == parts
    assert str(chosen).endswith(f"by torch's operators: {', '.join(parts)}") is bool(parts)


def test_latents_in_float32_are_left_to_torch(gpu: torch.device) -> None:
    config = parse_config(config_of("deepseek_v3"))
    chosen = Kernels.of(config, gpu, torch.float32)
    assert chosen.decode is AttentionMethod.PRODUCTS
    assert "for bf16 and f16" in str(chosen)
    assert Kernels.of(config, gpu, torch.float16).decode is AttentionMethod.TRITON


def with_mixers(config: Blueprint, **changes: object) -> Blueprint:
    """`config` with these fields of all mixers."""
    layers = [replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers]  # type: ignore[arg-type]
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_kernels_choose_tokens(family: str, gpu: torch.device) -> None:
    config = parse_config(config_of(family))
    for dtype in (torch.bfloat16, torch.float16):
        chosen = Kernels.of(config, gpu, dtype)
        assert (chosen.decode, chosen.prefill) == (AttentionMethod.TRITON, AttentionMethod.PRODUCTS)
    assert Kernels.of(config, gpu, torch.float32).decode is AttentionMethod.PRODUCTS


def test_kernels_attend_to_entries(gpu: torch.device) -> None:
    config = parse_config(config_of("deepseek_v4"))
    chosen = Kernels.of(config, gpu, torch.bfloat16)
    assert (chosen.decode, chosen.prefill) == (AttentionMethod.TRITON, AttentionMethod.TRITON)
    assert Kernels.of(config, gpu, torch.float32).decode is AttentionMethod.PRODUCTS


def test_choices_that_kernels_do_not_make_are_left_to_torch(gpu: torch.device) -> None:
    config = parse_config(config_of("deepseek_v32"))
    indexer = config.layers[0].mixer.indexer  # type: ignore[union-attr]
    assert isinstance(indexer, Indexer)
    first, *others = config.layers
    unequal = (replace(first, mixer=replace(first.mixer, top_k=8)), *others)  # type: ignore[arg-type]
    for other, reason in (
        (with_mixers(config, top_k=4097), "choose up to 4096 tokens, not 4097"),
        (with_mixers(config, indexer=replace(indexer, num_heads=256)), "no indexer of 256 heads of 16"),
        (replace(config, layers=unequal), "as many tokens in each layer"),
    ):
        chosen = Kernels.of(other, gpu, torch.bfloat16)
        assert (chosen.decode, chosen.prefill) == (AttentionMethod.PRODUCTS, AttentionMethod.PRODUCTS)
        assert reason in str(chosen)
        with pytest.raises(KernelsUnavailable, match=f"compiled is not possible: .* {reason}"):
            Kernels.of(other, gpu, torch.bfloat16, KernelChoice.COMPILED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_chosen": 4097}, "choose up to 4096 entries, not 4097"),
        ({"num_heads": 256}, "no indexer of 256 heads of 16"),
        ({"head_dim": 512}, "no indexer of 16 heads of 512"),
    ],
)
def test_entries_that_kernels_do_not_choose_are_left_to_torch(
    changes: dict[str, int], reason: str, gpu: torch.device
) -> None:
    config = parse_config(config_of("deepseek_v4"))
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Compressed)]
    choosing = next(mixer.compressor for mixer in mixers if mixer.compressor and mixer.compressor.indexer)
    assert choosing.indexer is not None
    compressor = replace(choosing, indexer=replace(choosing.indexer, **changes))
    chosen = Kernels.of(with_mixers(config, compressor=compressor), gpu, torch.bfloat16)
    assert (chosen.decode, chosen.prefill) == (AttentionMethod.PRODUCTS, AttentionMethod.PRODUCTS)
    assert reason in str(chosen)


def test_an_older_compiled_module_is_not_used(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoints["llama"].config
    skip_unless_possible(IN_PLACE, config)
    monkeypatch.delattr(load(), "IN_FP8")
    chosen = Kernels.of(config, torch.device("cpu"), torch.bfloat16)
    assert chosen.decode is AttentionMethod.PRODUCTS
    assert "older than this Stageline: install it again" in str(chosen)


def test_without_the_compiled_module_torch_products_are_used_with_a_warning(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoints["llama"].config
    skip_unless_possible(PACKED_SDPA, config)
    monkeypatch.setattr("stage_worker.model.kernels._MODULE", "stage_worker.model._not_built")
    chosen = Kernels.of(config, torch.device("cpu"), torch.bfloat16)
    assert chosen.decode is AttentionMethod.PRODUCTS
    assert "not built" in str(chosen)
