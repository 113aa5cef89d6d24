"""What samplers, datasets and collate functions keep in attributes goes with the place of a loop."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.support.hidden_loaders import Drawing, sampled
from tests.support.loaders import check


@pytest.mark.parametrize("kind", ["numpy", "one by one", "epochs"])
def test_with_loader_workers_that_fetch_ahead_too(kind: str) -> None:
    check(sampled(kind, num_workers=1), 1, lambda count: sorted({1, 2, count // 3, count // 3 + 1, count - 1}))


def test_generators_of_a_dataset_are_seeded_for_each_item_in_loader_workers() -> None:
    check(lambda: DataLoader(Drawing(), batch_size=4, num_workers=2), 1, lambda count: [1, 2, count // 2, count])
