"""All else that a script gives to protect(): schedules, scalers, containers, generators, and functions of its own."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.carrying import Script, carry
from torchrelay.errors import RefusedError, StateMismatchError
from torchrelay.worker.state.state import VERSION, State
from torchrelay.worker.tensors import tree


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny tensors more of them only wait for one another
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(before)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("steps", [1, 5])
def test_a_schedule_goes_on_and_nobody_warns(name: str, steps: int) -> None:
    # Warnings are errors in these tests.
    scripts = [Script(seed, torch.optim.SGD, lr=0.1, momentum=0.9) for seed in (1, 2)]
    schedules = [SCHEDULERS[name](script.optimizer) for script in scripts]
    states = [script.state(schedule=schedule) for script, schedule in zip(scripts, schedules, strict=True)]
    for _ in range(steps):
        scripts[0].step()
        schedules[0].step()
    states[1].expect()
    schedules[1].step()  # the replacement's script runs on to its stop, before the state has come
    carry(states[0], states[1])
    assert states[0].digest() == states[1].digest()
    rates = []
    for script, schedule in zip(scripts, schedules, strict=True):
        torch.manual_seed(5)
        for _ in range(6):
            script.step()
            schedule.step()
            rates.append(script.optimizer.param_groups[0]["lr"])
    assert rates[:6] == rates[6:]
    assert states[0].digest() == states[1].digest()


def test_a_schedule_by_a_metric_goes_on() -> None:
    scripts = [Script(seed, torch.optim.SGD, lr=0.1) for seed in (1, 2)]
    schedules = [lr_scheduler.ReduceLROnPlateau(script.optimizer, patience=1) for script in scripts]
    states = [script.state(schedule=one) for script, one in zip(scripts, schedules, strict=True)]
    for metric in (1.0, 2.0, 3.0):
        schedules[0].step(metric)
    carry(states[0], states[1])
    for schedule in schedules:
        schedule.step(4.0)
    assert states[0].digest() == states[1].digest()


@pytest.mark.parametrize("used", [False, True], ids=["not used yet", "used"])
def test_a_gradient_scaler_is_carried(used: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) for scale in (1024.0, 8.0)]
    scripts = [Script(seed) for seed in (1, 2)]
    states = [script.state(scaler=scaler) for script, scaler in zip(scripts, scalers, strict=True)]

    def step(which: int) -> None:
        script, scaler = scripts[which], scalers[which]
        script.optimizer.zero_grad()
        scaler.scale(script.model(torch.randn(6, 4)).square().sum()).backward()
        scaler.step(script.optimizer)
        scaler.update()

    for _ in range(3):
        step(0)
    if used:
        step(1)
    carry(states[0], states[1])
    assert scalers[1].get_scale() == scalers[0].get_scale()
    assert states[0].digest() == states[1].digest()
    for which in (0, 1):
        torch.manual_seed(3)
        step(which)
        step(which)
    assert states[0].digest() == states[1].digest()


class Meter:
    """An object of a script, with a state of its own."""

    def __init__(self) -> None:
        self.total = 0.0
        self.window = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        self.window.copy_(state["window"])


def make_extras(seed: int) -> dict[str, Any]:
    meter = Meter()
    meter.total, meter.window[1] = float(seed), seed
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, seed)
    return {
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "meter": meter,
        "tensor": torch.full((3,), float(seed)),
        "array": np.full((2, 2), seed, dtype=np.int16),
        "generator": torch.Generator().manual_seed(seed),
        "plain": {"best": seed / 3, 5: [seed, (seed, None)], "names": {str(seed)}},
        "list": [seed, "x", torch.full((2,), seed)],
        "deque": collections.deque([seed], maxlen=4),
        "set": {seed},
        "counts": collections.defaultdict(int, {seed: seed}),
        "nested": {"meter": meter, "deep": {"g": torch.Generator().manual_seed(seed + 1)}, "n": seed},
        "teacher": {"shadow.weight": torch.full((2, 2), float(seed))},
    }


def test_extras_are_updated_in_place() -> None:
    given_extras, live = make_extras(1), make_extras(2)
    tensor, array, shadow = live["tensor"], live["array"], live["teacher"]["shadow.weight"]
    first, second = State(extra=given_extras), State(extra=live)
    given_extras["plain"]["new"] = [1, 2]
    given_extras["list"].append(3)
    given_extras["deque"].append("more")
    carry(first, second)
    assert first.digest() == second.digest()
    assert tensor.tolist() == [1.0] * 3
    assert array.tolist() == [[1, 1], [1, 1]]
    assert shadow.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert live["plain"] == given_extras["plain"]
    assert live["list"][:2] == [1, "x"]
    assert live["list"][3] == 3
    assert list(live["deque"]) == [1, "more"]
    assert live["deque"].maxlen == 4
    assert live["set"] == {1}
    assert live["counts"] == {1: 1}
    assert live["counts"]["missing"] == 0  # still a defaultdict
    assert live["nested"]["meter"] is live["meter"]
    assert live["meter"].total == 1.0
    assert live["ema"].module.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    draws = [
        [torch.rand(3, generator=generator).tolist() for generator in (one["generator"], one["nested"]["deep"]["g"])]
        for one in (given_extras, live)
    ]
    assert draws[0] == draws[1]


def test_a_tensor_that_is_shared_on_the_source_only_reaches_both_places() -> None:
    shared, first, second = torch.ones(3), torch.zeros(3), torch.zeros(3)
    carry(State(extra={"d": {"a": shared, "b": shared}}), State(extra={"d": {"a": first, "b": second}}))
    assert first.tolist() == second.tolist() == [1.0] * 3


@pytest.mark.parametrize("key", list(make_extras(1)))
def test_every_extra_shows_in_the_digest(key: str) -> None:
    extras = make_extras(1)
    before = State(extra=extras).digest()
    assert State(extra=make_extras(1)).digest() == before
    extras[key] = make_extras(2)[key]
    assert State(extra=extras).digest() != before


def test_the_digest_asks_for_values_and_not_for_the_order_of_a_dict() -> None:
    one = State(extra={"d": {"a": 1, "b": torch.ones(2), 3: None}})
    other = State(extra={"d": {3: None, "b": torch.ones(2), "a": 1}})
    assert one.digest() == other.digest()
    assert one.manifest()[0] != other.manifest()[0]


@pytest.mark.parametrize("change", ["bit", "sign of zero", "type", "momentum", "rate", "mode", "gradient"])
def test_every_bit_shows_in_the_digest(change: str) -> None:
    script = Script(1, torch.optim.SGD, lr=0.1, momentum=0.9)
    script.step()
    plain: dict[str, Any] = {"n": 1}
    zeros = torch.zeros(2)
    state = script.state(plain=plain, zeros=zeros)
    before = state.digest()
    with torch.no_grad():
        match change:
            case "bit":
                script.model[4].bias.view(torch.int32)[0] ^= 1
            case "sign of zero":
                zeros[0] = -0.0
            case "type":
                plain["n"] = True
            case "momentum":
                script.optimizer.state[script.model[0].weight]["momentum_buffer"][0, 0] += 1
            case "rate":
                script.optimizer.param_groups[0]["lr"] = math.nextafter(0.1, 1)
            case "mode":
                script.model[1].eval()
            case "gradient":
                script.model[1].bias.grad = None
    assert state.digest() != before


class Stateless:
    """An object of a script that cannot tell its state."""


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"n": 3}, r"state\['n'\] is an int, which cannot be changed in place\. Put it into a dict"),
        (
            {"foo": Stateless()},
            r"state\['foo'\] is a .*Stateless, whose state is not known\. Give its class",
        ),
        ({"d": {"x": [Stateless()]}}, r"state\['d'\]\['x'\]\[0\] is a .*Stateless"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is a sparse"),
        ({"m": nn.LazyLinear(2)}, r"state\['m'\]\.weight has no shape yet"),
        ({"m": nn.Linear(2, 2, device="meta")}, "meta device"),
    ],
)
def test_what_cannot_be_carried_is_refused_at_join(extra: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        State(nn.Linear(2, 2), extra=extra)


def test_join_without_state_is_refused() -> None:
    with pytest.raises(RefusedError, match="no state"):
        State()
    with pytest.raises(RefusedError, match="one of save and load"):
        State(save=dict)
    with pytest.raises(RefusedError, match=r"optimizer is a Linear, no torch\.optim\.Optimizer"):
        State(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_state_of_another_shape_is_not_taken() -> None:
    with pytest.raises(StateMismatchError, match=r"state\['b'\] only on the source"):
        State(extra={"a": {}}).receive(State(extra={"a": {}, "b": {}}).manifest()[0])
    with pytest.raises(ValueError, match="no state tree"):
        State(extra={"a": {}}).receive(b"nonsense")
    with pytest.raises(StateMismatchError, match="another version"):
        State(extra={"a": {}}).receive(tree.encode({"version": 99})[0])


def test_fingerprints_name_what_was_built_and_not_its_values() -> None:
    assert Script(1).state().fingerprint() == Script(2).state().fingerprint()
    other = Script(1)
    other.model[5].weight = nn.Parameter(torch.eye(4).double())
    difference = set(other.state().description()) ^ set(Script(1).state().description())
    assert any("model.5.weight: [4, 4] torch.float64" in line for line in difference)


# ---------------------------------------------------------------- what is a rank's own


def test_what_is_private_is_not_taken_from_a_replica() -> None:
    victim, replica, replacement = Script(1), Script(1), Script(3)
    generators = [torch.Generator().manual_seed(seed) for seed in (10, 20, 30)]
    states = [
        script.state(generator=generator)
        for script, generator in zip((victim, replica, replacement), generators, strict=True)
    ]
    torch.manual_seed(1)
    victim.model(torch.randn(6, 4))  # running statistics of its own samples
    torch.manual_seed(2)
    replica.model(torch.randn(6, 4))
    states[2].private.load(states[0].private.record())
    carry(states[1], states[2])
    assert torch.equal(replacement.model[1].running_mean, victim.model[1].running_mean)
    assert not torch.equal(replacement.model[1].running_mean, replica.model[1].running_mean)
    assert torch.equal(replacement.model[0].weight, replica.model[0].weight)
    assert torch.rand(1, generator=generators[2]) == torch.rand(1, generator=generators[0])


def test_without_a_private_record_all_comes_from_the_replica() -> None:
    replica, replacement = Script(1), Script(3)
    replica.model(torch.randn(6, 4))
    states = [replica.state(g=torch.Generator().manual_seed(1)), replacement.state(g=torch.Generator().manual_seed(2))]
    states[1].private.load(b"")
    carry(states[0], states[1])
    assert states[0].digest() == states[1].digest()


def test_buffers_too_large_for_a_record_are_private_only_if_they_move() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("mask", torch.zeros(1 << 20))
    state = State(model)
    assert len(state.private.record()) < 1000
    state.private.settle(["model.0.running_mean"], sections=False)
    with pytest.raises(RefusedError, match="SyncBatchNorm"):
        state.private.settle(["model.mask"], sections=False)


def test_buffers_of_sync_batch_norm_are_not_private() -> None:
    assert State(nn.SyncBatchNorm(4)).private.record() == b""
    assert State(nn.BatchNorm1d(4)).private.record() != b""


@pytest.mark.parametrize("data", [b"nonsense", b"\x80", b"\x83"])
def test_a_private_record_that_does_not_fit_is_refused(data: bytes) -> None:
    state = State(nn.BatchNorm1d(4))
    with pytest.raises(StateMismatchError):
        state.private.load(data)
    with pytest.raises(StateMismatchError, match="bytes here and"):
        state.private.load(State(nn.BatchNorm1d(5)).private.record())


# ---------------------------------------------------------------- save and load


class Saver:
    """A script that has functions for checkpoints already."""

    def __init__(self, seed: int) -> None:
        self.script = Script(seed)
        self.epoch = seed

    def save(self) -> dict[str, Any]:
        return {"m": self.script.model.state_dict(), "o": self.script.optimizer.state_dict(), "epoch": self.epoch}

    def load(self, saved: dict[str, Any]) -> None:
        self.script.model.load_state_dict(saved["m"])
        self.script.optimizer.load_state_dict(saved["o"])
        self.epoch = saved["epoch"]

    def save_file(self, path: str) -> None:
        torch.save(self.save(), path)

    def load_file(self, path: str) -> None:
        self.load(torch.load(path, weights_only=True))

    def save_folder(self, path: str) -> None:
        for name, part in self.save().items():
            folder = Path(path) / name
            folder.mkdir(parents=True)
            torch.save(part, folder / "part.pt")
        (Path(path) / "empty").touch()

    def load_folder(self, path: str) -> None:
        assert (Path(path) / "empty").read_bytes() == b""
        self.load({name: torch.load(Path(path) / name / "part.pt", weights_only=True) for name in ("m", "o", "epoch")})


@pytest.mark.parametrize("way", ["", "_file", "_folder"])
def test_functions_of_the_script_carry_its_state(way: str, tmp_path: Path) -> None:
    savers = [Saver(1), Saver(2)]
    for _ in range(3):
        savers[0].script.step()
    states = [
        State(save=getattr(one, f"save{way}"), load=getattr(one, f"load{way}"), folder=tmp_path) for one in savers
    ]
    carry(states[0], states[1])
    assert savers[1].epoch == 1
    assert list(tmp_path.iterdir()) == []
    for saver in savers:
        torch.manual_seed(4)
        saver.script.step()
    assert torch.equal(savers[0].script.model[0].weight, savers[1].script.model[0].weight)


def test_files_lie_in_memory() -> None:
    paths: list[str] = []
    saver = Saver(1)

    def save(path: str) -> None:
        paths.append(path)
        saver.save_file(path)

    State(save=save, load=saver.load_file).manifest()
    assert paths[0].startswith("/dev/shm/torchrelay-state-")
    assert not Path(paths[0]).parent.exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", ""])
def test_a_file_cannot_be_put_elsewhere(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    state = State(save=Saver(1).save_file, load=lambda _: None, folder=inside)
    parts = {"save()": {"files": {name: torch.zeros(3, dtype=torch.uint8)}}}
    data, _ = tree.encode({"version": VERSION, "parts": parts, "gradients": b"", "ddp": [], "fsdp": []})
    with pytest.raises(ValueError, match=r"file|the state"):
        state.receive(data)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _takes_two(_one: str, _two: str) -> None: ...


@pytest.mark.parametrize(
    ("save", "load", "reason"),
    [
        (_takes_two, print, "save takes 2 arguments"),
        (lambda: {}, _takes_two, "load takes more than one argument"),
        (lambda: {}, lambda: None, "load takes no argument"),
    ],
)
def test_functions_with_other_arguments_are_refused(save: Any, load: Any, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        State(save=save, load=load)


def test_a_save_that_writes_nothing_is_refused() -> None:
    state = State(save=lambda path: None, load=lambda path: None)  # noqa: ARG005
    with pytest.raises(RefusedError, match="rank 0 only"):
        state.manifest()
