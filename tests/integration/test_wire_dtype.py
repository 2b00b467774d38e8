"""Hidden states sent in a smaller dtype than computed: in whole clusters, on one stage, on mocks."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import StageOutput
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.backends.tensor_views import from_wire, to_wire
from stage_worker.executor import BegunStep, StepExecutor
from stageline_rpc.internal.v1 import join_pb2, step_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.frame_messages import encode_frame
from tests.integration.cluster import Cluster, RequestCase
from tests.integration.doubles import PredecessorDouble, StreamEnded
from tests.integration.scenario import HIDDEN_SIZE
from tests.integration.stage_bench import Log, StageBench, assign_message, new_assignment, stage_bench
from tests.local_pipeline import LocalPipeline
from tests.mock_answers import mock_tokens
from wire.errors import StepFaultKind
from wire.frames import Frame
from wire.step_codec import encode_step
from wire.steps import SliceError, Step, StepResult
from wire.tensors import TensorView, WireDType, number_of

FP8, INT8 = ScaledDType.F8_E4M3, ScaledDType.I8
MIDDLE, LAST = 1, 2
LAYERS = (1, 1, 1)
CASES = [RequestCase(prompt=tuple(range(first, first + 9)), max_tokens=12) for first in (3, 40, 77, 101)]


@pytest.fixture(scope="module")
def bf16_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("bf16"), "llama", num_layers=3, initializer_range=0.3, dtype="bfloat16"
    )


async def tokens_of(
    directory: Path,
    dtype: str,
    wire_dtype: str | None,
    worker_wire_dtypes: dict[str, WireDType] | None = None,
) -> list[list[int]]:
    """Tokens of sequential requests, so that rounding is the same in every run."""
    async with Cluster(
        directory,
        layers=LAYERS,
        dtype=dtype,
        wire_dtype=wire_dtype,
        worker_wire_dtypes=worker_wire_dtypes,
    ) as cluster:
        answers = [await cluster.generate(case.again()) for case in CASES]
        assert all(answer.succeeded for answer in answers)
        return [answer.tokens for answer in answers]


def num_equal(tokens: list[list[int]], others: list[list[int]]) -> int:
    """Total number of tokens before the first difference, over all requests."""
    count = 0
    for ours, theirs in zip(tokens, others, strict=True):
        pairs = zip(ours, theirs, strict=True)
        count += next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))
    return count


@pytest.mark.full
async def test_a_bf16_model_generates_the_same_tokens_over_bf16(bf16_llama: Path) -> None:
    assert await tokens_of(bf16_llama, "bf16", "bf16") == await tokens_of(bf16_llama, "bf16", None)


@pytest.mark.full
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp8", "int8"])
async def test_a_smaller_wire_dtype_changes_few_tokens(varied_llama: Path, wire_dtype: str) -> None:
    exact = await tokens_of(varied_llama, "f32", None)
    tokens = await tokens_of(varied_llama, "f32", wire_dtype)
    assert [len(output) for output in tokens] == [len(output) for output in exact]
    assert num_equal(tokens, exact) >= {"bf16": 40, "fp8": 8, "int8": 16}[wire_dtype]


@pytest.mark.full
async def test_status_shows_the_wire_dtype(varied_llama: Path) -> None:
    async with Cluster(varied_llama, layers=LAYERS, wire_dtype="int8") as cluster:
        assert (await cluster.client.status()).wire_dtype == cluster_pb2.DTYPE_I8
    async with Cluster(varied_llama, layers=LAYERS) as cluster:
        assert (await cluster.client.status()).wire_dtype == cluster_pb2.DTYPE_UNSPECIFIED


@pytest.mark.full
async def test_a_worker_overrides_the_wire_dtype_that_it_sends(
    varied_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1 receives the dtype of worker 0, stage 2 that of the coordinator."""
    seen: dict[int, set[WireDType]] = {}
    begin = StepExecutor.begin

    def recording(executor: StepExecutor, frame: Frame) -> BegunStep:
        if frame.hidden and frame.step.epoch:
            seen.setdefault(len(frame.stage_times), set()).add(frame.hidden[0].dtype)
        return begin(executor, frame)

    monkeypatch.setattr(StepExecutor, "begin", recording)
    assert await tokens_of(varied_llama, "f32", "int8", {"w0": DType.BF16})
    assert seen == {1: {DType.BF16}, 2: {INT8}}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("overrides", [{}, {"w0": FP8}, {"w1": INT8}], ids=["same", "w0", "w1"])
