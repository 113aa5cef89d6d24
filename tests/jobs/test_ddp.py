"""After an interrupted step DDP goes on with the same buckets on every rank, to the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.scripts import groups_training as gpt
from tests.scripts.groups_ranks import Failed, Troupe, troupe
from tests.support.groups import EMPTY_CACHE, extension  # noqa: F401  a fixture
from torchrelay.worker.parallel import ddp as ddps
from torchrelay.worker.state import layout
from torchrelay.worker.state.state import State

STEPS = 7
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused parameters": {"unused": True},
    "static graph": {"static_graph": True},
    "buffers and micro-batches": {"buffers": True, "micro_batches": 3},
    "a hook": {"hook": "fp16"},
    "a built-in hook": {"hook": "builtin"},
    "copied at once": {"batched_grad_copy": True},
}


@pytest.fixture
def four(extension: dict[str, str]) -> Iterator[Troupe]:
    with troupe(4, **extension) as ranks:
        ranks.start()
        yield ranks


def undisturbed(ranks: Troupe, options: dict[str, Any]) -> list[str]:
    """What the ranks come to in a run without a fault."""
    ranks.do("call", gpt.build, **options)
    ranks.do("call", gpt.train, STEPS)
    return digests(ranks)


def digests(ranks: Troupe) -> list[str]:
    """What the ranks have come to: equal on all of them, but for buffers that have not been broadcast since."""
    return ranks.do("call", gpt.digest)


def one_layout(ranks: Troupe, survivors: list[int]) -> ddps.Layout:
    """The layout of the survivors, who must agree."""
    layouts: list[ddps.Layout] = ranks.do("call", gpt.layout, ranks=survivors)
    assert all(layout == layouts[0] for layout in layouts)
    return layouts[0]


def interrupt(ranks: Troupe, survivors: list[int]) -> None:
    """Release them from the step, as the control threads do, and undo what it did to buffers."""
    for rank in survivors:
        ranks.ranks[rank].control_do("break_connections")
    ranks.results(survivors)
    ranks.do("call", gpt.rewind, ranks=survivors)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_was_abandoned_in_backward_is_redone_to_the_same_bits(four: Troupe, name: str) -> None:
    expected = undisturbed(four, MODELS[name])
    everybody = list(range(4))
    for fault_at, at_gradient in ((1, 9), (2, 20), (5, 9)):
        four.do("call", gpt.build, **MODELS[name])
        four.do("call", gpt.train, fault_at)
        four.tell("call", gpt.train, fault_at + 1, ranks=[0, 1, 3])
        assert four.ranks[2].do("call", gpt.step_and_raise, at_gradient) == "interrupted"
        for rank in (0, 1, 3):
            four.ranks[rank].assert_busy()
        for rank in (0, 1, 3):  # the first that is broken may take others with it
            four.ranks[rank].control_do("break_connections")
        four.results([0, 1, 3])
        four.do("call", gpt.rewind)
        layout = one_layout(four, everybody)
        assert len(layout["buckets"]) > 2
        four.reconfigure()
        four.do("call", gpt.renew, layout)
        assert one_layout(four, everybody) == layout
        four.do("call", gpt.train, STEPS)
        assert digests(four) == expected, f"fault at step {fault_at}"


@pytest.mark.parametrize(
    ("name", "fault_at"),
    [*((name, 2) for name in MODELS), *(pytest.param("plain", step, marks=pytest.mark.soak) for step in (1, 5))],
)
def test_a_rank_that_dies_in_backward_is_replaced_to_the_same_bits(
    four: Troupe, tmp_path: Path, name: str, fault_at: int
) -> None:
    expected = undisturbed(four, MODELS[name])
    victim = fault_at % 4
    survivors = [rank for rank in range(4) if rank != victim]
    four.do("call", gpt.build, **MODELS[name])
    four.do("call", gpt.train, fault_at)
    state = str(tmp_path / "state.pt")
    four.ranks[victim].do("call", gpt.save, state)
    four.tell("call", gpt.step_and_die, 9, ranks=[victim])
    four.tell("call", gpt.train, fault_at + 1, ranks=survivors)
    four.ranks[victim].process.join(30)
    interrupt(four, survivors)
    layout = one_layout(four, survivors)

    replacement = four.replace(victim)
    replacement.do("init")
    replacement.do("call", gpt.build, seed=5, **MODELS[name])  # alone, and its own state is another
    four.reconfigure(host=survivors[0])
    replacement.do("call", gpt.load, state)
    four.do("call", gpt.renew, layout)
    four.do("call", gpt.train, STEPS)
    assert digests(four) == expected


def test_two_faults_in_a_row_without_the_extension() -> None:
    with troupe(4, **EMPTY_CACHE) as ranks:
        ranks.start()
        expected = undisturbed(ranks, {})
        ranks.do("call", gpt.build)
        ranks.do("call", gpt.train, 3)
        for at_gradient in (4, 30):
            ranks.tell("call", gpt.step_and_raise, at_gradient)
            interrupt(ranks, [0, 1, 2, 3])
            layout = one_layout(ranks, [0, 1, 2, 3])
            ranks.reconfigure()
            ranks.do("call", gpt.renew, layout)
        ranks.do("call", gpt.train, STEPS)
        assert digests(ranks) == expected


def test_whatever_ddp_blocks_in_can_be_broken(four: Troupe) -> None:
    everybody = [0, 1, 2, 3]
    four.do("call", gpt.build, buffers=True)
    for action in (gpt.backward_only, gpt.settle, gpt.forward_only):  # the second before the first was settled
        if action is gpt.settle:
            four.do("call", gpt.backward_only)
        four.tell("call", action, ranks=[1, 2, 3])
        for puppet in four.ranks[1:]:
            puppet.assert_busy()
        for puppet in four.ranks[1:]:
            puppet.control_do("break_connections")
            with pytest.raises(Failed) as failed:
                puppet.result(within_s=10)
            assert failed.value.collective
        layout = one_layout(four, everybody)
        four.reconfigure()
        four.do("call", gpt.renew, layout)


def test_another_layout_gives_other_bits(four: Troupe) -> None:
    """Why the layout belongs to the state: forgetting it is seen, if only in the last bits."""
    expected = undisturbed(four, {})
    four.do("call", gpt.build)
    four.do("call", gpt.train, 3)
    layout = one_layout(four, [0, 1, 2, 3])
    one_bucket = [number for bucket in layout["buckets"] for number in bucket]
    four.do("call", gpt.renew, {**layout, "buckets": [one_bucket]})
    four.do("call", gpt.train, STEPS)
    assert digests(four) != expected


# ---------------------------------------------------------------- one rank, in this process


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(5)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02, **options)


def backward(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Gradients of a pass over data that is always the same."""
    ddp.zero_grad()
    ddp(torch.ones(2, 64)).sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


