"""State: all that a rank's replicas share and a replacement needs, as a tree of tensors and plain values.

`manifest` tells it, `receive` and `commit_received` take another's, `digest` names it. Bytes go from live tensor to
live tensor; `transfer` moves them. What no replica has (random state, buffers that differ between ranks) is private
and travels another way: see `private`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.errors import RefusedError, StateMismatchError
from torchrelay.worker.hardware import device
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.parallel import ddp, fsdp, shards, zero
from torchrelay.worker.parallel.pipeline import Pipeline
from torchrelay.worker.parallel.prepared import optimizer_inside
from torchrelay.worker.state import gradients
from torchrelay.worker.state.gradients import Gradients
from torchrelay.worker.state.parts import (
    ContainerPart,
    GeneratorPart,
    ModulePart,
    OptimizerPart,
    Part,
    StatefulPart,
    check_names,
    mark_stepped,
    named_tensors,
    part_of,
)
from torchrelay.worker.state.private import Private
from torchrelay.worker.state.saved import Load, Save, SavedPart
from torchrelay.worker.tensors import memory, tree
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.tensors.entries import entries_of
from torchrelay.worker.tensors.landing import Landing
from torchrelay.worker.tensors.reserve import Reserve

VERSION = 6  # of the manifest; both ends must have the same

Models = torch.nn.Module | Mapping[str, torch.nn.Module] | Sequence[torch.nn.Module] | None
Optimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer] | None


_HELD = ("value", "tensor", "array", "generator")  # in which parts have what they carry


class State:
    """The state of this rank: made once, by protect()."""

    def __init__(
        self,
        model: Models = None,
        optimizer: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
        *,
        save: Save | None = None,
        load: Load | None = None,
        folder: Path | None = None,
    ) -> None:
        """Raises `RefusedError`, with the remedy, for anything in there that cannot be carried.

        `save`, `load`: the script's own functions, instead of `model` and `optimizer` (see `saved`).
        `folder`: where the files of save(path) may lie while they are moved.
        """
        optimizers = [(path, optimizer_inside(one)) for path, one in _named("optimizer", optimizer, Optimizer)]
        named = [*_named("model", model, torch.nn.Module), *optimizers]
        named += [(f"{path}.optim", inner) for path, value in named for inner in zero.inside(value)]
        named += [(f"state[{key!r}]", value) for key, value in (extra or {}).items()]
        parts = [part_of(value, path) for path, value in named]
        if (save is None) != (load is None):
            raise RefusedError("protect() was given one of save and load", "give both, or neither")
        if save is not None and load is not None:
            parts.append(SavedPart(save, load, folder))
        if not parts:
            raise RefusedError("protect() was given no state", "pass model= and optimizer=, or save= and load=")
        self._parts: dict[str, Part] = {part.path: part for part in parts}
        self._watched: list[Optimizer] = []
        self.schedules: list[LRScheduler] = []  # with save() and load(): those of its optimizers
        self.known = 0  # how many optimizers were found by their step, so far
        self._ours: tuple[int, frozenset[int]] = (-1, frozenset())  # how many are known, and their ids: all are held
        self._found = _living_ddps() if save is not None and model is None else []
        self._landing: Landing | None = None
        self._put_back: Callable[[], None] | None = None  # what is this rank's own
        self._arrived: dict[str, Any] = {}
        self._layouts: list[ddp.Layout] | None = None
        self.saves = save is not None
        # Steps between two snapshots, and between two comparisons; 0: none. A replacement is told with the state.
        self.snapshot_every = self.compare_every = 0
        self.snapshot_auto, self.snapshot_buddies = False, 1
        self.lying: set[str] = set()  # parameters whose gradients were seen to lie there from an earlier call
        self.cleared: bool | None = None  # whether calls were seen to begin with gradients of zeros, and no others
        self.apart: bool | None = None  # whether optimizers step in calls of their own; None: not known yet
        self.agreed: set[str] = set()  # in what replicas were once alike: from then on a difference is a fault
        self.reserve = Reserve()  # memory for what arrives
        generators = [part for part in self.flat() if isinstance(part, GeneratorPart)]
        self.private = Private(self.modules(), generators, self._looked_at(), self.flat)
        self._meshes = self._find_meshes()
        self._fsdp, self.pipeline = fsdp.living(), Pipeline()
        self._check()

    # ------------------------------------------------------------ what is in it

    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """All modules of the state, DDP unwrapped, with the names they have in messages."""
        known = [(part.path, part.module) for part in self.flat() if isinstance(part, ModulePart)]
        return known + [(f"DDP module {at}", wrapper.module) for at, wrapper in enumerate(self._found)]

    def _looked_at(self) -> Hidden:
        """Modules and other objects of the script, whose attributes are looked at."""
        others = [(part.path, part.value) for part in self.flat() if isinstance(part, StatefulPart)]
        others = [(path, value) for path, value in others if not isinstance(value, (LRScheduler, GradScaler))]
        own = [part for part in self.flat() if isinstance(part, OptimizerPart)]
        others += [(part.path, part.optimizer) for part in own]
        others += [(f"DDP {at}", wrapper) for at, wrapper in enumerate(self._found)]
        known = [getattr(part, name) for part in self.flat() for name in _HELD if hasattr(part, name)]
        return Hidden([*self.modules(), *others], carried=known, quiet=self.saves, known=self.objects)

    def optimizers(self) -> list[Optimizer]:
        """All optimizers of the state, and those that are only watched."""
        return [part.optimizer for part in self.flat() if isinstance(part, OptimizerPart)] + self._watched

    def zeros(self) -> list[Optimizer]:
        """Those that gather parameters after their update, in a fixed order."""
        return [optimizer for optimizer in self.optimizers() if zero.is_zero(optimizer)]

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Whether it is one of `optimizers()`; asked in every step."""
        if self._ours[0] != self.known:
            self._ours = (self.known, frozenset(map(id, self.optimizers())))
        return id(optimizer) in self._ours[1]

    def watch(self, optimizer: Optimizer) -> None:
        """With save() and load(): an optimizer that is known by its step only. Its parameters' gradients count."""
        if not any(optimizer is known for known in self.optimizers()):
            self._watched.append(optimizer)
            self.known += 1

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that has a gradient: parameters of modules and optimizers, each once, in a fixed order."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in self.modules():
            for name, parameter in fsdp.named_parameters(module):
                found.setdefault(id(parameter), (f"{path}.{name}", parameter))
        for at, optimizer in enumerate(self.optimizers()):
            params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            for number, parameter in enumerate(params):
                found.setdefault(id(parameter), (f"parameter {number} of optimizer {at}", parameter))
        return list(found.values())

    def objects(self) -> list[Any]:
        """What the state is made of, as scripts hold it: tensors, generators, containers, objects with a state."""
        found: list[Any] = [tensor for _, tensor in self.parameters()]
        for _, module in self.modules():
            found += [tensor for _, tensor in named_tensors(module)]
        return found + [part.held() for part in self.flat()]

    def given_besides(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors of `extra`, with the path of their part: scripts may change them between two calls."""
        found: list[tuple[str, torch.Tensor]] = []
        for part in self.flat():
            if part.path.startswith("state["):
                held = part.held()
                if isinstance(held, torch.Tensor):
                    found.append((part.path, held))
                elif isinstance(held, torch.nn.Module):
                    found += [(part.path, tensor) for _, tensor in named_tensors(held)]
                elif isinstance(part, (ContainerPart, StatefulPart)):
                    found += [(part.path, tensor) for tensor in _tensors_in(part.told_values())]
        return found

    def ddps(self) -> list[DistributedDataParallel]:
        """All DDP wrappers of the state, in a fixed order."""
        given = [part.given for part in self.flat() if isinstance(part, ModulePart)]
        return list(dict.fromkeys(chain(chain.from_iterable(map(ddp.find, given)), self._found)))

    def fsdp_states(self) -> list[Any]:
        """FSDP2's states of all modules there are, whether or not they are in the state: all take part in steps."""
        return [state for reference in self._fsdp if (state := reference()) is not None]

    def _told_states(self) -> list[Any]:
        return [state for _, module in self.modules() for state in fsdp.states(module)]

    def parts(self) -> dict[str, Part]:
        """The parts by their paths, containers not opened."""
        return dict(self._parts)

    def flat(self) -> Iterator[Part]:
        """All parts, those inside containers too."""
        waiting = list(self._parts.values())
        while waiting:
            part = waiting.pop(0)
            yield part
            if isinstance(part, ContainerPart):
                waiting[:0] = part.parts()

    # ------------------------------------------------------------ to tell

    def manifest(self) -> tuple[bytes, list[torch.Tensor]]:
        """The encoded tree, and the tensors it refers to, in order; shared ones once, nothing copied.

        To be called while the main thread stands still, and the tensors to be read before it goes on.
        """
        told = tree.Fields(
            self._tree(),
            ddp=self.ddp_layouts(),
            fsdp=fsdp.told(self._told_states()),
            pipeline=list(self.pipeline.told()),
            every=[self.snapshot_every, self.compare_every, sorted(self.agreed), self.cleared is True],
            lying=[sorted(self.lying), self.gradients().lying],
        )
        data, tensors = tree.encode(told, "state")
        if any(tensor.is_cuda for tensor in tensors):
            device.wait()  # what is queued may still write to them
        return data, tensors

    def digest(self) -> str:
        """32 letters over every bit of the state; equal for equal states, whatever order a dict was filled in.

        DDP's buckets are left out: they say how gradients will be summed, which shows in the bits soon enough.
        """
        digest = Digest()
        data, tensors = tree.encode(self._tree(), "state", canonical=True)
        digest.add(data)
        for tensor in tensors:
            digest.add_tensor(tensor)
        return digest.text()

    def fingerprint(self) -> str:
        """A name for what was built, not for its values: equal on all ranks that can carry one another's state."""
        digest = Digest()
        digest.add("\n".join(self.description()).encode())
        return digest.text()

    def description(self) -> list[str]:
        """What the fingerprint is made of, a line for each tensor, optimizer and other part."""
        lines = [f"{path}: {type(part).__name__}" for path, part in self._parts.items()]
        for path, module in self.modules():
            for name, tensor in named_tensors(module):
                frozen = " frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
                lines.append(f"{path}.{name}: {_built(tensor)}{frozen}")
        for at, optimizer in enumerate(self.optimizers()):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            lines.append(f"optimizer {at}: {type(optimizer).__qualname__}, groups of {sizes} parameters")
        return lines

    # ------------------------------------------------------------ to take

    def receive(self, data: bytes | bytearray | memoryview) -> list[torch.Tensor]:
        """Take another rank's manifest: the tensors, live or new, into which the bytes shall be put, in order.

        May be called again if the bytes do not come. Raises `StateMismatchError`, naming the tensor, if the state does
        not fit what this script has built, and `ValueError` if it is none.
        """
        arrived = tree.decode(data)
        if not isinstance(arrived, dict) or arrived.get("version") != VERSION:
            raise StateMismatchError("the state that arrives was written by another version of torchrelay")
        if self._put_back is None:  # before the first byte arrives
            self._put_back = self.private.hold()
        self._landing = None  # what a try before this one has allocated is free before we allocate again
        landing = Landing(self.private.kept(), self.reserve, self._meshes)
        try:
            check_names("the state", self._parts, arrived["parts"])
            for path, part in self._parts.items():
                part.take(arrived["parts"][path], landing)
            arrived["lying"] = landing.anyhow(arrived["lying"], [[], {}], "gradients")
            tensors = landing.tensors()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state that arrives is not whole: {error!r}") from error
        if len(arrived["gradients"]) != len(self.parameters()):
            raise StateMismatchError("the source has another number of parameters")
        self._landing, self._arrived = landing, arrived
        return tensors

    def commit_received(self) -> None:
        """All bytes have landed and their digest is right: load what does not lie in a tensor of the script."""
        assert self._landing is not None, "receive() comes before commit_received()"
        assert self._put_back is not None, "receive() has held it"
        self._landing.finish()
        for part in self._parts.values():
            part.settle()
        self._put_back()
        self._put_back = None
        self._layouts = self._arrived["ddp"]
        self.snapshot_every, self.compare_every, agreed, cleared = self._arrived["every"]
        self.cleared = cleared or None
        self.agreed = set(agreed)
        fsdp.take(self._told_states(), self._arrived["fsdp"])
        self.pipeline.take(self._arrived["pipeline"])
        names, values = self._arrived["lying"]
        self.lying |= set(names)
        self.put_gradients(Gradients(self._arrived["gradients"], values, cleared))
        self._landing, self._arrived, self.reserve = None, {}, Reserve()

    def expect(self) -> None:
        """For a replacement, at protect(): its script runs on between calls as if it had trained, without warnings."""
        for optimizer in self.optimizers():
            mark_stepped(optimizer)

    # ------------------------------------------------------------ gradients, DDP

    def gradients(self) -> Gradients:
        """Those between two calls. Values count only of what may lie there from an earlier call, in few scripts."""
        parameters = self.parameters()
        all_count = self.apart is not False and len(self.optimizers()) > 1
        found = gradients.look(parameters, [name for name, _ in parameters] if all_count else self.lying)
        return found._replace(cleared=self.cleared is True)

    def put_gradients(self, found: Gradients) -> None:
        """Make them so. Also to be called after DDP was renewed."""
        gradients.put(self.parameters(), found)

    def ddp_layouts(self) -> list[ddp.Layout]:
        """For each DDP wrapper, its buckets: those received, until DDP was renewed with them, else its own."""
        return self._own_layouts() if self._layouts is None else self._layouts

    def received_layouts(self) -> list[ddp.Layout] | None:
        """For each DDP wrapper, the layout that was received and still counts; None if none was."""
        return self._layouts

    def forget_received_layouts(self) -> None:
        """DDP was renewed with the layouts that were received: from now on its own count."""
        self._layouts = None

    # ------------------------------------------------------------ inside

    def known_layouts(self) -> list[ddp.Layout]:
        """For each DDP wrapper its own layout, if it is final and known; else nothing. From any thread."""
        known = [ddp.known_layout(wrapper) for wrapper in self.ddps() if ddp.is_final(wrapper)]
        found = [layout for layout in known if layout is not None]
        return found if len(found) == len(self.ddps()) else []

    def _own_layouts(self) -> list[ddp.Layout]:
        return [ddp.layout(wrapper) for wrapper in self.ddps()]

    def _tree(self) -> dict[str, Any]:
        parts = tree.Named((path, part.give()) for path, part in self._parts.items())
        there = gradients.there(each for _, each in self.parameters())
        return tree.Fields(version=VERSION, parts=parts, gradients=there)

    def _find_meshes(self) -> dict[str, Any]:
        """The device meshes of the modules' DTensors, by name."""
        try:
            return shards.meshes(tensor for _, module in self.modules() for _, tensor in named_tensors(module))
        except ValueError as error:
            reason, _, remedy = str(error).partition(": ")
            raise RefusedError(reason, remedy) from error

    def _check(self) -> None:
        """Tell the state once, so that what cannot be carried is refused at protect() and not at the first fault."""
        try:
            for path, part in self._parts.items():
                if not isinstance(part, SavedPart):  # may be slow, and collective scripts save at their own times
                    tree.encode(part.give(), path)
        except TypeError as error:
            reason, _, remedy = str(error).partition(": ")
            raise RefusedError(reason, remedy or "keep it out of protect()") from error


def _built(tensor: torch.Tensor) -> str:
    part = shards.local(tensor)
    spread = f" of {shards.describe(tensor)}" if shards.is_shard(tensor) else ""
    return f"{list(part.shape)} {part.dtype} {memory.strides(part)}{spread}"


def _named(name: str, given: Any, kind: type) -> list[tuple[str, Any]]:
    """One object, or several in a dict or sequence, with a path for each."""
    if given is None:
        return []
    if isinstance(given, kind):
        return [(name, given)]
    if isinstance(given, Mapping):
        found = [(f"{name}[{key!r}]", value) for key, value in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        found = [(f"{name}[{at}]", value) for at, value in enumerate(given)]
    else:
        found = [(name, given)]
    for path, value in found:
        if not isinstance(value, kind):
            expected = f"torch.{'nn' if kind is torch.nn.Module else 'optim'}.{kind.__name__}"
            raise RefusedError(
                f"{path} is a {type(value).__qualname__}, no {expected}", "pass other objects in state={...}"
            )
    return found


def _living_ddps() -> list[DistributedDataParallel]:
    """All DDP wrappers of this process, in an order that is the same on every rank.

    With save() and load() nobody names them to us.
    """
    # By type(), not isinstance(): asking a lazy proxy for its class could import half the world.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    found = [wrapper for wrapper in found if ddp.has_group(wrapper)]
    return sorted(found, key=lambda wrapper: [(name, tuple(one.shape)) for name, one in wrapper.named_parameters()])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # others may wait for a collective when they are looked at
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        for entry in entries_of(value):
            yield from _tensors_in(entry)
