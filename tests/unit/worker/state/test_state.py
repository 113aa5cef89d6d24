"""A state that was told, carried and taken is the same: in its digest, in its tensors' places, in what follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.carrying import Script, carry
from tests.support.probing import free_port
from tests.support.state import left_as_found  # noqa: F401  a fixture
from torchrelay.errors import StateMismatchError
from torchrelay.worker.state import layout
from torchrelay.worker.state.state import State
from torchrelay.worker.state.withheld import give_back
from torchrelay.worker.tensors import memory


def test_live_tensors_keep_their_places() -> None:
    source, target = Script(1), Script(2)
    source.step()
    target.step()
    state = target.state()
    before = [tensor.data_ptr() for tensor in state.manifest()[1]]
    objects = list(target.model.parameters())
    carry(source.state(), state)
    assert [tensor.data_ptr() for tensor in state.manifest()[1]] == before
    assert all(a is b for a, b in zip(objects, target.model.parameters(), strict=True))


def test_state_of_an_optimizer_keeps_its_own_dtypes() -> None:
    # load_state_dict() would cast it to the parameter's dtype.
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = torch.randn(3, 3, dtype=torch.float64)
    twin = nn.Linear(3, 3).bfloat16()
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    carry(State(model, optimizer), State(twin, other))
    assert torch.equal(other.state[twin.weight]["master"], optimizer.state[model.weight]["master"])
    assert other.state[twin.weight]["master"].dtype == torch.float64


def test_buffers_that_are_not_saved_are_carried_too() -> None:
    source, target = Script(1), Script(2)
    source.model.get_buffer("mask").fill_(5)
    carry(source.state(), target.state())
    assert target.model.get_buffer("mask").tolist() == [5.0] * 4


def test_modes_of_modules_are_carried() -> None:
    source, target = Script(1), Script(2)
    source.model.eval()
    source.model[2].train()
    carry(source.state(), target.state())
    assert [one.training for one in target.model.modules()] == [one.training for one in source.model.modules()]


def test_which_gradients_exist_is_carried() -> None:
    source, target = Script(1), Script(2)
    source.step()
    source.model[0].weight.grad = None
    target.step()
    carry(source.state(), target.state())
    assert target.model[0].weight.grad is None
    gradient = target.model[4].weight.grad
    assert gradient is not None
    give_back(target.model.parameters())  # nobody may read it before it is known to be cleared
    assert not gradient.any()


def test_tied_parameters_travel_once_and_stay_tied() -> None:
    def tied(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = tied(1), tied(2)
    state = State(source)
    assert len(state.manifest()[1]) == 1
    carry(state, State(target))
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)


def test_tied_on_one_side_only_is_a_mismatch() -> None:
    def model(tied: bool) -> Any:
        made: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        if tied:
            made[1].weight = made[0].weight
        return made

    with pytest.raises(StateMismatchError, match=r"model\.1\.weight shares its memory .* on the source, but not here"):
        State(model(False)).receive(State(model(True)).manifest()[0])
    with pytest.raises(StateMismatchError, match=r"model\.1\.weight shares its memory .* here, but not on the source"):
        State(model(True)).receive(State(model(False)).manifest()[0])


def _linear(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(options.pop("fan_in", 3), 4, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    return model, torch.optim.SGD(groups, lr=0.1)


def _turned_order() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(4))
    return model, torch.optim.SGD([model.bias, model.weight], lr=0.1)


def _frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = _linear()
    next(model.parameters()).requires_grad_(False)
    return model, optimizer


def _adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _linear()
    return model, torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _linear(fan_in=2), r"model\.weight is \[4, 2\] float32 here and \[4, 3\] float32"),
        (lambda: _linear(dtype=torch.float64), r"model\.weight is \[4, 3\] float64 here and \[4, 3\] float32"),
        (lambda: _linear(bias=False), r"model has model\.bias only on the source"),
        (_adam, r"optimizer is a torch\.optim\.adam\.Adam here and a torch\.optim\.sgd\.SGD"),
    ],
)
def test_a_script_that_built_something_else_is_told_what(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], reason: str
) -> None:
    data, _ = State(*_linear()).manifest()
    with pytest.raises(StateMismatchError, match=reason):
        State(*make()).receive(data)
    assert State(*make()).fingerprint() != State(*_linear()).fingerprint()


@pytest.mark.parametrize("here", [_linear, _two_groups])
@pytest.mark.parametrize("there", [_linear, _two_groups, _frozen])
def test_what_is_frozen_and_the_groups_of_an_optimizer_are_those_of_the_source(
    here: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    there: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
) -> None:
    (model, optimizer), (source, other) = here(), there()
    state = State(source, other)
    carry(state, taken := State(model, optimizer))
    assert taken.digest() == state.digest()
    assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in source.parameters()]
    assert len(optimizer.param_groups) == len(other.param_groups)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))


def test_a_group_of_what_no_module_holds_is_a_mismatch() -> None:
    def made(more: bool) -> State:
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if more:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        return State(model, optimizer)

    with pytest.raises(
        StateMismatchError, match=r"groups of \[2\] parameters here and of \[2, 1\] .* before protect\(\)"
    ):
        made(False).receive(made(True).manifest()[0])


def test_another_order_of_parameters_in_an_optimizer_is_a_mismatch() -> None:
    def made(turned: bool) -> State:
        model: Any = nn.Module()
        model.a, model.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        order: Any = [model.b, model.a] if turned else [model.a, model.b]
        return State(model, torch.optim.SGD(order, lr=0.1))

    with pytest.raises(StateMismatchError, match=r"param_groups\[0\]\['params'\]\[0\] shares its memory"):
        made(True).receive(made(False).manifest()[0])


def channels_last() -> Any:
    model: Any = nn.Conv2d(3, 4, 3)
    return model.to(memory_format=torch.channels_last)


def test_another_memory_format_is_a_mismatch() -> None:
    source, target = nn.Conv2d(3, 4, 3), channels_last()
    with pytest.raises(StateMismatchError, match=r"model\.weight has strides"):
        State(target).receive(State(source).manifest()[0])


def test_optimizer_state_takes_the_memory_format_of_the_source() -> None:
    scripts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = channels_last()
        scripts.append((model, torch.optim.Adam(model.parameters())))
    model, optimizer = scripts[0]
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    carry(State(*scripts[0]), State(*scripts[1]))
    twin, other = scripts[1]
    assert other.state[twin.weight]["exp_avg"].stride() == optimizer.state[model.weight]["exp_avg"].stride()
    assert torch.equal(other.state[twin.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_hyper_parameters_come_and_go_as_on_the_source() -> None:
    (model, source), (twin, target) = _linear(), _linear()
    source.param_groups[0]["lr"] = 0.05
    source.param_groups[0]["note"] = [1, "x"]
    target.param_groups[0]["stale"] = 1
    carry(State(model, source), State(twin, target))
    there = {key: value for key, value in target.param_groups[0].items() if key != "params"}
    assert there == {key: value for key, value in source.param_groups[0].items() if key != "params"}
    assert target.param_groups[0]["params"][0] is twin.weight


def test_extra_state_of_modules_is_carried() -> None:
    class Scaled(nn.Linear):
        amax = 1.0

        def get_extra_state(self) -> Any:
            return {"amax": self.amax, "history": torch.full((3,), self.amax)}

        def set_extra_state(self, state: Any) -> None:
            assert state["history"].tolist() == [state["amax"]] * 3
            self.amax = state["amax"]

    source, target = Scaled(2, 2), Scaled(2, 2)
    source.amax = 7.5
    carry(State(source), State(target))
    assert target.amax == 7.5


def test_several_models_and_optimizers_have_names() -> None:
    def made() -> State:
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 3)}
        return State(models, [torch.optim.SGD(one.parameters(), lr=0.1) for one in models.values()])

    first, second = made(), made()
    assert list(first.parts()) == ["model['g']", "model['d']", "optimizer[0]", "optimizer[1]"]
    carry(first, second)
    assert first.digest() == second.digest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16).t(), torch.ones(()), torch.ones(0, 3),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(8, 8)[:, ::2],
        torch.ones(1, 4).expand(3, 4), torch.ones(2, dtype=torch.complex64),
    ],
    ids=["plain", "transposed", "scalar", "empty", "channels last", "with gaps", "expanded", "complex"],
)  # fmt: skip
def test_zeros_look_like_torchs_own(tensor: torch.Tensor) -> None:
    made, expected = memory.zeros_like(tensor), torch.zeros_like(tensor)
    assert torch.equal(made, expected)
    assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
    made += 1
    assert torch.equal(made, torch.ones_like(tensor))


@pytest.mark.timeout(60)
def test_a_wrapper_whose_group_was_destroyed_is_none_of_the_state() -> None:
    """Nobody names the wrappers where functions save and load: those of a former group are still in memory."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    kept = []
    for _ in range(2):
        os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
        dist.init_process_group("gloo")
        kept.append(DistributedDataParallel(nn.Linear(2, 2)))
        state = State(save=kept[-1].state_dict, load=kept[-1].load_state_dict)
        try:
            assert [one for one in state.ddps() if one in kept] == kept[-1:]
            assert layout.blind(state, None) is None
        finally:
            dist.destroy_process_group()
