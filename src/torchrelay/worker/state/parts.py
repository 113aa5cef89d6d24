"""Parts: how each kind of object that a script gives to protect() tells its state and takes another's.

modules, tensors, arrays    in place, and exactly what is there
optimizers                  in place; state that does not exist yet is made, in the dtypes of the source
dicts, lists, sets          updated in place, so that whoever holds them sees it
generators                  by their state
anything else               by its state_dict() and load_state_dict()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchrelay.errors import RefusedError, StateMismatchError, with_article
from torchrelay.worker.hidden_state.leaves import added_to
from torchrelay.worker.parallel import fsdp, zero
from torchrelay.worker.tensors.entries import entries_of, items_of
from torchrelay.worker.tensors.landing import Landing, array_fits
from torchrelay.worker.tensors.tree import REMEDY, ArrayLeaf, Fields, Named
from torchrelay.worker.tensors.values import filled_into

Tree = Any


class Part(Protocol):
    """One object of the script, as a part of the state."""

    path: str

    def held(self) -> Any:
        """The object itself, as the script holds it."""

    def give(self) -> Tree:
        """Its state now, with the live tensors at the leaves."""

    def take(self, tree: Tree, landing: Landing) -> None:
        """A decoded tree of the same part: check that it fits, and say where its tensors land."""

    def settle(self) -> None:
        """All bytes have landed: put right what does not lie in a tensor."""


def part_of(value: Any, path: str) -> Part:
    """The part for an object of the script. Raises `RefusedError`, with the remedy, if its kind cannot be carried."""
    if isinstance(value, torch.nn.Module):
        return ModulePart(path, value)
    if isinstance(value, Optimizer):
        return OptimizerPart(path, value)
    if isinstance(value, torch.Tensor):
        return TensorPart(path, value)
    if isinstance(value, np.ndarray):
        return ArrayPart(path, value)
    if isinstance(value, torch.Generator):
        return GeneratorPart(path, value)
    if isinstance(value, (dict, list, deque, set)):
        return ContainerPart(path, value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StatefulPart(path, value)
    kind = type(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, tuple, frozenset)):
        raise RefusedError(
            f"{path} is {with_article(kind.__qualname__)}, which cannot be changed in place", "put it into a dict"
        )
    raise RefusedError(f"{path} is a {kind.__module__}.{kind.__qualname__}, whose state is not known", REMEDY)


# ---------------------------------------------------------------- tensors, modules


class TensorPart:
    """A tensor, in place."""

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.tensor = tensor

    def held(self) -> Any:
        return self.tensor

    def give(self) -> Tree:
        return self.tensor

    def take(self, tree: Tree, landing: Landing) -> None:
        landing.exactly(tree, self.tensor, self.path)

    def settle(self) -> None:
        """Nothing is left to do."""


class ArrayPart:
    """A NumPy array, in place."""

    def __init__(self, path: str, array: np.ndarray[Any, Any]) -> None:
        self.path = path
        self.array = array

    def held(self) -> Any:
        return self.array

    def give(self) -> Tree:
        return self.array

    def take(self, tree: Tree, landing: Landing) -> None:
        if not isinstance(tree, ArrayLeaf) or not array_fits(tree, self.array):
            what = f"{list(self.array.shape)} {self.array.dtype}"
            raise StateMismatchError(
                f"{self.path} is an array {what} here (C order, writeable) and another on the source"
            )
        landing.anyhow(tree, self.array, self.path)

    def settle(self) -> None:
        """Nothing is left to do."""


class GeneratorPart:
    """A torch.Generator, by its state."""

    def __init__(self, path: str, generator: torch.Generator) -> None:
        self.path = path
        self.generator = generator
        self.kept = False  # whether it has its own state already, which what arrives must not replace
        self._arrived: torch.Tensor | None = None

    def held(self) -> Any:
        return self.generator

    def give(self) -> Tree:
        return self.generator.get_state()

    def take(self, tree: Tree, landing: Landing) -> None:
        self._arrived = landing.anyhow(tree, None, self.path)

    def settle(self) -> None:
        if self._arrived is not None and not self.kept:
            self.generator.set_state(self._arrived)
        self._arrived = None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, whose names are those that the script gave."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, non-persistent ones included; shared ones once for each name."""
    yield from fsdp.named_parameters(module, remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class ModulePart:
    """A module: parameters and buffers in place; and its modes, what is frozen, and extra state, if it has any."""

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self.path = path
        self.given = module
        self.module = unwrapped(module)
        self._tree: dict[str, Any] = {}

    def held(self) -> Any:
        return self.given

    def give(self) -> Tree:
        return Fields(
            tensors=Named((f"{self.path}.{name}", tensor) for name, tensor in named_tensors(self.module)),
            training=self.told_values()[0],
            frozen=self.told_values()[1],
            extra={name: module.get_extra_state() for name, module in self._with_extra_state()},
        )

    def take(self, tree: Tree, landing: Landing) -> None:
        here = {f"{self.path}.{name}": tensor for name, tensor in named_tensors(self.module)}
        check_names(self.path, here, tree["tensors"])
        for path, live in here.items():
            landing.exactly(tree["tensors"][path], live, path)
        if len(tree["training"]) != sum(1 for _ in self.module.modules()):
            raise StateMismatchError(f"{self.path} has another number of submodules on the source than here")
        if len(tree["frozen"]) != sum(1 for _ in self.module.parameters()):
            raise StateMismatchError(f"{self.path} has another number of parameters on the source than here")
        tree["extra"] = landing.anyhow(tree["extra"], {}, f"{self.path} extra state")
        self._tree = tree

    def settle(self) -> None:
        self.take_values([self._tree["training"], self._tree["frozen"]])
        for name, module in self._with_extra_state():
            module.set_extra_state(self._tree["extra"][name])
        self._tree = {}

    def told_values(self) -> list[bytes]:
        """Whether each module trains, and whether each parameter is frozen."""
        training = bytes(module.training for module in self.module.modules())
        return [training, bytes(not parameter.requires_grad for parameter in self.module.parameters())]

    def take_values(self, told: list[bytes]) -> None:
        """Take what `told_values` has told of another rank's."""
        for module, training in zip(self.module.modules(), told[0], strict=True):
            module.training = bool(training)
        for parameter, frozen in zip(self.module.parameters(), told[1], strict=True):
            if parameter.requires_grad == bool(frozen):  # scripts freeze layers while they train, and let go of them
                parameter.requires_grad_(not frozen)

    def _with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in self.module.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield name, module


def check_names(path: str, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raises `StateMismatchError`, with the first few names, if the two have not the same keys."""
    missing = [name for name in there if name not in here]
    left_over = [name for name in here if name not in there]
    if missing or left_over:
        sides = ((missing, "on the source"), (left_over, "here"))
        only = " and ".join(f"{', '.join(names[:3])} only {where}" for names, where in sides if names)
        raise StateMismatchError(f"{path} has {only}: all ranks must build the same")


# ---------------------------------------------------------------- optimizers


class OptimizerPart:
    """An optimizer: hyper-parameters and state of each parameter, by the parameters' order.

    Not by load_state_dict(), which casts state to the parameters' dtype and copies it. The parameters are given, too:
    those of a module are the same tensors and travel once, and the order of all is checked by it.
    """

    def __init__(self, path: str, optimizer: Optimizer) -> None:
        self.path = path
        self.optimizer = optimizer
        self._tree: dict[str, Any] = {}
        self._groups: list[list[torch.Tensor]] = []  # of the source, with the parameters of this process

    def held(self) -> Any:
        return self.optimizer

    def give(self) -> Tree:
        positions = {id(parameter): at for at, parameter in enumerate(self._parameters())}
        state = []
        for key, values in self.optimizer.state.items():
            if isinstance(key, torch.Tensor):
                if id(key) not in positions:
                    raise TypeError(f"{self.path} has state of a tensor that is in none of its groups")
                state.append([positions[id(key)], values])
            elif isinstance(key, str):
                state.append([key, values])
            else:
                raise TypeError(f"{self.path} keeps state under {key!r}, which is neither a parameter nor a name")
        # By position: the order in which parameters had their first gradient differs and means nothing.
        state.sort(key=lambda entry: (isinstance(entry[0], str), entry[0]))
        return Fields(
            kind=f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}",
            parameters=[list(group["params"]) for group in self.optimizer.param_groups],
            groups=self.hyper_parameters(),
            state=state,
            called=bool(getattr(self.optimizer, "_opt_called", False)),
        )

    def take(self, tree: Tree, landing: Landing) -> None:
        self._check_like(tree)
        self._groups = self._groups_of(tree, landing)
        here = [*self.optimizer.param_groups, *({} for _ in self._groups)]
        for at, (group, there) in enumerate(zip(here, tree["groups"], strict=False)):
            for number, (leaf, parameter) in enumerate(zip(tree["parameters"][at], self._groups[at], strict=True)):
                landing.exactly(leaf, parameter, f"{self.path}.param_groups[{at}]['params'][{number}]")
            own = self._own(group)  # the bytes of another rank's must not land in these
            alike = {key: value for key, value in group.items() if key not in own}
            landing.anyhow(there, alike, f"{self.path}.param_groups[{at}]")
        parameters = list(chain.from_iterable(self._groups))
        for entry in tree["state"]:
            key, values = entry
            live = self.optimizer.state.get(parameters[key] if isinstance(key, int) else key)
            entry[1] = landing.anyhow(values, live, f"{self.path}.state[{key!r}]")
        self._tree = tree

    def settle(self) -> None:
        live = self.optimizer.param_groups
        if [list(map(id, group["params"])) for group in live] != [list(map(id, group)) for group in self._groups]:
            live.extend({"params": []} for _ in self._groups[len(live) :])
            del live[len(self._groups) :]
            for group, parameters_now in zip(live, self._groups, strict=True):
                group["params"][:] = parameters_now
        for group, there in zip(live, self._tree["groups"], strict=True):
            for key in group.keys() - there.keys() - {"params"}:
                del group[key]
            own = self._own(group)
            group.update((key, value) for key, value in there.items() if key not in own)
        parameters = self._parameters()
        self.optimizer.state.clear()
        for key, values in self._tree["state"]:
            self.optimizer.state[parameters[key] if isinstance(key, int) else key] = values
        # As on the source: protect() may have marked it, for the steps that were made before it came.
        self.optimizer._opt_called = bool(self._tree["called"])  # type: ignore[attr-defined]
        self._tree = {}

    def told_values(self) -> list[dict[str, Any]]:
        """Its plain values; see `returned`."""
        return self.hyper_parameters()

    def take_values(self, told: list[dict[str, Any]]) -> None:
        """Take what `told_values` has told of another rank's."""
        # A group that was added since protect() comes with the state, and all of its values with it.
        for group, there in zip(self.optimizer.param_groups, told, strict=False):
            own = self._own(group)
            group.update(filled_into(group, {name: value for name, value in there.items() if name not in own}))

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Of each group."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def options(self) -> list[dict[str, Any]]:
        """The same, without what the script has added to them: that may be each rank's own, see `hidden`."""
        known = getattr(self.optimizer, "defaults", None)  # not all subclasses call its constructor
        return [
            {name: value for name, value in group.items() if name not in added_to(group, known)}
            for group in self.hyper_parameters()
        ]

    def _own(self, group: dict[str, Any]) -> list[str]:
        """What the script has added to a group: it, or `hidden`, has set that, and no other rank's takes its place."""
        return added_to(group, getattr(self.optimizer, "defaults", None))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _check_like(self, tree: Tree) -> None:
        here = f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"
        if tree["kind"] != here:
            raise StateMismatchError(f"{self.path} is a {here} here and a {tree['kind']} on the source")
        known = range(sum(map(len, tree["parameters"])))
        if not all(isinstance(key, str) or key in known for key, _ in tree["state"]):
            raise ValueError("state of a parameter that is not there")

    def _groups_of(self, tree: Tree, landing: Landing) -> list[list[torch.Tensor]]:
        """The parameters of each group that the source has: groups may have been added since protect()."""
        here = [list(group["params"]) for group in self.optimizer.param_groups]
        if list(map(len, here)) == list(map(len, tree["parameters"])):
            return here
        found = [[landing.live(leaf) for leaf in group] for group in tree["parameters"]]
        groups = [[one for one in group if one is not None] for group in found]
        if zero.is_zero(self.optimizer) or list(map(len, groups)) != list(map(len, found)):
            raise StateMismatchError(
                f"{self.path} has groups of {list(map(len, here))} parameters here and of {list(map(len, found))} on "
                "the source, and they are not all of modules given to protect(): add all groups before protect()"
            )
        return groups


def mark_stepped(optimizer: Optimizer) -> None:
    """Let LR schedulers know that this optimizer has stepped (on its source), so that they do not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------- containers, and whatever has a state_dict


class ContainerPart:
    """A dict, list, deque or set: plain values and tensors, and objects that are parts of their own.

    Plain entries may come and go while training; the entries that are objects must stay.
    """

    def __init__(self, path: str, value: dict[Any, Any] | list[Any] | deque[Any] | set[Any]) -> None:
        self.path = path
        self.value = value
        self._parts = {key: part_of(entry, f"{path}[{key!r}]") for key, entry in _objects(value)}
        self._plain: Any = None

    def held(self) -> Any:
        return self.value

    def give(self) -> Tree:
        return Fields(plain=self._without_parts(), parts={key: part.give() for key, part in self._parts.items()})

    def take(self, tree: Tree, landing: Landing) -> None:
        check_names(self.path, {repr(key): key for key in self._parts}, {repr(key): key for key in tree["parts"]})
        for key, part in self._parts.items():
            part.take(tree["parts"][key], landing)
        self._plain = landing.anyhow(tree["plain"], self._without_parts(), self.path)

    def settle(self) -> None:
        for part in self._parts.values():
            part.settle()
        self._settle_plain()

    def _settle_plain(self) -> None:
        plain, self._plain = self._plain, None
        if isinstance(self.value, dict):
            for key in [key for key in self.value if key not in self._parts and key not in plain]:
                del self.value[key]
            self.value.update(plain)
        elif isinstance(self.value, set):
            self.value.clear()
            self.value.update(plain)
        else:
            kept = {key: self.value[key] for key in self._parts}
            self.value.clear()
            self.value.extend(kept.get(at, entry) for at, entry in enumerate(plain))

    def told_values(self) -> Any:
        """Its plain entries; see `returned`."""
        return self._without_parts()

    def take_values(self, told: Any) -> None:
        """Take what `told_values` has told of another rank's."""
        self._plain = filled_into(self._without_parts(), told)
        self._settle_plain()

    def parts(self) -> list[Part]:
        """The entries that are parts of their own."""
        return list(self._parts.values())

    def _without_parts(self) -> Any:
        if isinstance(self.value, dict):
            return {key: entry for key, entry in items_of(self.value) if key not in self._parts}
        if isinstance(self.value, set):
            return set(self.value)
        return [None if at in self._parts else entry for at, entry in enumerate(entries_of(self.value))]


def _objects(value: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a container that are, or hold somewhere, an object with a state of its own; with their keys."""
    if isinstance(value, set):
        return
    for key, entry in items_of(value) if isinstance(value, dict) else enumerate(entries_of(value)):
        if _is_object(entry) or (type(entry) in (dict, list) and any(True for _ in _objects(entry))):
            yield key, entry


def _is_object(entry: Any) -> bool:
    if isinstance(entry, (torch.nn.Module, Optimizer, torch.Generator)):
        return True
    return callable(getattr(entry, "state_dict", None)) and not isinstance(entry, type)


class StatefulPart:
    """Anything with state_dict() and load_state_dict(): LR schedulers, GradScaler, objects of the script."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value
        self._arrived: Any = None

    def held(self) -> Any:
        return self.value

    def give(self) -> Tree:
        return self.value.state_dict()

    def take(self, tree: Tree, landing: Landing) -> None:
        # What its own state_dict() returns is often its live tensors: landing there saves the memory of a second
        # copy, and load_state_dict() then copies them onto themselves.
        self._arrived = landing.anyhow(tree, self.value.state_dict(), self.path)

    def told_values(self) -> Any:
        """What its state_dict() returns; see `returned`."""
        return self.value.state_dict()

    def take_values(self, told: Any) -> None:
        """Take what `told_values` has told of another rank's."""
        self.value.load_state_dict(filled_into(self.value.state_dict(), told))

    def settle(self) -> None:
        arrived, self._arrived = self._arrived, None
        self.value.load_state_dict(arrived)
