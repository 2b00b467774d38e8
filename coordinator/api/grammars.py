"""Grammars of requests: one compiles at a time for each client, and outcomes are remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import TypeAlias

from stageline_rpc.v1 import inference_pb2
from wire.errors import InvalidRequest
from wire.sampling import GrammarSpec
from wire.tenant_shares import TenantCache
from wire.tenant_threads import TenantThreads

GRAMMAR_THREADS = 4
"""Grammars compiled at a time: a hostile one takes a second, nearly all of it without the interpreter."""
MAX_REMEMBERED_BYTES = 32 << 20
ENTRY_BYTES = 1024
"""What an outcome takes beside its grammar; the text of a refusal is short."""

BadWords: TypeAlias = tuple[tuple[int, ...], ...]
Compile = Callable[[inference_pb2.SamplingParameters, BadWords], GrammarSpec]


@dataclass(frozen=True, slots=True)
class _Outcome:
    grammar: GrammarSpec | None
    refusal: InvalidRequest | None = None

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + (0 if self.grammar is None else len(self.grammar.definition))


class ClientGrammars:
    """Compiles grammars of clients. The same grammar of the same client costs nothing while it is known."""

    def __init__(self, compile_grammar: Compile) -> None:
        """`compile_grammar` is called on threads; raises InvalidRequest."""
        self._compile = compile_grammar
        self._threads = TenantThreads(GRAMMAR_THREADS, per_tenant=1, name="grammar")
        self._outcomes = TenantCache[bytes, _Outcome](max_bytes=MAX_REMEMBERED_BYTES)
        self._lock = Lock()

    async def grammar_of(
        self, client: str, sampling: inference_pb2.SamplingParameters, bad_words: BadWords
    ) -> GrammarSpec | None:
        """Return the grammar of a structured output, if there is one. Raises InvalidRequest."""
        if sampling.WhichOneof("structured_output") is None:
            return None
        key = _digest(sampling)
        if (outcome := self._known(client, key)) is None:
            outcome = await self._threads.run(client, self._outcome, client, key, sampling, bad_words)
        if outcome.refusal is not None:
            raise outcome.refusal.again()
        return outcome.grammar

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.close()

    def _known(self, client: str, key: bytes) -> _Outcome | None:
        with self._lock:
            return self._outcomes.get(client, key)

    def _outcome(
        self, client: str, key: bytes, sampling: inference_pb2.SamplingParameters, bad_words: BadWords
    ) -> _Outcome:
        """Compile, unless the request before this one in the client's queue had the same grammar."""
        if (known := self._known(client, key)) is not None:
            return known
        try:
            outcome = _Outcome(self._compile(sampling, bad_words))
        except InvalidRequest as refusal:
            outcome = _Outcome(None, refusal.again())  # without the frames, which hold the request
        with self._lock:
            self._outcomes.add(client, key, outcome, num_bytes=outcome.num_bytes)
        return outcome


def _digest(sampling: inference_pb2.SamplingParameters) -> bytes:
    """Hash of all that decides whether the grammar can be enforced."""
    deciding = inference_pb2.SamplingParameters(
        ignore_eos=sampling.ignore_eos,
        min_tokens=min(sampling.min_tokens, 1),
        allowed_token_ids=sampling.allowed_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        bad_words=sampling.bad_words,
        bad_word_ids=sampling.bad_word_ids,
    )
    field = sampling.WhichOneof("structured_output")
    if field == "choice":
        deciding.choice.CopyFrom(sampling.choice)
    elif field is not None:
        setattr(deciding, field, getattr(sampling, field))
    return sha256(deciding.SerializeToString(deterministic=True)).digest()
