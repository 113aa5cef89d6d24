"""Shards: how a DTensor is told, who holds the same one, and FSDP2 put right: one process on a fake group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.carrying import carry
from torchrelay.errors import RefusedError, StateMismatchError
from torchrelay.worker.parallel import fsdp, shards
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state import gradients, layout
from torchrelay.worker.state.gradients import CarriedGradients, Gradients
from torchrelay.worker.state.layout import replicas, shard_name
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.landing import Landing

pytestmark = pytest.mark.usefixtures("left_as_found")

WORLD = 4
HSDP = ((2, 2), ("replicate", "shard"))
FSDP = ((4,), ("shard",))


class Script:
    """A model of two sharded layers in a sharded whole, with a buffer, and a step."""

    def __init__(self, sizes: tuple[int, ...], names: tuple[str, ...], seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.model: Any = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3), nn.Linear(3, 5))
        self.model.register_buffer("mask", torch.ones(3))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = State(self.model, self.optimizer)

    def backward(self) -> None:
        self.model(torch.ones(2, 6)).square().sum().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


# ---------------------------------------------------------------- told, and made again


def test_a_dtensor_is_described_and_made_again(become: Callable[[int], None]) -> None:
    become(3)
    mesh = init_device_mesh("cpu", *HSDP[:1], mesh_dim_names=HSDP[1])
    tensor = DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, [Replicate(), Shard(0)], run_check=False)
    told = shards.describe(tensor)
    assert told == shards.Described("replicate=2,shard=2", (("R",), ("S", 0)), (4, 3), (3, 1), (0, 1))
    again: Any = shards.of_local(shards.local(tensor), told, mesh)
    assert (again.shape, again.placements, again.device_mesh) == (tensor.shape, tensor.placements, mesh)
    assert shards.local(again).data_ptr() == shards.local(tensor).data_ptr()


def test_sums_that_are_pending_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    mesh = init_device_mesh("cpu", (4,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(RefusedError, match=r"a DTensor with the placement .*Redistribute it"):
        State(nn.Linear(2, 2), extra={"sums": {"one": pending}})


def test_meshes_that_look_alike_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, ranks in zip(model, ([0, 1], [0, 2]), strict=True):
        fully_shard(layer, mesh=DeviceMesh("cpu", ranks))
    with pytest.raises(RefusedError, match="two device meshes look alike"):
        State(model)


def test_a_replacement_takes_shards_and_what_its_optimizer_has_not_made_yet(become: Callable[[int], None]) -> None:
    become(1)
    source, replacement = Script(*HSDP), Script(*HSDP, seed=2)
    for _ in range(3):
        source.step()
    assert source.state.digest() != replacement.state.digest()
    parameters = {id(parameter): shards.local(parameter).data_ptr() for _, parameter in replacement.state.parameters()}
    carry(source.state, replacement.state)
    assert source.state.digest() == replacement.state.digest()
    assert parameters == {id(one): shards.local(one).data_ptr() for _, one in replacement.state.parameters()}
    made = replacement.optimizer.state[replacement.model[0].weight]["exp_avg"]
    assert isinstance(made, DTensor)
    assert made.placements == replacement.model[0].weight.placements
    source.step()
    replacement.step()
    assert source.state.digest() == replacement.state.digest()


def test_a_shard_lands_only_where_it_is_spread_alike(become: Callable[[int], None]) -> None:
    become(1)
    source, other = Script(*HSDP), Script(*FSDP)
    data, _ = source.state.manifest()
    with pytest.raises(StateMismatchError, match="is spread over ranks as"):
        other.state.receive(data)
    plain = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3), nn.Linear(3, 5))
    plain.register_buffer("mask", torch.ones(3))
    data, _ = State(plain, torch.optim.AdamW(plain.parameters())).manifest()
    with pytest.raises(StateMismatchError, match="is a DTensor here and a Leaf"):
        other.state.receive(data)


def test_a_mesh_that_nobody_has_made_is_named(become: Callable[[int], None]) -> None:
    from torchrelay.worker.tensors import tree

    become(0)
    script = Script(*HSDP)
    data, _ = tree.encode({"one": script.model[0].weight})
    with pytest.raises(StateMismatchError, match="the mesh \\(replicate=2,shard=2\\), which this rank has not made"):
        Landing().anyhow(tree.decode(data), {}, "extra")


# ---------------------------------------------------------------- who holds the same


@pytest.mark.parametrize(
    ("sizes", "names", "expected"),
    [
        (*HSDP, ["ranks 0,2", "ranks 1,3", "ranks 0,2", "ranks 1,3"]),
        (*FSDP, ["ranks 0", "ranks 1", "ranks 2", "ranks 3"]),
        ((4, 1), ("replicate", "shard"), ["all"] * 4),
    ],
)
def test_replicas_are_read_off_the_mesh(
    become: Callable[[int], None], sizes: tuple[int, ...], names: tuple[str, ...], expected: list[str]
) -> None:
    found = []
    for rank in range(WORLD):
        become(rank)
        found.append(shard_name(Script(sizes, names).state, rank, WORLD))
    assert found == expected


def test_what_is_whole_on_every_rank_is_held_by_all(become: Callable[[int], None]) -> None:
    become(2)
    model = nn.Linear(2, 2)
    assert replicas(State(model, torch.optim.SGD(model.parameters())), 2, WORLD) == {0, 1, 2, 3}


def test_ranks_are_read_from_the_name_that_they_make() -> None:
    assert layout.ranks_of("ranks 0,12") == [0, 12]
    for given in ("all", "left", "ranks", "ranks a", "ranks 1,", "left 1"):
        assert layout.ranks_of(given) is None


# ---------------------------------------------------------------- FSDP2, put right


class Cut(BaseException):
    """What unwinds a step at a fault."""


def cut_in(script: Script, place: str) -> None:
    """Unwind a step in the middle of its forward or backward pass."""

    def cut(*_: Any) -> None:
        raise Cut

    where: Any = script.model[2]
    if place == "forward":
        handle = where.register_forward_pre_hook(cut)
    else:
        handle = where.register_forward_hook(lambda _module, _inputs, output: note(output.register_hook(cut)))
    with pytest.raises(Cut):
        script.backward()
    handle.remove()


def note(_: object) -> None:
    """A forward hook that returns something would replace the output."""


def gathers_in_a_step(script: Script, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many times parameters are gathered: equally often on all ranks, or they wait for one another for ever."""
    kind = type(fsdp.groups(script.model)[0])
    gathered: list[object] = []
    unshard = kind._to_unsharded

    def counted(group: Any) -> None:
        gathered.append(group)
        unshard(group)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_to_unsharded", counted)
        script.step()
    return len(gathered)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 2])