class Fault(BaseException):
    """Unwinds a step."""


def interrupted_backward(ddp: DistributedDataParallel, at: int) -> None:
    """A backward pass that is left when the gradient of parameter `at` arrives."""

    def fault(_: torch.Tensor) -> None:
        raise Fault

    parameter: Any = list(ddp.parameters())[at]
    hook = parameter.register_hook(fault)
    with pytest.raises(Fault):
        backward(ddp)
    hook.remove()


@pytest.mark.usefixtures("alone")
class TestOneRank:
    def test_settling_lets_torch_change_the_buckets_before_the_commit(self) -> None:
        ddp = wrap()
        assert not ddps.settle(ddp)  # no gradients yet
        assert ddps.layout(ddp) == {"buckets": [list(range(10))], "settled": False, "sync_buffers": True}
        backward(ddp)
        assert ddps.settle(ddp)
        settled = ddps.layout(ddp)
        assert settled["settled"]
        assert settled["buckets"] == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
        backward(ddp)
        assert ddps._read_buckets(ddp) == settled["buckets"]

    def test_settling_keeps_the_gradients(self) -> None:
        ddp = wrap(gradient_as_bucket_view=True)
        before = backward(ddp)
        assert ddps.settle(ddp)
        for parameter, gradient in zip(ddp.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)

    def test_torch_changing_the_buckets_itself_is_noticed(self) -> None:
        ddp = wrap()
        assert not ddps.layout(ddp)["settled"]
        backward(ddp)
        backward(ddp)
        assert ddps.layout(ddp) == {
            "buckets": [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]],
            "settled": True,
            "sync_buffers": True,
        }

    def test_gradients_that_are_missing_are_left_for_torch_to_report(self) -> None:
        ddp = wrap()
        ddp.module[4] = torch.nn.Identity()  # its parameters get no gradients any more
        backward(ddp)
        assert not ddps.settle(ddp)
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            backward(ddp)

    def test_a_reducer_that_was_rehearsed_with_stays_and_reduces_the_same(self) -> None:
        trained = wrap()
        backward(trained)
        assert ddps.known_layout(trained) is None, "nobody has asked the reducer yet"
        ddps.settle(trained)
        layout, expected = ddps.layout(trained), backward(trained)
        ddp = wrap()
        ddps.renew(ddp, layout)
        kept = ddp.reducer
        pretended = ddps.pretend(ddp)
        backward(ddp)
        assert ddps.unpretend(ddp)
        del pretended
        layout["sync_buffers"] = False
        assert ddps.adopt(ddp, layout)
        assert ddps.layout(ddp) == layout
        assert ddp.reducer is kept
        for mine, theirs in zip(backward(ddp), expected, strict=True):
            assert torch.equal(mine, theirs)

    def test_a_reducer_of_another_layout_or_in_the_middle_of_a_pass_is_not_adopted(self) -> None:
        ddp = wrap()
        backward(ddp)
        assert ddps.settle(ddp)
        layout = ddps.layout(ddp)
        assert ddps.adopt(ddp, layout)
        assert not ddps.adopt(ddp, {**layout, "buckets": layout["buckets"][::-1]})
        assert not ddps.adopt(ddp, {**layout, "settled": False})
        pretended = ddps.pretend(ddp)
        interrupted_backward(ddp, 5)
        assert not ddps.unpretend(ddp)
        del pretended
        assert not ddps.adopt(ddp, layout)

    @pytest.mark.parametrize("at", [9, 5, 0])
    @pytest.mark.parametrize("settled", [False, True])
    def test_a_renewed_reducer_has_the_layout_and_reduces_once(self, at: int, settled: bool) -> None:
        expected = backward(wrap())
        ddp = wrap()
        if settled:
            backward(ddp)
            assert ddps.settle(ddp)
        interrupted_backward(ddp, at)
        layout = ddps.layout(ddp)  # in the middle of an interrupted pass
        old = weakref.ref(ddp.reducer)
        ddps.renew(ddp, layout)
        gc.collect()
        assert old() is None
        assert all(parameter.grad is None for parameter in ddp.parameters())
        assert ddps._read_buckets(ddp) == layout["buckets"]
        assert ddp._has_rebuilt_buckets is settled
        for gradient, correct in zip(backward(ddp), expected, strict=True):
            assert torch.equal(gradient, correct)
        assert ddps.settle(ddp)
        if settled:
            assert ddps._read_buckets(ddp) == layout["buckets"]

    def test_a_replacements_wrapper_takes_the_layout_of_the_survivors(self) -> None:
        survivor, replacement = wrap(), wrap()
        expected = backward(survivor)
        assert ddps.settle(survivor)
        ddps.renew(replacement, ddps.layout(survivor))
        assert ddps.layout(replacement) == ddps.layout(survivor)
        assert replacement._has_rebuilt_buckets
        for gradient, correct in zip(backward(replacement), expected, strict=True):
            assert torch.equal(gradient, correct)
        backward(replacement)
        assert ddps._read_buckets(replacement) == ddps._read_buckets(survivor)

    def test_an_old_reducer_that_somebody_holds_reduces_no_more(self) -> None:
        ddp = wrap()
        expected = backward(ddp)
        interrupted_backward(ddp, 5)
        held = ddp.reducer  # it still waits for gradients
        ddps.renew(ddp, ddps.layout(ddp))
        assert held is not ddp.reducer
        for gradient, correct in zip(backward(ddp), expected, strict=True):
            assert torch.equal(gradient, correct)

    def test_the_wrapper_and_its_module_stay(self) -> None:
        ddp = wrap()
        module, group, parameters = ddp.module, ddp.process_group, list(ddp.parameters())
        ddps.renew(ddp, ddps.layout(ddp))
        assert ddp.module is module
        assert ddp.process_group is group
        assert all(one is other for one, other in zip(ddp.parameters(), parameters, strict=True))

    def test_the_first_and_the_later_reducer_do_not_exist_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ddp = wrap(gradient_as_bucket_view=True)
        backward(ddp)
        ddps.settle(ddp)
        old = weakref.ref(ddp.reducer)
        seen = []
        make = ddps._make_reducer

        def watched(*arguments: Any) -> None:
            seen.append(old())
            make(*arguments)

        monkeypatch.setattr(ddps, "_make_reducer", watched)
        ddps.renew(ddp, ddps.layout(ddp))
        assert seen == [None]

    def test_parameters_frozen_since_keep_their_numbers(self) -> None:
        ddp = wrap(find_unused_parameters=True)
        layout = ddps.layout(ddp)
        frozen = ddp.module[0].weight
        frozen.requires_grad_(False)
        ddps.renew(ddp, layout)
        assert not frozen.requires_grad
        assert ddps._read_buckets(ddp) == layout["buckets"]
        backward(ddp)
        assert frozen.grad is None

    def test_a_layout_of_another_model_is_refused(self) -> None:
        ddp = wrap()
        with pytest.raises(ValueError, match="other parameters than the 10"):
            ddps.renew(ddp, {"buckets": [[0, 1], [1, 2]], "settled": True, "sync_buffers": True})
        backward(ddp)  # and nothing was changed

    def test_no_sync_works_afterwards(self) -> None:
        ddp = wrap()
        backward(ddp)
        ddps.settle(ddp)
        ddps.renew(ddp, ddps.layout(ddp))
        with ddp.no_sync():
            ddp(torch.ones(2, 64)).sum().backward()
        ddp(torch.ones(2, 64)).sum().backward()
        accumulated = [parameter.grad for parameter in ddp.parameters()]
        for total, once in zip(accumulated, backward(wrap()), strict=True):
            assert total is not None
            assert torch.allclose(total, 2 * once)

    def test_whether_buffers_are_broadcast_next_is_what_it_was_at_the_entry(self) -> None:
        ddp = wrap()
        backward(ddp)
        ddps.mark(ddp)
        with ddp.no_sync():
            ddp(torch.ones(2, 64))  # the interrupted call was under no_sync
        assert not ddp.require_forward_param_sync
        layout = ddps.layout(ddp)
        assert layout["sync_buffers"]
        ddps.renew(ddp, layout)
        assert ddp.require_forward_param_sync

    def test_hooks_are_registered_again(self) -> None:
        for built_in in (False, True):
            ddp: Any = wrap()
            if built_in:
                ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
            else:
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            rounded = backward(ddp)
            assert any(not torch.equal(one, other) for one, other in zip(rounded, backward(wrap()), strict=True))
            ddps.renew(ddp, ddps.layout(ddp))
            for gradient, correct in zip(backward(ddp), rounded, strict=True):
                assert torch.equal(gradient, correct)
            ddps.renew(ddp, ddps.layout(ddp))  # and once more
            for gradient, correct in zip(backward(ddp), rounded, strict=True):
                assert torch.equal(gradient, correct)

    def test_finding_the_wrappers_of_a_model(self) -> None:
        ddp = wrap()
        assert ddps.find(ddp) == [ddp]
        assert ddps.find(torch.nn.Sequential(torch.nn.Linear(2, 2), ddp)) == [ddp]
        assert ddps.find(ddp.module) == []


