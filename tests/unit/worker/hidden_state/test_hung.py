"""What a script hangs on objects of torch's own: found, told, put back; and nothing of torch's own is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.retry.marks import HyperParameters, Mark, Scale, Schedule
from torchrelay.worker.state.parts import OptimizerPart
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.slow  # many walks

MAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda kept: kept.append(1.0)),
    "deque": (lambda: deque(maxlen=2), lambda kept: kept.append(kept[-1] + 1.0 if kept else 0.0)),
    "dict": (lambda: {"mean": 0.0}, lambda kept: kept.update(mean=kept["mean"] + 1.0)),
    "tensor": (lambda: torch.zeros(2), lambda kept: kept.add_(1.0)),
    "array": (lambda: np.zeros(2), lambda kept: kept.__iadd__(1.0)),
    "generator": (lambda: torch.Generator().manual_seed(1), lambda kept: torch.rand(1, generator=kept)),
    "random": (lambda: np.random.default_rng(1), lambda kept: kept.random()),
}


class Trained:
    """All that a step trains with."""

    def __init__(self) -> None:
        self.layer, self.activation = nn.Linear(2, 2), nn.ReLU()
        self.model = nn.Sequential(self.layer, self.activation)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
        self.schedule = LambdaLR(self.optimizer, lambda _: 1.0)
        self.hidden = Hidden([("model", self.model), ("optimizer", self.optimizer)])
        self.step: Callable[[], None] = lambda: None

    def fields(self, place: str) -> dict[str, Any]:
        if place == "group":
            return self.optimizer.param_groups[0]
        return vars(self.layer.weight if place == "weight" else getattr(self, place))

    def call(self) -> None:
        self.hidden.mark()
        self.hidden.look_entry()
        self.step()
        self.hidden.look_gate()
        self.hidden.look_return()


def trained(place: str, kind: str, calls: int) -> Trained:
    make, use = MAKES[kind]
    found = Trained()
    found.fields(place)["kept"] = make()
    loader, schedule = found.loader, found.schedule

    def step() -> None:
        use(
            (vars(loader) if place == "loader" else vars(schedule) if place == "schedule" else found.fields(place))[
                "kept"
            ]
        )

    found.step = step
    found.hidden.add(step)
    for _ in range(calls):
        found.call()
    return found


def called(hidden: Hidden, step: Callable[[], None]) -> None:
    for _ in range(3):
        hidden.mark()
        hidden.look_entry()
        step()
        hidden.look_gate()
        hidden.look_return()


def shown(trained: Trained, place: str) -> str:
    kept = trained.fields(place)["kept"]
    if isinstance(kept, np.random.Generator):
        return str(kept.bit_generator.state)
    return str(kept.get_state().tolist() if isinstance(kept, torch.Generator) else kept)


@pytest.mark.parametrize("kind", list(MAKES))
@pytest.mark.parametrize("place", ["layer", "activation", "optimizer", "weight", "group", "loader", "schedule"])
def test_it_goes_to_a_replacement_and_is_put_back(place: str, kind: str) -> None:
    lost = trained(place, kind, 5)
    after = trained(place, kind, 0)
    after.hidden.load(lost.hidden.record())
    assert shown(after, place) == shown(lost, place)
    before = shown(lost, place)
    lost.hidden.mark()
    lost.hidden.look_entry()
    lost.step()
    assert shown(lost, place) != before
    lost.hidden.rewind()
    assert shown(lost, place) == before


def test_options_of_torchs_own_are_not_it() -> None:
    found = trained("layer", "list", 0)

    def step() -> None:
        found.optimizer.param_groups[0]["lr"] *= 0.5
        found.optimizer.param_groups[0]["initial_lr"] = 1.0

    hidden = found.hidden
    hidden.add(step)
    called(hidden, step)
    assert not [path for path in hidden.state.kept if "param_groups" in path]


@pytest.mark.parametrize("wrap", [weight_norm, parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_what_torch_itself_hangs_there_is_not(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(wrap(nn.Linear(2, 2)), nn.LSTM(2, 2))
    hidden = Hidden([("model", model)])

    def step() -> None:
        model[1](model[0](torch.ones(1, 2)))[0].sum().backward()

    hidden.add(step)
    called(hidden, step)
    assert not hidden.state.kept
    assert not hidden.state.lacking
    assert not len(hidden.state.untold)


def test_what_a_compiler_hangs_on_parameters_is_not() -> None:
    model = nn.Linear(2, 2)
    hidden = Hidden([("model", model)])

    def step() -> None:
        for parameter in model.parameters():
            vars(parameter)["_dynamo_static_input_type"] = "unguarded"

    hidden.add(step)
    called(hidden, step)
    assert hidden.empty


def test_what_a_step_hangs_on_a_parameter_for_the_first_time_is_there_on_a_replacement() -> None:
    def trained() -> tuple[nn.Linear, Hidden, Callable[[], None]]:
        model = nn.Linear(2, 2)
        hidden = Hidden([("model", model)])

        def step() -> None:
            vars(model.weight)["count"] = vars(model.weight).get("count", 0) + 1

        hidden.add(step)
        return model, hidden, step

    _, hidden, step = trained()
    called(hidden, step)
    model, after, _ = trained()
    after.load(hidden.record())
    assert vars(model.weight)["count"] == 3
    assert isinstance(model.weight, nn.Parameter)


class Bare(torch.optim.Optimizer):
    """As recipes write them: without the constructor of its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = inner.param_groups, inner.state
        for group in self.param_groups:
            group["counter"] = 0


