"""Loaders and optimizers that libraries have wrapped are looked through, or refused with the remedy.

The stand-ins have the shape of Accelerate's and Fabric's; where these are installed, they are asked themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler

from torchrelay.errors import RefusedError
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.parallel.prepared import Prepared, optimizer_inside
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.usefixtures("left_as_found")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class ByEpoch(RandomSampler):
    """As Accelerate's SeedableRandomSampler."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.epoch)
        return super().__iter__()


def synchronize_rng_states(kinds: list[str], generator: torch.Generator | None) -> None:
    assert kinds == ["generator"]
    if generator is not None:
        generator.manual_seed(3)


def send_to_device(item: Any, device: str, non_blocking: bool = False) -> Any:
    del non_blocking
    return device, item


def _set_sampler_epoch(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


def move_data_to_device(item: Any, device: str) -> Any:
    return device, item


class DataLoaderShard:
    """Accelerate's."""

    def __init__(self, base: DataLoader[Any], generator: torch.Generator | None = None, **more: Any) -> None:
        self.base_dataloader = base
        self.rng_types, self.synchronized_generator = ["generator"], generator
        self.device, self._non_blocking, self.iteration, self.said = "here", False, 0, []  # type: ignore[var-annotated]
        self.end_of_dataloader = False
        self.__dict__.update(more)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def state_dict(self) -> Any:
        return self.dl_state_dict  # as it is: there is none

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)

    def begin(self) -> None:
        self.end_of_dataloader = False
        self.said.append("begin")

    def end(self) -> None:
        self.said.append("end")

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        for item in self.base_dataloader:
            yield send_to_device(item, self.device)
        self.iteration += 1
        self.end()


class DataLoaderDispatcher(DataLoaderShard):
    """Accelerate's."""


class _FabricDataLoader:
    def __init__(self, loader: DataLoader[Any], device: str) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader, self._device, self._num_iter_calls = loader, device, 0

    @property
    def device(self) -> str:
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        _set_sampler_epoch(self._dataloader, self._num_iter_calls)
        self._num_iter_calls += 1
        for item in self._dataloader:
            yield move_data_to_device(item, self._device)


def base(sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(Numbers(), 2, sampler=sampler or ByEpoch(Numbers(), generator=torch.Generator()))


def shared() -> DataLoaderShard:
    generator = torch.Generator()
    return DataLoaderShard(base(RandomSampler(Numbers(), generator=generator)), generator)


MAKERS = {
    "accelerate": lambda: DataLoaderShard(base()), "accelerate, a generator for all": shared,
    "fabric": lambda: _FabricDataLoader(base(), "here"),
}  # fmt: skip


def told(items: Any) -> list[str]:
    return [str(item) for item in items]


def epoch_of(source: Any, marks: list[bytes]) -> list[str]:
    """As a tracked loop goes through it."""
    agreement = source.agreement()
    if agreement is not None:
        source.agree(agreement())
    marks.append(source.mark())
    return told(source.begin(marks[-1]))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_items_are_those_of_the_library_from_epoch_to_epoch(make: Any) -> None:
    loader, marks = make(), []  # type: ignore[var-annotated]
    plain = make()
    source = source_of(loader)
    assert isinstance(source, Prepared)
    expected = [told(plain) for _ in range(3)]
    assert [epoch_of(source, marks) for _ in range(3)] == expected
    assert len({str(sorted(epoch)) for epoch in expected}) >= 1
    assert "here" in expected[0][0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("skip", [0, 3, 5])
def test_it_is_entered_in_the_middle_of_a_later_epoch(make: Any, skip: int) -> None:
    marks: list[bytes] = []
    source = source_of(make())
    epochs = [epoch_of(source, marks) for _ in range(3)]
    later = source_of(make())
    assert told(later.enter(marks[1], skip)) == epochs[1][skip:]
    assert epoch_of(later, []) == epochs[2]


def test_accelerate_is_told_of_the_end() -> None:
    loader = DataLoaderShard(base())
    source: Any = source_of(loader)
    ends = [loader.end_of_dataloader for _ in source.begin(source.mark())]
    assert ends == [False] * 5 + [True]
    assert loader.said == ["begin", "end"]
    assert loader.iteration == 1


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoaderDispatcher(base()), "dispatch_batches=False"),
        (lambda: DataLoaderShard(base(), use_stateful_dataloader=True), "Leave use_stateful_dataloader out"),
        (lambda: DataLoaderShard(base(), skip_batches=2), "skip_first_batches"),
        (lambda: zip(base(), base(), strict=True), "a builtins.zip"),
        (lambda: enumerate(base()), "a builtins.enumerate"),
        (lambda: (item for item in base()), "a builtins.generator"),
    ],
)
def test_what_cannot_be_entered_is_refused_with_the_remedy(loader: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        source_of(loader())


# ---------------------------------------------------------------- optimizers


class Wrapper(Optimizer):
    """As Accelerate's AcceleratedOptimizer: what is inside is shown as its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state


class Lookahead(Optimizer):
    """It has a state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, defaultdict(dict)


def adamw() -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_a_wrapper_is_looked_through() -> None:
    model, inner = adamw()
    assert State(model, Wrapper(Wrapper(inner))).optimizers() == [inner]
    assert State(model, {"all": Wrapper(inner)}).has_optimizer(inner)
    assert optimizer_inside(inner) is inner


def test_a_wrapper_with_a_state_of_its_own_is_an_optimizer() -> None:
    wrapped = Lookahead(adamw()[1])
    assert optimizer_inside(wrapped) is wrapped


def test_fabrics_own() -> None:
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    model, inner = adamw()
    assert State(model, wrappers._FabricOptimizer(inner, strategy=None)).optimizers() == [inner]
    source = source_of(wrappers._FabricDataLoader(base(), torch.device("cpu")))
    assert isinstance(source, Prepared)
    expected = told(wrappers._FabricDataLoader(base(), torch.device("cpu")))
    assert epoch_of(source, []) == expected


def test_accelerates_own() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inner = adamw()
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(4)
    plain = accelerator.prepare(base(RandomSampler(Numbers())))
    expected = [told(plain) for _ in range(2)]
    torch.manual_seed(4)
    optimizer, loader = accelerator.prepare(inner, base(RandomSampler(Numbers())))
    assert State(model, optimizer).optimizers() == [inner]
    source, marks = source_of(loader), []  # type: ignore[var-annotated]
    assert isinstance(source, Prepared)
    assert [epoch_of(source, marks) for _ in range(2)] == expected
    assert told(source_of(loader).enter(marks[1], 2)) == expected[1][2:]
