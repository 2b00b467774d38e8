"""Log-probabilities in the shapes of OpenAI and vLLM."""

from collections.abc import Sequence
from typing import Any

from stageline_rpc.v1.inference_pb2 import TokenLogprobs
from text.detokenizer import token_bytes
from text.tokenizer import TextCodec

MIN_LOGPROB = -9999.0
"""OpenAI's value for a token that is (almost) impossible; JSON has no infinity."""


class LogprobWriter:
    """Writes log-probabilities; caches the texts of tokens. For one thread."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._texts: dict[int, tuple[str, list[int]]] = {}

    def completion(
        self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], offsets: Sequence[int], num_top: int
    ) -> dict[str, Any]:
        """`logprobs` of a completion; the first token of a prompt has null."""
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [_logprob(row) for row in rows],
            "top_logprobs": [self._top_by_text(row, num_top) if _has_value(row) else None for row in rows],
            "text_offset": list(offsets),
        }

    def chat(self, rows: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        return {
            "content": [
                {
                    **self._chat_entry(row.token_id, row.logprob),
                    "top_logprobs": [
                        self._chat_entry(top.token_id, top.logprob) for top in row.top[:num_top]
                    ],
                }
                for row in rows
            ],
            "refusal": None,
        }

    def prompt(self, rows: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token id, null for the first token."""
        return [self._by_id(row, num_top) if _has_value(row) else None for row in rows]

    def _by_id(self, row: TokenLogprobs, num_top: int) -> dict[str, Any]:
        entries = {
            str(top.token_id): self._prompt_entry(top.token_id, top.logprob, rank)
            for rank, top in enumerate(row.top[:num_top], start=1)
        }
        entries[str(row.token_id)] = self._prompt_entry(row.token_id, row.logprob, row.rank)
        return entries

    def _prompt_entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}

    def _top_by_text(self, row: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The most likely tokens and the chosen one. Of tokens with equal texts, one keeps the text."""
        top = {self._text(row.token_id): _finite(row.logprob)}
        for entry in row.top[:num_top]:
            if entry.token_id != row.token_id:
                text = self._text(entry.token_id)
                top[text if text not in top else f"token_id:{entry.token_id}"] = _finite(entry.logprob)
        return top

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._found(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    def _text(self, token_id: int) -> str:
        return self._found(token_id)[0]

    def _found(self, token_id: int) -> tuple[str, list[int]]:
        found = self._texts.get(token_id)
        if found is None:
            data = None if self._codec is None else token_bytes(self._codec, token_id)
            if data is None:
                found = f"token_id:{token_id}", []
            else:
                found = data.decode(errors="replace"), list(data)
            self._texts[token_id] = found
        return found


def _has_value(row: TokenLogprobs) -> bool:
    return row.HasField("logprob")


def _logprob(row: TokenLogprobs) -> float | None:
    return _finite(row.logprob) if row.HasField("logprob") else None


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
