"""Single entries of the rows of a batch, read and written in one go, however many rows they lie in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowEntries:
    """Entries of `scores` (contiguous [n, vocab_size]) at flat indices `index`, row after row.

    `lengths` [len(rows)] says how many there are of each row.
    """

    scores: Tensor
    index: Tensor
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Tensor, rows: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> "RowEntries":
        """No row has an id twice where it is written other than by `fill`."""
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        offsets = np.array(rows, dtype=np.int64) * scores.shape[-1]
        index = np.concatenate(ids) + np.repeat(offsets, lengths)
        return cls(scores, torch.from_numpy(index).to(scores.device), lengths)

    def read(self) -> Tensor:
        """A copy of the entries, [number of entries]."""
        return self.scores.view(-1).index_select(0, self.index)

    def write(self, values: Tensor) -> None:
        """`values` [number of entries]."""
        self.scores.view(-1).index_copy_(0, self.index, values)

    def fill(self, value: float) -> None:
        """The same value for all entries."""
        self.scores.view(-1).index_fill_(0, self.index, value)

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value per row, repeated for each of its entries; float32 like the scores."""
        return self.tensor(np.repeat(np.array(values, dtype=np.float32), self.lengths))

    def tensor(self, values: NDArray[np.float32]) -> Tensor:
        """One value per entry, where the scores are."""
        return torch.from_numpy(values).to(self.scores.device)