async def test_mock_stages_send_payloads_of_the_right_size(
    wire_dtype: str, overrides: dict[str, WireDType]
) -> None:
    model = "layers=3,hidden=33,vocab=1000"
    async with Cluster(
        None,
        layers=LAYERS,
        mock=MockSpec(),
        mock_model=model,
        wire_dtype=wire_dtype,
        worker_wire_dtypes=overrides,
    ) as cluster:
        answer = await cluster.generate(RequestCase(prompt=(1, 2, 3), max_tokens=5))
    assert answer.tokens == mock_tokens((1, 2, 3), 5, vocab_size=1000)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("num_prompts", [1, 6])
def test_received_hidden_states_are_not_modified(
    bf16_llama: Path, dtype: DType, num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = StepExecutor.compute
    num_checked = 0

    def checking(executor: StepExecutor, frame: Frame) -> StageOutput:
        nonlocal num_checked
        if not frame.hidden:
            return compute(executor, frame)
        (tensor,) = frame.hidden
        # Aligned to 16 bytes, so that it is computed in place.
        data = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).numpy().data
        before = bytes(data)
        view = TensorView(tensor.dtype, tensor.shape, data.toreadonly())
        output = compute(executor, replace(frame, hidden=(view,)))
        assert bytes(data) == before
        num_checked += 1
        return output

    monkeypatch.setattr(StepExecutor, "compute", checking)
    pipeline = LocalPipeline(bf16_llama, LAYERS, dtype=dtype)
    prompts = [tuple(range(first, first + 20)) for first in range(num_prompts)]
    assert all(pipeline.generate(prompts, max_tokens=4))
    assert num_checked >= 8


def stage_of(directory: Path, stage: int, wire_dtype: WireDType | None = None) -> Assignment:
    return replace(new_assignment(directory, stage=stage), wire_dtype=wire_dtype)


async def predecessor_in(bench: StageBench, wire_dtype: WireDType | None) -> PredecessorDouble:
    """An accepted stream with `wire_dtype` declared."""
    hello = bench.hello()
    hello.wire_dtype = number_of(wire_dtype)
    predecessor = PredecessorDouble(bench.worker.advertised_address)
    try:
        await predecessor.hello(hello)
    except StreamEnded:
        await predecessor.close()
        raise
    return predecessor


def first_step(bench: StageBench) -> Step:
    """A prefill of two prompts of four tokens."""
    log = Log(bench.assignment)
    log.begin(bench.epoch)
    log.add((1, 2, 3, 4))
    log.add((5, 6, 7, 8))
    return log.step()


async def send(predecessor: PredecessorDouble, step: Step, hidden: TensorView) -> None:
    await predecessor.send(encode_frame(encode_step(step), step.step_id, (hidden,)))


@pytest.mark.parametrize(
    ("number", "details"),
    [
        (cluster_pb2.DTYPE_F16, "wire dtype mismatch: expected f32 or bf16 or fp8 or int8, got f16"),
        (77, "wire dtype mismatch: expected f32 or bf16 or fp8 or int8, got number 77"),
    ],
)
async def test_a_hello_with_an_unknown_wire_dtype_is_rejected(
    tiny_llama: Path, number: int, details: str
) -> None:
    async with stage_bench(stage_of(tiny_llama, MIDDLE)) as bench:
        await bench.begin_epoch()
        hello = bench.hello()
        hello.wire_dtype = number  # type: ignore[assignment]
        predecessor = PredecessorDouble(bench.worker.advertised_address)
        with pytest.raises(StreamEnded) as ended:
            await predecessor.hello(hello)
        await predecessor.close()
        assert ended.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert details in ended.value.details
        await (await predecessor_in(bench, FP8)).close()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("declared", [None, DType.BF16, FP8, INT8])
@pytest.mark.parametrize("sent", [DType.F32, DType.BF16, FP8, INT8])
async def test_a_frame_in_another_dtype_than_declared_is_rejected(
    tiny_llama: Path, declared: WireDType | None, sent: WireDType
) -> None:
    if sent is (declared or DType.F32):
        return
    async with stage_bench(stage_of(tiny_llama, MIDDLE)) as bench:
        await bench.begin_epoch()
        predecessor = await predecessor_in(bench, declared)
        step = first_step(bench)
        # Of one token: the wrong dtype in fewer bytes than the declared one allows.
        await send(predecessor, step, to_wire(torch.randn(1, HIDDEN_SIZE), sent))
        fault = await bench.link.fault()
        assert (fault.kind, fault.step_id) == (StepFaultKind.DTYPE, 0)
        assert f"hidden states in {sent.value}, expected {(declared or DType.F32).value}" in fault.message
        assert not bench.has_output
        await predecessor.close()