def powersgd(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)


def stateful(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook({"seen": 0}, default_hooks.allreduce_hook)


def buffer_hook(ddp: DistributedDataParallel) -> None:
    ddp._register_buffer_comm_hook(None, lambda *_: None)


def optimizer_in_backward(ddp: DistributedDataParallel) -> None:
    ddp.module[0].weight._in_backward_optimizers = []


def join(ddp: DistributedDataParallel) -> None:
    ddp._join_config = ddp._join_config._replace(enable=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (powersgd, r"powerSGD_hook may keep state .* use one of torch's default_hooks"),
        (stateful, r"allreduce_hook was given a state: give it None"),
        (buffer_hook, r"hook for buffers may keep state"),
        (optimizer_in_backward, r"before the step is committed: step it after backward"),
        (join, r"uneven inputs"),
    ],
)
def test_what_cannot_be_restored_is_refused_with_the_remedy(spoil: Any, why: str) -> None:
    ddp = wrap()
    assert ddps.refusal(ddp) is None
    spoil(ddp)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(ddps.refusal(ddp))


@pytest.mark.usefixtures("alone")
def test_one_that_has_trained_before_protect_is_refused() -> None:
    ddp = wrap()
    assert layout.refusal(State(ddp)) is None
    for _ in range(2):
        backward(ddp)
    refused = layout.refusal(State(ddp))
    assert refused is not None
    assert "has been through backward passes before protect()" in refused[0]


@pytest.mark.usefixtures("alone")
def test_the_script_can_vouch_for_its_own_hook() -> None:
    # Without annotations: torch compares them with the class itself, and here they are text.
    def halves(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / 2)
        return done

    ddp = wrap()
    ddp.register_comm_hook(None, halves)
    assert ddps.refusal(ddp) is not None
    halves.torchrelay_stateless = True  # type: ignore[attr-defined]
    assert ddps.refusal(ddp) is None
    once = backward(ddp)
    ddps.renew(ddp, ddps.layout(ddp))
    for gradient, correct in zip(backward(ddp), once, strict=True):
        assert torch.equal(gradient, correct)
