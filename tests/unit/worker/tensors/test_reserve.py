"""Memory that is taken before the state arrives: what for, and that it is what the bytes land in."""

from __future__ import annotations

import torch

from torchrelay.worker.state.state import State
from torchrelay.worker.tensors.reserve import LEAST, MAX_PIECES, SLICE, Piece, Reserve, pieces_of
from torchrelay.worker.tensors.tree import Leaf


def built(steps: int = 0) -> State:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return State(model, optimizer)


def test_what_optimizers_keep_is_told_but_for_small_change() -> None:
    weights = Piece("float32", (128, 64), (64, 1))
    assert pieces_of(built(1).optimizers()) == [weights, weights], "not the biases' averages, nor the counts of steps"
    assert pieces_of(built().optimizers()) == []


def test_pieces_have_a_least_size_and_an_end() -> None:
    parameter = torch.nn.Parameter(torch.zeros(LEAST // 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"large": torch.zeros(LEAST // 4), "small": torch.zeros(LEAST // 4 - 1), "text": "x"}
    optimizer.state["a name"] = 5  # type: ignore[index]  # scripts may
    assert pieces_of([optimizer]) == [Piece("float32", (LEAST // 4,), (1,))]
    assert len(pieces_of([optimizer] * (MAX_PIECES + 1))) == MAX_PIECES


def test_a_state_lands_in_the_reserve_and_the_rest_of_it_is_let_go() -> None:
    trained, fresh = built(2), built()
    fresh.reserve = Reserve([*pieces_of(trained.optimizers()), Piece("float32", (7,), (1,))])
    free = {tensor.data_ptr() for row in fresh.reserve._free.values() for tensor in row}
    head, tensors = trained.manifest()
    for place, tensor in zip(fresh.receive(head), tensors, strict=True):
        place.copy_(tensor)
    fresh.commit_received()
    assert fresh.digest() == trained.digest()
    (optimizer,) = fresh.optimizers()
    landed = {
        optimizer.state[key][name].data_ptr() for key in list(optimizer.state)[:1] for name in ("exp_avg", "exp_avg_sq")
    }
    assert landed <= free
    assert fresh.reserve._free == {}


def test_only_what_is_alike_is_given_and_each_once() -> None:
    reserve = Reserve([Piece("bfloat16", (2, 3), (1, 2)), Piece("nonsense", (1,), (1,))])
    leaf = Leaf(torch.bfloat16, (2, 3), (1, 2), "cpu", 0)
    for other in (
        Leaf(torch.float16, (2, 3), (1, 2), "cpu", 0),
        Leaf(torch.bfloat16, (3, 2), (1, 2), "cpu", 0),
        Leaf(torch.bfloat16, (2, 3), (3, 1), "cpu", 0),
        Leaf(torch.bfloat16, (2, 3), (1, 2), "cuda", 0),
    ):
        assert reserve.take(other) is None
    taken = reserve.take(leaf)
    assert taken is not None
    assert (taken.dtype, taken.shape, taken.stride()) == (torch.bfloat16, (2, 3), (1, 2))
    assert reserve.take(leaf) is None


def test_memory_is_touched_slice_by_slice() -> None:
    portions: list[None] = []
    count = 2 * SLICE // 4 + 1
    reserve = Reserve(
        [Piece("float32", (count,), (1,)), Piece("float32", (2, 3), (1, 4))], lambda: portions.append(None)
    )
    assert len(portions) == 3 + 1
    taken = reserve.take(Leaf(torch.float32, (2, 3), (1, 4), "cpu", 0))
    assert taken is not None
    assert taken.stride() == (1, 4)