@pytest.mark.parametrize(("declared", "most"), [(None, 8192), (DType.BF16, 4096), (FP8, 2176), (INT8, 2176)])
async def test_a_payload_is_limited_to_the_size_of_the_declared_dtype(
    tiny_llama: Path, declared: WireDType | None, most: int
) -> None:
    async with stage_bench(stage_of(tiny_llama, MIDDLE)) as bench:
        await bench.begin_epoch()
        predecessor = await predecessor_in(bench, declared)
        one_too_many = torch.randn(bench.assignment.max_step_tokens + 1, HIDDEN_SIZE)
        hidden = to_wire(one_too_many, declared or DType.F32)
        await send(predecessor, first_step(bench), hidden)
        fault = await bench.link.fault()
        await predecessor.close()
    assert fault.kind is StepFaultKind.SHAPE
    assert f"payload has {hidden.size_bytes} bytes or more, the limit is {most}" in fault.message


@pytest.mark.matrix(1)
@pytest.mark.parametrize("taken", [DType.F32, FP8, INT8])
@pytest.mark.parametrize("given", [DType.BF16, FP8, INT8])
async def test_a_stage_receives_the_declared_dtype_and_sends_the_assigned_one(
    tiny_llama: Path, taken: WireDType, given: WireDType
) -> None:
    async with stage_bench(stage_of(tiny_llama, MIDDLE)) as bench:
        message = assign_message(replace(bench.assignment, plan_id=2))
        message.wire_dtype = number_of(given)
        bench.link.send(assign=message)
        await bench.link.answer("loaded")
        bench.assignment = replace(bench.assignment, plan_id=2, wire_dtype=given)
        await bench.begin_epoch()
        predecessor = await predecessor_in(bench, taken)
        step = first_step(bench)
        hidden = to_wire(torch.randn(step.num_tokens, HIDDEN_SIZE), taken)
        await send(predecessor, step, hidden)
        output = await bench.output()
        assert not isinstance(output, StepResult)
        assert (output[0].dtype, output[0].shape) == (given, hidden.shape)
        assert (await bench.next_stage.hellos.get()).wire_dtype == number_of(given)
        await predecessor.close()


async def test_a_wire_dtype_as_wide_as_the_model_is_rejected(tiny_llama: Path) -> None:
    async with stage_bench(stage_of(tiny_llama, MIDDLE)) as bench:
        message = assign_message(replace(bench.assignment, plan_id=2))
        for number, details in ((cluster_pb2.DTYPE_F16, "f16 is not smaller"), (77, "wire dtype number 77")):
            message.wire_dtype = number  # type: ignore[assignment]
            bench.link.send(assign=message)
            failed: join_pb2.LoadFailed = await bench.link.answer("load_failed")
            assert details in failed.reason


@pytest.mark.matrix(1)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("wire_dtype", [None, DType.BF16, FP8, INT8])
async def test_a_non_finite_hidden_state_fails_only_its_own_request(
    tiny_llama: Path, wire_dtype: WireDType | None, bad: float
) -> None:
    hidden = torch.randn(8, HIDDEN_SIZE)
    hidden[5, 3] = bad
    for stage in (MIDDLE, LAST):
        async with stage_bench(stage_of(tiny_llama, stage)) as bench:
            await bench.begin_epoch()
            predecessor = await predecessor_in(bench, wire_dtype)
            await send(predecessor, first_step(bench), to_wire(hidden, wire_dtype or DType.F32))
            output = await bench.output()
            await predecessor.close()
        if isinstance(output, StepResult):
            fine, failed = output.results
            assert isinstance(fine.outcome, int)
            assert isinstance(failed.outcome, SliceError)
            assert failed.outcome.kind == step_pb2.SliceError.KIND_NON_FINITE_LOGITS
        else:
            handed_on = from_wire(output[0], device=torch.device("cpu"), dtype=torch.float32)
            assert handed_on[:4].isfinite().all()
            assert not handed_on[5:].isfinite().all()
