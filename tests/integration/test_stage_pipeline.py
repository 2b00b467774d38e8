"""Real stages over real gRPC: tokens equal transformers, and a bad sequence fails alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage_worker.server import Worker
from stageline_rpc.internal.v1 import forward_pb2, join_pb2, step_pb2
from tests.checkpoints import load_reference, make_checkpoint
from tests.frame_messages import encode_frame
from tests.integration.doubles import CoordinatorDouble, PredecessorDouble, WorkerLink
from tests.integration.stage_bench import (
    Log,
    assign_message,
    hop_hello,
    hop_secret,
    new_assignment,
    running_worker,
    worker_config,
)
from wire.step_codec import encode_step
from wire.steps import SliceError, Step

# Without token 0, which `generate` treats as padding.
PROMPTS = ((1, 2, 3), tuple(range(1, 41)), (7,))
MAX_TOKENS = 12
BAD_TOKEN = 99


class Pipeline:
    """`num_stages` real workers between the two ends of one coordinator double."""

    def __init__(self, coordinator: CoordinatorDouble, directory: Path, num_stages: int) -> None:
        self.coordinator = coordinator
        self.assignments = [
            new_assignment(directory, stage=stage, num_stages=num_stages) for stage in range(num_stages)
        ]
        self.workers: list[Worker] = []
        self.links: list[WorkerLink] = []
        self.log = Log(self.assignments[0])

    async def load(self) -> None:
        for link, assignment in zip(self.links, self.assignments, strict=True):
            link.send(assign=assign_message(assignment))
        for link in self.links:
            await link.answer("loaded")

    async def begin(self, epoch: int) -> PredecessorDouble:
        stages = [
            join_pb2.StageEndpoint(incarnation=link.hello.incarnation, address=link.hello.address)
            for link in self.links
        ]
        for stage, link in enumerate(self.links):
            link.send(
                begin_epoch=join_pb2.BeginEpoch(
                    plan_id=1,
                    epoch=epoch,
                    coordinator_incarnation=self.coordinator.incarnation,
                    stages=stages,
                    incoming_secret=hop_secret(epoch, stage),
                    outgoing_secret=hop_secret(epoch, stage + 1),
                )
            )
        predecessor = PredecessorDouble(self.links[0].hello.address)
        await predecessor.hello(self._hello(epoch))
        for link in self.links:
            await link.answer("epoch_ready")
        self.log.begin(epoch)
        return predecessor

    async def run(self, predecessor: PredecessorDouble) -> dict[object, SliceError]:
        """Run steps until all sequences end; return the errors of failed ones."""
        errors: dict[object, SliceError] = {}
        while (step := self.log.scheduler.next_step(0.0)) is not None:
            await predecessor.send(encode_frame(encode_step(step), step.step_id, None, to_first=True))
            result = await self.coordinator.result()
            for entry in result.results:
                if isinstance(entry.outcome, SliceError):
                    errors[entry.sequence] = entry.outcome
            self.log.complete(result)
        return errors

    def _hello(self, epoch: int) -> forward_pb2.HopHello:
        incarnation = self.coordinator.incarnation
        return hop_hello(self.assignments[0], epoch, coordinator=incarnation, sender=incarnation)


@asynccontextmanager
async def pipeline(directory: Path, num_stages: int) -> AsyncIterator[Pipeline]:
    coordinator = CoordinatorDouble()
    await coordinator.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(coordinator.stop)
        running = Pipeline(coordinator, directory, num_stages)
        for stage in range(num_stages):
            config = worker_config(coordinator.address, name=f"stage-{stage}")
            running.workers.append(await stack.enter_async_context(running_worker(config)))
            running.links.append(await coordinator.link())
        await running.load()
        yield running


def reference_tokens(directory: Path, prompt: tuple[int, ...]) -> list[int]:
    output = load_reference(directory).generate(
        torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_stages_generate_the_tokens_of_transformers_in_every_epoch(
    tiny_llama: Path, num_stages: int
) -> None:
    expected = [reference_tokens(tiny_llama, prompt) for prompt in PROMPTS]
    async with pipeline(tiny_llama, num_stages) as stages:
        for epoch in (1, 2):
            predecessor = await stages.begin(epoch)
            sequences = [stages.log.add(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
            assert not await stages.run(predecessor)
            assert [list(sequence.generated_tokens) for sequence in sequences] == expected
            for link in stages.links:
                assert (await link.next_heartbeat()).kv.blocks_active == 0
            await predecessor.close()


@pytest.fixture(scope="module")
def bad_token_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one token is NaN."""
    directory = make_checkpoint(
        tmp_path_factory.mktemp("nan"), "llama", num_layers=3, tie_word_embeddings=False
    )
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_non_finite_logits_fail_their_sequence_alone(bad_token_model: Path, num_stages: int) -> None:
    async with pipeline(bad_token_model, num_stages) as stages:
        predecessor = await stages.begin(1)
        good = stages.log.add((1, 2, 3), max_tokens=MAX_TOKENS)
        assert not await stages.run(predecessor)
        alone = good.generated_tokens
        assert BAD_TOKEN not in alone

        bad = stages.log.add((1, BAD_TOKEN, 3), max_tokens=MAX_TOKENS)
        mates = [stages.log.add((1, 2, 3), max_tokens=MAX_TOKENS) for _ in range(2)]
        errors = await stages.run(predecessor)
        assert list(errors) == [bad.key]
        error = errors[bad.key]
        assert (error.kind, error.stage) == (step_pb2.SliceError.KIND_NON_FINITE_LOGITS, num_stages - 1)
        assert [mate.generated_tokens for mate in mates] == [alone, alone]

        # Pages that held NaN are reused.
        later = [stages.log.add((1, 2, 3), max_tokens=MAX_TOKENS) for _ in range(8)]
        assert not await stages.run(predecessor)
        assert all(sequence.generated_tokens == alone for sequence in later)
        await predecessor.close()


async def test_frames_are_accepted_while_earlier_ones_are_computed(tiny_llama: Path) -> None:
    """Many frames are sent before any answer is read; each is answered, in order."""
    async with pipeline(tiny_llama, 3) as stages:
        predecessor = await stages.begin(1)
        sequence = stages.log.add(tuple(range(32)), max_tokens=1)
        step = stages.log.step()
        empty = [Step(epoch=1, step_id=step_id, digest=step.digest) for step_id in range(1, 40)]
        messages = [
            message
            for sent_step in (step, *empty)
            for message in encode_frame(encode_step(sent_step), sent_step.step_id, None, to_first=True)
        ]
        sending = asyncio.create_task(predecessor.send(messages))
        answered = [(await stages.coordinator.result()).step_id for _ in range(40)]
        await sending
        assert answered == list(range(40))
        assert sequence.num_generated_tokens == 0
        await predecessor.close()
