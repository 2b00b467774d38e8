"""Log-probabilities of the model itself, before penalties and filters, and the ranks of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wire.steps import TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """One per row of `logits` (float32 [n, vocab_size], all finite): of `tokens[row]` and the `num_top[row]`
    most likely ones, the lowest ids first and rather than others among equals.

    The logarithm of the softmax in float32; rank is 1 + the number of tokens that are more likely.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    ranks = (logits > logits.gather(-1, ids)).sum(dim=-1) + 1
    top_ids = top_tokens(logits, min(max(num_top), logits.shape[-1]))
    columns = (tokens, logprobs.gather(-1, ids)[:, 0].tolist(), ranks.tolist())
    tops = zip(top_ids.tolist(), logprobs.gather(-1, top_ids).tolist(), num_top, strict=True)
    return tuple(
        TokenLogprobs(token, logprob, rank, tuple(zip(row_ids[:count], values[:count], strict=True)))
        for (token, logprob, rank), (row_ids, values, count) in zip(
            zip(*columns, strict=True), tops, strict=True
        )
    )


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the largest of each row, the largest first, the lowest ids among equals."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    values, candidates = torch.topk(logits, min(count + 1, logits.shape[-1]))
    ids, order = candidates[:, :count].sort(dim=-1)
    ids = ids.gather(-1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    if count < logits.shape[-1]:
        for row in torch.nonzero(values[:, count - 1] == values[:, count])[:, 0].tolist():
            ids[row] = _top_tokens_of_row(logits[row], values[row, count - 1], count)
    return ids


def _top_tokens_of_row(logits: Tensor, smallest: Tensor, count: int) -> Tensor:
    """topk takes any of the equals of the last one; the lowest ids are wanted."""
    ids = torch.nonzero(logits >= smallest)[:, 0]
    return ids[logits[ids].sort(descending=True, stable=True).indices[:count]]
