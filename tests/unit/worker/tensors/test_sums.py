"""The sums of tensors tell every changed bit, and nothing but the values: in memory, and as made on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchrelay.worker.tensors import sums

Sum = Callable[[torch.Tensor], int]


def on_cpu(tensor: torch.Tensor) -> int:
    return sums.of([tensor])[0]


def as_on_a_device(tensor: torch.Tensor) -> int:
    return int(sums.on_device(tensor).item())


ways = pytest.mark.parametrize("way", [on_cpu, as_on_a_device])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_every_bit_shows_wherever_it_is(way: Sum, dtype: torch.dtype) -> None:
    tensor = torch.arange(5_001).to(dtype)
    before = way(tensor)
    for at in (0, 7, tensor.nbytes // 2, tensor.nbytes - 1):
        for bit in (1, 128):
            bits(tensor)[at] ^= bit
            assert way(tensor) != before
            bits(tensor)[at] ^= bit
    assert way(tensor) == before


@ways
def test_rows_that_have_changed_places_show(way: Sum) -> None:
    tensor = torch.randn(4 * sums.ROW, generator=torch.Generator().manual_seed(1))
    moved = torch.cat([tensor[2 * sums.ROW :], tensor[: 2 * sums.ROW]])
    assert way(tensor) != way(moved)


@ways
def test_it_does_not_matter_where_a_tensor_lies(way: Sum) -> None:
    whole = torch.randn(41, 64, generator=torch.Generator().manual_seed(2))
    assert way(whole[1:]) == way(whole[1:].clone())
    assert way(whole[:, 1]) == way(whole[:, 1].clone())
    assert way(whole[:1].expand(9, 64)) == way(whole[0].clone())
    for first in range(9):
        piece = torch.arange(101, dtype=torch.uint8)[first:]
        assert way(piece) == way(piece.clone())
    assert way(torch.empty(0)) == way(torch.empty(0, 5))


def test_sums_of_several_come_in_their_order_and_of_now() -> None:
    one, two = torch.zeros(3), torch.ones(3)
    finish = sums.begin([one, two, one])
    expected = [on_cpu(one), on_cpu(two), on_cpu(one)]
    one.add_(1)
    assert finish() == expected
    assert sums.of([]) == []
