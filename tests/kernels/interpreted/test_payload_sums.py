"""Checksums of payloads on a device are those of the host, whatever the parts in which they are summed."""

from __future__ import annotations

import pytest
import torch

from stage_worker.model.checksums import checksum_of, plain_checksum
from stage_worker.model.triton_kernels.payload_sums import checksum
from tests.host_checksum import host_checksum

pytestmark = pytest.mark.kernels


def words(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, generator=generator)


def test_the_kernel_is_chosen_where_a_stage_has_kernels() -> None:
    assert checksum_of(has_triton=True) is checksum
    assert checksum_of(has_triton=False) is plain_checksum


@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 100_003])
@pytest.mark.parametrize("first", [0, 1, 4096, 2**31])
def test_the_sum_is_that_of_torch(size: int, first: int) -> None:
    found, expected = checksum(words(size), first), plain_checksum(words(size), first)
    assert (found.shape, found.dtype) == ((1,), torch.int64)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("cut", [1, 4096, 5000])
def test_parts_add_up_to_the_sum_of_the_host(cut: int) -> None:
    whole = words(10_001)
    parts = checksum(whole[:cut], 0) + checksum(whole[cut:], cut)
    assert int(parts) % 2**64 == host_checksum(bytes(whole.numpy().data))


@pytest.mark.parametrize("place", [0, 4095, 4096, 10_000])
def test_a_bit_or_an_exchange_gives_another_sum(place: int) -> None:
    whole = words(10_001)
    expected = checksum(whole, 0)
    flipped = whole.clone()
    flipped[place] ^= 1 << 30
    exchanged = whole.roll(1)
    for changed in (flipped, exchanged, whole[:-1]):
        assert not torch.equal(checksum(changed, 0), expected)