def test_options_of_an_optimizer_that_does_not_tell_which_they_are_are_compared() -> None:
    part = OptimizerPart("optimizer", Bare(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)))
    assert {"lr", "counter"} <= part.options()[0].keys()


def test_what_a_script_has_added_does_not_come_from_another_rank() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    part = OptimizerPart("optimizer", optimizer)
    optimizer.param_groups[0]["owner"] = 1
    assert "owner" not in part.options()[0]
    part.take_values([{**part.told_values()[0], "owner": 0, "lr": 0.5}])
    assert (optimizer.param_groups[0]["owner"], optimizer.param_groups[0]["lr"]) == (1, 0.5)


def test_nor_with_the_whole_state() -> None:
    def trained(rank: int) -> State:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1 + rank)
        optimizer.param_groups[0].update(owner=rank, sum=torch.full((2,), float(rank)), array=np.full(2, float(rank)))
        return State(model, optimizer)

    source, here = trained(0), trained(1)
    manifest, tensors = source.manifest()
    with torch.no_grad():
        for live, tensor in zip(here.receive(manifest), tensors, strict=True):
            live.copy_(tensor)
    here.commit_received()
    group = next(iter(here.optimizers())).param_groups[0]
    assert (group["owner"], group["lr"]) == (1, 0.1)
    assert group["sum"].tolist() == group["array"].tolist() == [1.0, 1.0]


class TestMarks:
    @pytest.fixture
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(nn.Linear(2, 1).parameters(), torch.tensor(0.1))

    def check(self, mark: Mark, fields: dict[str, Any]) -> None:
        fields["kept"] = {"rows": [[1.0], deque([2.0])], "sum": torch.zeros(2), "array": np.zeros(2)}
        kept, before = fields["kept"], repr(fields["kept"])
        mark.mark()
        for _ in range(2):
            kept["rows"][0].append(3.0)
            kept["rows"].append([])
            kept["sum"] += 1
            kept["array"] += 1
            fields["more"] = 1
            mark.rewind()
            assert fields["kept"] is kept
            assert repr(kept) == before
            assert "more" not in fields or isinstance(mark, Scale)

    def test_what_cannot_be_written_is_let_be(self, optimizer: torch.optim.Optimizer) -> None:
        fixed = np.frombuffer(bytes(8), dtype=np.int64)
        fields = optimizer.param_groups[0]
        fields.update(fixed=fixed, spread=torch.ones(1).expand(3), table=[[1.0] * 100] * 1000)
        mark = HyperParameters(optimizer)
        mark.mark()
        mark.rewind()
        assert fields["fixed"] is fixed

    def test_of_a_schedule_and_those_within(self, optimizer: torch.optim.Optimizer) -> None:
        inner: list[LRScheduler] = [LambdaLR(optimizer, lambda _: 1.0) for _ in range(2)]
        self.check(Schedule(SequentialLR(optimizer, inner, [3])), vars(inner[1]))

    def test_of_options(self, optimizer: torch.optim.Optimizer) -> None:
        self.check(HyperParameters(optimizer), optimizer.param_groups[0])

    def test_of_a_scaler(self) -> None:
        scaler = GradScaler("cpu")
        self.check(Scale(scaler), vars(scaler))


class Averaging:
    """Counts calls, and averages nothing yet."""

    def __init__(self) -> None:
        self.averager = PeriodicModelAverager(period=4, warmup_steps=1000, process_group=cast(Any, object()))
        self.hidden = Hidden()
        self.hidden.add(self.step)

    def step(self) -> None:
        self.averager.average_parameters([])


def test_an_averager_of_torch_goes_on_where_it_was() -> None:
    lost, after = Averaging(), Averaging()
    called(lost.hidden, lost.step)
    after.hidden.load(lost.hidden.record())
    assert after.averager.step == lost.averager.step == 3
    lost.hidden.mark()
    lost.hidden.look_entry()
    lost.step()
    lost.hidden.rewind()
    assert lost.averager.step == 3
