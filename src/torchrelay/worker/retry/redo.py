"""Redo: what it takes to run a call again as if it had never been started.

`mark` at the entry copies what a forward and backward pass change: buffers, gradient scale, generators, learning
rates. What else changes before the gate is found out by digests, in the first calls and in one of many later: a small
thing is copied from then on, a large one is refused with the reason. So `rewind` never goes on from a doubtful state.
Who takes over a rank takes over what its calls have shown, too: to look at them again would make its first ones slow.

    mark, probe_entry ... the function ... probe_gate, gate     in each call
    rewind                                                      after a fault, and again when DDP was renewed
    learned, take_over                                          told in the private record, to the rank's next holder
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.errors import RefusedError, with_article
from torchrelay.worker.parallel import ddp
from torchrelay.worker.parallel.fsdp import Settings
from torchrelay.worker.parallel.pipeline import NoneYet, Settled
from torchrelay.worker.parallel.shards import is_shard, version
from torchrelay.worker.retry.marks import Copied, Draws, HyperParameters, Mark, Modes, Probe, Scale, Schedule, Tensors
from torchrelay.worker.state import gradients
from torchrelay.worker.state.buffers import Buffers
from torchrelay.worker.state.gradients import Carried, CarriedGradients, Gradients, Lying
from torchrelay.worker.state.parts import GeneratorPart, ModulePart, StatefulPart
from torchrelay.worker.state.record import Learned
from torchrelay.worker.state.state import State
from torchrelay.worker.state.withheld import give_back
from torchrelay.worker.tensors.digest import Digest

FIRST = 3  # calls that are looked at from the start
EVERY = 256  # and one after so many; at what is large less often, as to look takes the longer
WATCHED = 2  # calls of a function with gradients lying where they lie, in which it is seen what becomes of them
MOST_COURSES = 16  # of a function, and gradients that lie there
SPREAD = 4  # then after twice and four times as many, and from there on one of four times as many
COPY_LIMIT = 16 << 20  # bytes of a part that may be copied at every entry
_grad, _changes, _trained = attrgetter("grad"), attrgetter("_version"), attrgetter("requires_grad")
_hooks, _late_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Redo:
    """The way back to the entry of a call. A run has one for its steps and one for its sections."""

    def __init__(self, state: State, *, sections: bool = False, first: int = FIRST, every: int = EVERY) -> None:
        """`first`, `every`: which calls are looked at: so many at first, one after so many more, and ever fewer."""
        self._state = state
        self._hidden = state.private.hidden
        self._sections = sections
        self._first, self._every = first, every
        self._spacing = every
        self._calls = 0
        self._looks = 0  # that came to the gate of their call
        self._probe = Probe(state)
        self._buffers: Buffers = state.private.module_buffers
        self._bound = self._bound_now = self._buffers.bound()  # buffers at the entry, and as seen last
        self._moving: set[str] | None = None  # buffers that change in a call; None until the first probes are over
        self._seen_moving: set[str] = set()
        self._copied: dict[str, Copied] = {}  # parts that are known to change before the gate
        self._tried: dict[str, Copied] = {}  # small parts that may turn out to; copied while a call is probed
        self._tried_buffers: list[Mark] = []
        self._before: dict[str, str] = {}  # digests at the entry of a call that is probed
        self._carried: CarriedGradients | None = None
        self._looks_at_all = False  # at this call, not only at what becomes of gradients
        self._looked: CarriedGradients | None = None  # the same, once the gate has come
        self._lying = Lying()
        self._lying_before: dict[str, torch.Tensor] = {}  # what they were at the entry of the call that is rewound
        self._stepped: set[int] = set()  # ids of optimizers that step in this call
        self._lying_here: set[str] = set()  # names of gradients of which this call has shown that they lie there
        self._known_courses: dict[tuple[Any, bytes], int] = {}  # how often a function was watched with these gradients
        self._trained: list[bool] = []  # which parameters get gradients, at the entry
        self._groups: list[int] = []  # how many groups each optimizer has
        self._hooks: list[int] = []  # the numbers of those that parameters have
        self._still: dict[str, torch.Tensor] = {}  # buffers that no call was seen to change: not copied
        self._still_versions: list[int] = []
        self._rewritten: set[str] = set()  # buffers that are written to and stay what they are: no look is due for them
        self._look_next = False  # others were written to in a call that was not looked at
        self._has_gradient = b""
        self._versions: list[int] = []
        self._rewound = False
        self._stale = False
        self._noted = b"", b"", b""
        self.learned = Learned(0, 0)  # what the calls have shown so far; what one shows at its gate is in its record
        self._prepare()

    @property
    def probing(self) -> bool:
        """Whether the call under way is being looked at, and has not come to its gate."""
        return self._looks_at_all and self._carried is not None

    @property
    def moving(self) -> frozenset[str]:
        """Buffers that have been seen to change in a call before its gate."""
        return frozenset(self._seen_moving)

    def mark(self) -> None:
        """At the entry of a call: remember all that it may change before its gate."""
        self._refresh()
        if self._stale or self._known != self._state.known:
            self._prepare()
        self._bound = self._buffers.bound()
        for mark in self._marks:
            mark.mark()
        held = filter(None, [*map(_hooks, self._parameters), *map(_late_hooks, self._parameters)])
        hooks = [*itertools.chain.from_iterable(held)]  # their numbers, of which none comes twice
        if hooks != self._hooks:
            self._hooks = hooks
            self._hidden.stir()
        trained = list(map(_trained, self._parameters))
        if trained != self._trained or self._groups != [len(one.param_groups) for one in self._optimizers]:
            self._changed_course(trained)
        self._has_gradient = bytes(map(is_not, map(_grad, self._parameters), repeat(None)))
        self._lying.mark(self._named_lying() if self._state.lying else {})
        self._versions = list(map(self._version, self._parameters))
        if self._still:
            self._still_versions = list(map(_changes, self._still.values()))
        self._rewound, self._lying_before, self._looked = False, {}, None
        if self._stepped:
            self._state.apart = self._state.apart or len(self._stepped) < len(self._optimizers)
            self._stepped.clear()
        self._hidden.mark()

    def _refresh(self) -> None:
        """Buffers may be others than before: a forward pass has bound them anew."""
        self._state.private.refresh()
        if self._bound_now is not (bound_now := self._buffers.bound()):
            self._bound_now = bound_now
            self._probe.buffers = self._state.private.buffers()
            self._stale = True

    def _changed_course(self, trained: list[bool]) -> None:
        """Layers are frozen, trained, or given to an optimizer from now on. Raises `RefusedError` if one is left out.

        What replacements take with the state must be all that this changes.
        """
        self._trained, self._groups = trained, [len(one.param_groups) for one in self._optimizers]
        for wrapper in self._state.ddps():
            if left_out := ddp.left_out(wrapper):
                raise RefusedError(
                    f"{left_out[0]} is trained, but it was frozen when DDP was made: its gradients are not averaged "
                    "over the ranks",
                    "make DDP while all layers are to be trained, with find_unused_parameters=True, and freeze them "
                    "afterwards",
                )
        known = set(map(id, self._parameters))
        for optimizer in self._optimizers:
            for at, group in enumerate(optimizer.param_groups):
                if not all(id(parameter) in known for parameter in group["params"]):
                    raise RefusedError(
                        f"group {at} of {with_article(type(optimizer).__name__)} was added after protect(), with "
                        "parameters of no module that was given to it",
                        "pass all modules: protect(model=[first, second]), or add the group before protect()",
                    )

    def rewind(self) -> None:
        """Put all back as it was at the last mark. May be called twice, and must be once more when DDP was renewed.

        Raises `RefusedError` if something has changed of which there is no copy.
        """
        written = [] if self._rewound else [*self._written(), *self._unsaved()]
        lying = self._lying_at_entry()
        with torch.no_grad():
            self._buffers.bind(self._bound)
            self._refresh()
            for mark in (*self._marks, *self._tried_buffers, *self._tried.values()):
                mark.rewind()
            self._hidden.rewind()
        self._rewound = True
        self._drop_carried()
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        gradients.put(self._named(), Gradients(self._has_gradient, lying, self._state.cleared is True))
        self._state.lying.update(lying)
        if self._before:
            now = self._probe.look(self._before)
            written = [path for path, digest in self._before.items() if now[path] != digest]
        if written:
            raise RefusedError(
                f"{written[0]} was changed before the gate of a call that a fault has cut short, and there is no copy",
                "change it after optimizer.step(), or between the calls",
            )

    # ------------------------------------------------------------ looking at a call

    def probe_entry(self, function: Any = None) -> None:
        """After `mark`: if this call is to be looked at, remember what everything was. `function`: what is called."""
        self._calls += 1
        self.learned = Learned(self._calls, self._looks, *self._noted)
        if self._carried is not None or self._before:
            self._drop_carried()
            self._before, self._tried, self._tried_buffers = {}, {}, []
        self._lying_here.clear()
        first = self._looks < self._first
        self._looks_at_all = False
        if not first and not self._look_next and (self._calls % self._every or not self._due()):
            self._hidden.look_entry(only_if_stirred=True)
            if self._is_new_course(function):
                self._carried = self._watch()
            return
        if self._moving is not None:
            still = [buffer for name, buffer in self._probe.buffers.items() if name not in self._moving]
            self._tried_buffers = [Tensors(still)]
        candidates = [part for part in self._probe.copyable(COPY_LIMIT) if part.path not in self._copied]
        self._tried = {part.path: Copied(part) for part in candidates}
        for mark in (*self._tried_buffers, *self._tried.values()):
            mark.mark()
        whole = first or not self._calls % self._spacing
        self._looks_at_all = True
        self._before = self._probe.look(self._probe.names if whole else self._probe.small(COPY_LIMIT))
        self._carried = self._watch()
        self._hidden.look_entry()

    def _due(self) -> bool:
        """Of the calls whose number `every` divides: the same ones on all ranks, as each keeps the others waiting.

        (After a fault the counts of those whose call was cut are ahead: it costs time, and no more.)
        """
        turn = self._calls // self._every
        return turn % SPREAD == 0 or (turn < SPREAD and turn.bit_count() == 1)

    def _watch(self) -> CarriedGradients:
        # A section makes no update: gradients that lie there are none of its business.
        if self._sections:
            return CarriedGradients([])
        with_one = [(name, each.grad) for name, each in self._named() if each.grad is not None]
        fits = len(self._optimizers) > 1 and sum(gradients.size(grad) for _, grad in with_one) <= COPY_LIMIT
        copies = {name: gradients.copy(grad) for name, grad in with_one} if fits else {}
        watched = CarriedGradients(self._named(), [module for _, module in self._state.modules()], copies=copies)
        if watched.cleared is not None:
            self._state.cleared = watched.cleared and self._state.cleared is not False
        return watched

    def _is_new_course(self, function: Any) -> bool:
        """Whether gradients lie there with which this function was hardly ever called."""
        course = function, self._has_gradient
        times = self._known_courses.get(course, 0)
        if self._sections or times == WATCHED or (not times and len(self._known_courses) == MOST_COURSES):
            return False
        self._known_courses[course] = times + 1
        return True

    def also_steps(self, optimizer: Optimizer) -> None:
        """Another optimizer steps behind the gate. Raises `RefusedError` if sums were carried into this call."""
        self._stepped.add(id(optimizer))
        give_back(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._lying_here:
            stepping = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            _refuse_carried([name for name, each in self._named() if name in self._lying_here and id(each) in stepping])

    def probe_gate(self, optimizer: Optimizer | None = None) -> None:
        """Before the gate: learn from what has changed since the entry. Raises `RefusedError` if a redo would be wrong.

        `optimizer`: the one that is about to step, if one is.
        """
        if optimizer is not None:
            self._stepped.add(id(optimizer))
        if self._carried is not None:
            self._looked, self._carried = self._carried, None
            groups = optimizer.param_groups if optimizer is not None else []
            stepping = (parameter for group in groups for parameter in group["params"])
            self._take_in(self._looked.close(stepping, updates=optimizer is not None))
        if optimizer is not None:  # of what it steps, only zeros were carried into this call
            give_back(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._refresh()
        if not self._looks_at_all:
            anew = not self._state.private.rebound <= (self._moving or set())
            if anew or (self._still and list(map(_changes, self._still.values())) != self._still_versions):
                self._look_next = True  # digests will tell
            self._hidden.look_gate()
            return
        # With save() all is looked at as at the entry, see below: but not what moves there.
        moving = [path for path in self._before if path in self._probe.buffers] if self._state.saves else []
        now = self._probe.look(moving) if moving else {}
        with self._as_at_entry():
            now |= self._probe.look(path for path in self._before if path not in now)
        self._looks += 1
        self._look_next = False
        changed = [path for path, digest in self._before.items() if now[path] != digest]
        if self._written():  # and put back since: SAM and its like. Whoever is cut in between has no way back
            modules = {path for path, part in self._probe.parts.items() if isinstance(part, ModulePart)}
            changed += sorted(modules.intersection(self._before).difference(changed))
        if rewritten := set(self._stirred()).difference(changed):
            self._rewritten |= rewritten
            self._stale = True
        self._learn(changed)
        self._hidden.look_gate()

    def _take_in(self, found: Carried) -> None:
        _refuse_carried(found.refused)
        self._lying.learn(found)
        self._lying_here.update(found.lying)
        self._state.lying.update(found.lying)

    def _learn(self, changed: list[str]) -> None:
        for path in changed:
            del self._before[path]  # rewind() puts it back, and need not compare it
            if path in self._probe.buffers:
                self._seen_moving.add(path)
            elif path in self._tried:
                self._copied[path] = self._tried[path]
            elif path not in self._copied and not self._just_found(path):
                self._refuse(path)
        self._tried = {path: copied for path, copied in self._tried.items() if path in self._copied}
        if self._looks >= self._first and self._moving != self._seen_moving:
            # The first probes are over: only what has been seen to move is copied and kept from now on.
            self._settle()
        self._stale = self._stale or bool(changed)
        self._note()

    def _settle(self) -> None:
        self._moving = set(self._seen_moving)
        self._state.private.settle(self._moving, sections=self._sections)
        if not self._state.saves:
            # For each 4 GB four times as many, as only these are looked at by then.
            large = self._probe.size() >> 30
            self._spacing = self._every * (SPREAD * (1 + large // SPREAD) if large else 1)
        self._stale = True

    def _refuse(self, path: str) -> None:
        remedy = f"or keep it below {COPY_LIMIT >> 20} MB: it is then copied at every entry"
        if path == "save()":
            path = "what save() returns"
            remedy = "or pass model= and optimizer= to protect() instead of save= and load="
        raise RefusedError(
            f"{path} changes between the entry of a call and its gate, which a redo could not undo",
            f"change it after optimizer.step(), or between the calls; {remedy}",
        )

    def _just_found(self, path: str) -> bool:
        """Whether save() changed in the very call in which an optimizer showed up, so that its entry is not known."""
        return path == "save()" and self._known != self._state.known

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self._names, self._parameters, strict=True))

    def _lying_at_entry(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients that lay there. Raises `RefusedError` if there is none of one."""
        if self._rewound:
            return self._lying_before
        try:
            self._lying_before = self._lying.at_entry(self._named_lying(), self._carried or self._looked)
        except LookupError as error:
            raise RefusedError(
                f"the gradient of {error.args[0]} was changed in a call that a fault has cut short, one of the first "
                "of its kind, and there is no copy",
                "zero gradients of other networks before they are clipped or changed",
            ) from error
        return self._lying_before

    def _named_lying(self) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter in self._named() if name in self._state.lying}

    def _drop_carried(self) -> None:
        if self._carried is not None:
            self._carried.close()
            self._carried = None

    # ------------------------------------------------------------ what was learned

    def _note(self) -> None:
        # By name: the order of a set in the script may be another one in another process.
        buffers, parts = sorted(self._probe.buffers), sorted(self._probe.parts)
        moving = bytes(1 if name in self._seen_moving else 2 * (name in self._rewritten) for name in buffers)
        self._noted = _digest(buffers, parts), moving, bytes(path in self._copied for path in parts)
        self.learned = Learned(self._calls, self._looks, *self._noted)

    def take_over(self, learned: Learned) -> None:
        """For a replacement, before its first call: what the calls of this rank's last holder have shown."""
        buffers, parts = sorted(self._probe.buffers), sorted(self._probe.parts)
        if learned.names != _digest(buffers, parts):
            return  # it has learned nothing yet, or of another script
        if self._state.saves:
            return  # its optimizers are known by their step only: until then a look must tell that all was put back
        self._calls, self._looks = learned.calls, learned.looks
        self._seen_moving = {name for name, moves in zip(buffers, learned.moving, strict=True) if moves == 1}
        self._rewritten = {name for name, moves in zip(buffers, learned.moving, strict=True) if moves == 2}
        changed = [path for path, changes in zip(parts, learned.copied, strict=True) if changes]
        self._copied = {path: Copied(self._probe.parts[path]) for path in changed}
        self._note()
        if self._looks >= self._first:
            self._settle()
        self._stale = True

    # ------------------------------------------------------------ what is put back

    def _prepare(self) -> None:
        """Decide what is copied at an entry, from what is known by now."""
        self._known = self._state.known
        self._stale = False
        self._marks = [*self._usual_marks(), *self._copied.values()]
        self._parameters = [parameter for _, parameter in self._state.parameters()]
        self._names = [name for name, _ in self._state.parameters()]
        self._optimizers = self._state.optimizers()
        self._still = self._unmoved()
        self._still_versions = list(map(_changes, self._still.values()))
        # Asked of each parameter in every step: where there are no shards, without a look whether it is one.
        self._version = version if any(map(is_shard, self._parameters)) else attrgetter("_version")

    def _unmoved(self) -> dict[str, torch.Tensor]:
        """Buffers that are not known to move, and whose writes are counted and tell something."""
        known = self._rewritten | (self._moving or set())
        named = self._probe.buffers.items()
        return {name: buffer for name, buffer in named if name not in known and not buffer.is_inference()}

    def _usual_marks(self) -> list[Mark]:
        buffers = self._probe.buffers
        moving = [buffer for name, buffer in buffers.items() if self._moving is None or name in self._moving]
        marks: list[Mark] = [Tensors(moving)] if moving else []
        marks.append(Modes([module for _, module in self._state.modules()]))
        marks += [Settings(states)] if (states := self._state.fsdp_states()) else []
        marks.append(Settled(self._state.pipeline) if self._state.pipeline.stages() else NoneYet())
        marks += [HyperParameters(optimizer) for optimizer in self._state.optimizers()]
        for part in self._state.flat():
            if isinstance(part, GeneratorPart):
                marks.append(Draws(part.generator))
            elif isinstance(part, StatefulPart) and isinstance(part.value, LRScheduler):
                marks.append(Schedule(part.value))
            elif isinstance(part, StatefulPart) and isinstance(part.value, GradScaler):
                marks.append(Scale(part.value))
        return marks

    def _stirred(self) -> list[str]:
        """Buffers that were written to since the mark although no call was seen to change them before."""
        pairs = zip(self._still.items(), self._still_versions, strict=True)
        return [name for (name, buffer), before in pairs if _changes(buffer) != before]

    def _unsaved(self) -> list[str]:
        """Those of them of which there is no copy: after the first looks, in a call that is not looked at."""
        return [] if self._moving is None or self._tried_buffers else self._stirred()

    def _written(self) -> list[str]:
        """Parameters that were written to since the mark, as their version counters tell, unless they are copied."""
        if any(isinstance(self._probe.parts[path], ModulePart) for path in self._copied):
            return []
        pairs = zip(self._names, self._parameters, self._versions, strict=True)
        return [name for name, parameter, before in pairs if self._version(parameter) != before]

    @contextmanager
    def _as_at_entry(self) -> Iterator[None]:
        """With save(): let it see what is put back in any case as it was at the entry, and put that right again.

        What save() returns holds buffers and learning rates, too, and would seem to change for their sake.
        """
        if not self._state.saves:
            yield
            return
        now = self._usual_marks()
        for mark in now:
            mark.mark()
        for mark in self._marks:
            mark.rewind()
        yield
        for mark in now:
            mark.rewind()


def _refuse_carried(names: list[str]) -> None:
    if names:
        raise RefusedError(
            f"the gradient of {names[0]} was not zeroed before this call added to it: sums of gradients are "
            "carried from one call into the next, and a call that is redone could not tell them",
            "call optimizer.zero_grad() inside the step, before backward; for gradient accumulation take all "
            "micro-batches of an update in one call: run.batches(loader, micro_batches=n)",
        )


def _digest(*lists: list[str]) -> bytes:
    """16 bytes for lists of names."""
    digest = Digest()
    for names in lists:
        digest.add("\n".join([*names, ""]).encode() + b"\0")
    return digest.raw()
