"""Texts sampled under grammars as on the last stage, from random logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stage_worker.sampling.grammar_masks import GrammarMasks
from text.detokenizer import IncrementalDetokenizer
from text.grammars import GrammarCompiler, GrammarKind
from text.tokenizer import TextCodec, load_text_codec
from wire.ids import SequenceKey, new_request_id
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import StartRecord

VOCAB_SIZE = 420
"""Of the model; its head is wider than the vocabularies of the trained tokenizers."""
EOS = (2, 3)
MAX_TOKENS = 2_000


class InlinePool(Executor):
    """Runs work immediately on the calling thread and counts the calls."""

    def __init__(self) -> None:
        self.num_pieces = 0

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.num_pieces += 1
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class HeldPool(Executor):
    """Works on demand."""

    def __init__(self) -> None:
        self._held: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        self._held.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self) -> None:
        """Run all held work, and what it submits."""
        while self._held:
            future, work = self._held.pop(0)
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Setting:
    """A tokenizer with its grammar compiler and masks."""

    directory: Path
    compiler: GrammarCompiler
    codec: TextCodec

    @classmethod
    def of(cls, directory: Path) -> Setting:
        codec = load_text_codec(directory)
        assert codec is not None
        return cls(directory, GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS), codec)

    def masks(self, pool: Executor | None = None, *, wait_s: float = 10.0) -> GrammarMasks:
        return GrammarMasks(
            self.directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, pool=pool, wait_s=wait_s
        )

    def spec(self, kind: GrammarKind, *texts: str) -> GrammarSpec:
        return self.compiler.compile(kind, texts)


@dataclass(slots=True)
class Walk:
    """One sequence, token by token, with its prompt."""

    setting: Setting
    masks: GrammarMasks
    spec: GrammarSpec
    seed: int = 0
    is_greedy: bool = False
    key: SequenceKey = field(default_factory=lambda: SequenceKey(new_request_id(), 0))
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = self.setting.codec.encode("The fox said:")

    def record(self) -> StartRecord:
        sampling = StepSampling(grammar=self.spec)
        tokens = (*self.prompt, *self.tokens)
        return StartRecord(self.key, 1, len(self.prompt), tokens, sampling)

    def text(self) -> str:
        """Text of the sampled tokens, as a client gets it."""
        detokenizer = IncrementalDetokenizer(self.setting.codec, self.prompt)
        return detokenizer.push(self.tokens) + detokenizer.flush()

    def logits(self) -> Tensor:
        """A row of random logits that depends on the seed and the position only."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + len(self.tokens))
        return torch.randn(1, VOCAB_SIZE, generator=generator)

    def allowed(self) -> list[int]:
        """The ids that the grammar allows next."""
        assert not self.masks.late([self.key])
        logits = torch.zeros(1, VOCAB_SIZE)
        assert self.masks.apply(logits, [(0, self.key)]) == {}
        return torch.nonzero(logits[0] == 0).flatten().tolist()

    def sample(self) -> int:
        """The next token, chosen under the grammar."""
        logits = self.logits()
        assert not self.masks.late([self.key])
        assert self.masks.apply(logits, [(0, self.key)]) == {}
        if self.is_greedy:
            return int(logits.argmax())
        allowed = torch.nonzero(torch.isfinite(logits[0])).flatten().tolist()
        return random.Random(self.seed * 7 + len(self.tokens)).choice(allowed)

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        [token] = self.setting.codec.encode(text)[1:]
        return token

    def feed(self, text: str) -> None:
        """Receives a token chosen elsewhere."""
        self.tokens.append(self.token(text))
        self.masks.advance(self.key, self.tokens[-1])

    def step(self) -> bool:
        """Samples a token and feeds it; False when it ended the sequence."""
        token = self.sample()
        self.tokens.append(token)
        self.masks.precompute(self.key, token)
        if token in EOS:
            return False
        self.masks.advance(self.key, token)
        return True

    def run(self) -> str:
        """From the start to an end-of-sequence token; returns the text."""
        assert self.masks.start(self.record()) is None
        for _ in range(MAX_TOKENS):
            if not self.step():
                self.masks.end(self.key)
                return self.text()
        raise AssertionError(f"no end after {MAX_TOKENS} tokens: {self.text()[:200]!r}")


def walk_many(setting: Setting, spec: GrammarSpec, seeds: Sequence[int], *, is_greedy: bool) -> list[str]:
    """The texts of several sequences, one after the other."""
    masks = setting.masks(InlinePool())
    return [Walk(setting, masks, spec, seed=seed, is_greedy=is_greedy).run() for seed in seeds]
