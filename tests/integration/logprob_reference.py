"""Log-probabilities of tokens computed by transformers, compared with reported ones."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stageline.client.output import TokenLogprobs
from tests.checkpoints import load_reference

TOLERANCE = 1e-4
"""In nats. Tokens that are closer may be ranked in either order."""


class LogprobReference:
    """A checkpoint in transformers; each token sequence is computed once, in one piece."""

    def __init__(self, directory: Path) -> None:
        self._model = load_reference(directory)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab_size]: row i is of the token that follows tokens[: i + 1]."""
        if tuple(tokens) not in self._known:
            ids = torch.tensor([list(tokens)])
            output = self._model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
            self._known[tuple(tokens)] = output.logits[0].float()
        return self._known[tuple(tokens)]

    def check(
        self, reported: Sequence[TokenLogprobs], tokens: Sequence[int], *, first: int, num_top: int
    ) -> None:
        """Assert that `reported` are the log-probabilities of tokens[first:], each with the `num_top` most
        likely ones. The first token of a prompt has none.
        """
        assert [token.token_id for token in reported] == list(tokens[first:])
        if first == 0 and reported:
            nothing = TokenLogprobs(token_id=tokens[0], logprob=None, rank=0, top=[])
            assert reported[0] == nothing, "nothing precedes the first token of a prompt"
            reported, first = reported[1:], 1
        wanted = self.logits(tokens).log_softmax(dim=-1)[first - 1 : len(tokens) - 1]
        for position, (token, row) in enumerate(zip(reported, wanted, strict=True), start=first):
            _check_one(token, row, num_top, f"position {position}")


def _check_one(reported: TokenLogprobs, row: Tensor, num_top: int, where: str) -> None:
    own = float(row[reported.token_id])
    assert reported.logprob is not None, where
    assert abs(reported.logprob - own) < TOLERANCE, where
    surely_above, at_least_equal = int((row > own + TOLERANCE).sum()), int((row > own - TOLERANCE).sum())
    assert surely_above + 1 <= reported.rank <= at_least_equal, where
    ids = [top.token_id for top in reported.top]
    values = torch.tensor([top.logprob for top in reported.top])
    assert len(ids) == len(set(ids)) == num_top, where
    assert sorted(values.tolist(), reverse=True) == values.tolist(), where
    assert torch.allclose(values, row[ids], rtol=0, atol=TOLERANCE), where
    assert torch.allclose(values, row.topk(num_top).values, rtol=0, atol=TOLERANCE), where
