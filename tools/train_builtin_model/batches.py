"""Training batches: whole documents packed into rows."""

from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_builtin_model.corpus import documents

DOCUMENTS_AT_ONCE = 512


def _encoded(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    texts = documents(seed)
    while True:
        for encoding in tokenizer.encode_batch(list(islice(texts, DOCUMENTS_AT_ONCE))):
            yield encoding.ids


class Batches:
    """Makes batches of token ids from the seeded document stream."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int) -> None:
        self._documents = _encoded(tokenizer, seed)

    def _row(self, num_tokens: int) -> list[int]:
        row: list[int] = []
        while len(row) < num_tokens:
            row += next(self._documents)
        return row[:num_tokens]

    def take(self, num_rows: int, row_tokens: int) -> Tensor:
        """Token ids, int64 (num_rows, row_tokens).

        Each row begins where a document begins, as a prompt does; its last document may be cut.
        """
        return torch.tensor([self._row(row_tokens) for _ in range(num_rows)])