def test_after_it_a_rank_gathers_as_often_as_the_others(
    become: Callable[[int], None], place: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(1)
    calm, script = Script(*HSDP), Script(*HSDP)
    for _ in range(number):
        script.step()
    redo = Redo(script.state)
    redo.mark()
    cut_in(script, place)
    redo.rewind()
    fsdp.put_right(fsdp.states(script.model))
    assert gathers_in_a_step(script, monkeypatch) == gathers_in_a_step(calm, monkeypatch)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_step_that_was_cut_short_is_redone_to_the_same_bits(
    become: Callable[[int], None], place: str, number: int
) -> None:
    become(1)
    calm, script = Script(*HSDP), Script(*HSDP)
    for at in range(5):
        calm.step()
        redo = Redo(script.state)
        redo.mark()
        if at == number:
            script.optimizer.zero_grad()
            cut_in(script, place)
            redo.rewind()
            fsdp.put_right(fsdp.states(script.model))
            assert all(isinstance(parameter, DTensor) for parameter in script.model.parameters())
        script.step()
        assert script.state.digest() == calm.state.digest()


def test_without_being_put_right_it_would_not_go_on_alike(become: Callable[[int], None]) -> None:
    become(1)
    script = Script(*HSDP)
    script.step()
    cut_in(script, "backward")
    assert not all(isinstance(parameter, DTensor) for parameter in script.model.parameters())


def test_the_state_is_the_shards_while_parameters_are_gathered(become: Callable[[int], None]) -> None:
    become(1)
    script = Script(*HSDP)
    script.step()
    before = script.state.digest()
    with torch.no_grad():
        script.model(torch.ones(2, 6))  # the root's stay gathered until the next backward pass
    assert not isinstance(script.model[3].weight, DTensor)
    assert script.state.digest() == before
    assert all(isinstance(parameter, DTensor) for _, parameter in script.state.parameters())


def test_what_a_step_has_switched_is_switched_back(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    settings = fsdp.Settings(fsdp.states(script.model))
    settings.mark()
    script.model.set_requires_gradient_sync(False)
    script.model.set_is_last_backward(False)
    settings.rewind()
    assert all(group.reduce_grads for group in fsdp.groups(script.model))
    assert all(state._state_ctx.is_last_backward for state in fsdp.states(script.model))


# ---------------------------------------------------------------- gradients that are carried


def test_gradients_of_shards_that_are_carried_into_a_call_are_found(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    script.step()
    watched = CarriedGradients(script.state.parameters(), [script.model])
    script.backward()  # adds to what the step before has left
    assert len(watched.close(updates=False).refused) == len(script.state.parameters())
    watched = CarriedGradients(script.state.parameters(), [script.model])
    script.optimizer.zero_grad(set_to_none=False)
    script.backward()
    script.backward()  # micro-batches of one call
    assert watched.close(parameter for _, parameter in script.state.parameters()).refused == []
    assert not any("post_backward" in vars(group) for group in fsdp.groups(script.model))


def test_gradients_that_were_never_reduced_are_found(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    script.model.set_requires_gradient_sync(False)
    script.backward()
    assert CarriedGradients([], [script.model]).close().refused == ["a whole parameter"]


# ---------------------------------------------------------------- what is refused


def test_what_fsdp_is_not_supported_with_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*FSDP)
    assert layout.refusal(script.state) is None
    script.model.set_all_reduce_hook(lambda _: None)
    refused = layout.refusal(script.state)
    assert refused is not None
    assert "a hook for all-reduce may keep state" in refused[0]


def test_mixed_precision_keeps_the_shards_whole(become: Callable[[int], None]) -> None:
    become(1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    script = Script(*HSDP, mp_policy=policy)
    script.step()
    assert {shards.local(one).dtype for _, one in script.state.parameters()} == {torch.float32}


def test_an_optimizer_inside_backward_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    next(iter(script.model.parameters())).register_post_accumulate_grad_hook(lambda _: None)
    refused = layout.refusal(script.state)
    assert refused is not None
    assert "an optimizer that runs inside backward" in refused[0]


def test_with_functions_for_checkpoints_shards_must_be_named(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    assert layout.blind(script.state, None) is None
    saver = State(save=script.model.state_dict, load=script.model.load_state_dict)
    refused = layout.blind(saver, None)
    assert refused is not None
    assert "it cannot be seen which ranks hold the same shards" in refused[0]
    assert layout.blind(saver, "left") is None


def test_a_result_that_is_a_dtensor_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(*HSDP)
    with pytest.raises(TypeError, match="the result is a DTensor: take its full_tensor"):
        values.encode(script.model[0].weight.detach(), "the result")


# ---------------------------------------------------------------- what travels besides


def test_another_ranks_part_does_not_land(become: Callable[[int], None]) -> None:
    become(1)
    script = Script(*HSDP)
    weight = script.model[0].weight
    here = shards.describe(weight)
    told = msgspec.structs.replace(here, at=(0, 1 - here.at[1]))
    with pytest.raises(ValueError, match="it is the part at"):
        shards.of_local(shards.local(weight).detach(), told, weight.device_mesh)


def test_switches_travel_with_the_state(become: Callable[[int], None]) -> None:
    become(1)
    source, replacement = Script(*HSDP), Script(*HSDP)
    source.step()
    source.model[0].set_reshard_after_forward(False)
    source.model.set_reshard_after_backward(False)
    source.model.set_is_last_backward(False)
    carry(source.state, replacement.state)
    told, taken = (fsdp.told(fsdp.states(script.model)) for script in (source, replacement))
    assert [one[1:] for one in taken] == [one[1:] for one in told], "all but that it has made a first pass"
    assert told[1][3] == [[True, True, False, True, "not"]]


def test_a_model_beside_the_state_is_put_right_too(become: Callable[[int], None]) -> None:
    become(1)
    teacher = Script(*HSDP)
    script = Script(*HSDP, seed=2)
    with torch.no_grad():
        teacher.model(torch.ones(2, 6))
    assert not isinstance(teacher.model[3].weight, DTensor)
    fsdp.put_right(script.state.fsdp_states())
    assert isinstance(teacher.model[3].weight, DTensor)


def test_gradients_that_are_spread_otherwise_are_made_anew(become: Callable[[int], None]) -> None:
    become(0)
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
    grad: Any = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    parameter.grad = grad
    gradients.put([("weight", parameter)], Gradients(b"\1", {}))
    made: Any = parameter.grad
    assert made.placements == (Replicate(),)
    assert not shards.local(made).any()
