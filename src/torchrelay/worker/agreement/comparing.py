"""Comparing: every so many steps ranks compare what they hold, to find a bit that has flipped where nobody looked.

And when 1, 2, 4, ... 64 steps are committed after the start, or after ranks have changed hands: a replacement that
decides otherwise than its replicas, by something that it does not have from them, soon holds other bits. Besides
parameters and optimizer state they compare values: learning rates, schedules, and whatever else the state holds.

At the entry of the step sums over parameters and optimizer state are made; in its gate all ranks tell one another
theirs. Nobody passes that gate if replicas differ: the step is made again, without the one that differs from most. What
it has given to the steps since the last comparison is in all of them, and alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.events import ReplicasDiffer
from torchrelay.protocol.messages.ids import START, Point, Rank
from torchrelay.protocol.recovery.replicas import Verdict, judge_replicas
from torchrelay.worker.agreement import agreement
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.parallel import shards
from torchrelay.worker.session import Session
from torchrelay.worker.state import layout
from torchrelay.worker.state.parts import ArrayPart, ContainerPart, OptimizerPart, StatefulPart, TensorPart
from torchrelay.worker.state.saved import SavedPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import sums, tree
from torchrelay.worker.tensors.digest import Digest

EVERY = 100  # steps
AFTER = (1, 2, 4, 8, 16, 32, 64)  # steps after the start, and after ranks have changed hands
EARLY = (1, 2, 4, 8)  # steps after the start: what save() returns is looked at, too
RECENT = 8  # so many steps after that a difference is a replacement's way, and no fault of a machine
_version = attrgetter("_version")
TENSORS, SETTINGS, VALUES = "tensors", "settings", "values"
_SETTINGS = ".param_groups["  # of optimizers: where these differ, parameters soon will
SEEN, NEVER = "+", "-"  # before a shard's name: whether its replicas have agreed in a comparison before
_UNLIKE = (
    "ranks that count as replicas (of the shard {}) hold different %s, and have since the first comparison: a lost one "
    "would get another one's"
)
_OWN_SHARDS = (
    "if each rank trains its own, name what it holds: Options(shard=...); Options(compare_every=0) ends this check, "
    "and with it the promise"
)
NEVER_ALIKE = {
    TENSORS: (
        _UNLIKE % "parameters or optimizer state",
        f"apply to parameters only what is alike on all ranks, such as reduced gradients; {_OWN_SHARDS}",
    ),
    SETTINGS: (
        _UNLIKE % "options of their optimizers, such as a learning rate, or numbers in their state",
        f"set options by what is alike on all ranks; {_OWN_SHARDS}",
    ),
}

SAVED_OTHERWISE = (
    "ranks that count as replicas (of the shard {}) save other values: {}. A lost one would get another one's",
    "let save() return only what is alike on all ranks; if each rank trains its own, name what it holds: "
    "Options(shard=...); Options(compare_every=0) ends this check, and with it the promise",
)


def interval(given: int | None, *, replicas: bool) -> int:
    """Steps between two comparisons; 0: none. `replicas`: some ranks hold the same. Raises `RefusedError`."""
    if given is None:
        return EVERY if replicas else 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise RefusedError(f"compare_every is {given!r}", "give a number of steps, or 0 for none")
    return given


class Differing(Exception):
    """Replicas differ, as all ranks see it alike."""

    def __init__(self, event: ReplicasDiffer) -> None:
        super().__init__(event.evidence)
        self.event = event


class Comparison:
    """Of one rank."""

    def __init__(self, session: Session, state: State, shard: str) -> None:
        """`shard`: by which replicas know one another."""
        self._session = session
        self._state = state
        self._shard = shard
        self._sums: _Sums | None = None
        self._is_early = False
        self._left: list[int] = []  # by the last call: how often parameters were written, and where they are
        self._known = -1  # optimizers when the parameters were looked for

    def due(self, pending: Point, renewed: Point) -> bool:
        """Whether the ranks compare before the update that is to commit this point: all come to the same answer.

        `renewed`: after which ranks have changed hands last, or the start.
        """
        every, done = self._state.compare_every, _done(pending)
        self._is_early = done in EARLY
        if pending.section:  # what is saved or measured at the end comes from replicas that are alike
            return bool(every) and pending.section == 1 and renewed > START and done > renewed.step
        return bool(every) and done > 0 and (done % every == 0 or done - renewed.step in AFTER)

    def begin(self) -> None:
        """At the entry of the step: what is compared stands still until its gate."""
        self._sums = _Sums(self._state, saved=self._is_early)

    def exchange(self, pending: Point, renewed: Point) -> None:
        """In the gate, collective over all ranks. Raises `Differing`, on all of them. `renewed`: see `due`."""
        assert self._sums is not None, "begun at the entry"
        lines, values = self._sums.lines(), self._sums.values
        self._sums = None
        self._compare(pending, renewed, lines, TENSORS)
        self._compare(pending, renewed, [line for line in values if _SETTINGS in line], SETTINGS)
        self._compare_values(pending, renewed, [line for line in values if _SETTINGS not in line])

    def _compare(self, pending: Point, renewed: Point, lines: list[str], what: str) -> list[tuple[str, str]]:
        """Of the ranks that hold a shard all must tell the same, once they have. Returns what each has told."""
        agreed = SEEN if what in self._state.agreed else NEVER
        told = agreement.tell(f"{agreed}{self._shard}", lines)
        known = (
            (rank, name if name.startswith(SEEN) else f"{name} {rank}", held) for rank, (name, held) in enumerate(told)
        )
        verdict = judge_replicas(known)
        differs = bool(verdict.differing or verdict.doubtful)
        if differs and (what != VALUES or _is_recent(pending, renewed)):
            raise Differing(self._event(pending, renewed, verdict, agreement.lines_of_all(lines)))
        mine = {value for name, value in told if name[1:] == self._shard}
        if len(mine) == 1:
            self._state.agreed.add(what)
        if what in NEVER_ALIKE and (shard := _never_alike(told)):
            raise RefusedError(NEVER_ALIKE[what][0].format(shard), NEVER_ALIKE[what][1])
        return told

    def _compare_values(self, pending: Point, renewed: Point, lines: list[str]) -> None:
        """What replicas hold otherwise in peace is each rank's own: a count of its samples, say."""
        told = self._compare(pending, renewed, lines, VALUES)
        shards_apart = _apart(told)
        if not shards_apart:
            return
        everyone = list(zip(told, agreement.lines_of_all(lines), strict=True))
        for shard in shards_apart:
            first, *others = [held for (name, _), held in everyone if name[1:] == shard]
            if self._state.saves:
                what = next((text for held in others if (text := _difference(first, held))), "")
                raise RefusedError(SAVED_OTHERWISE[0].format(shard, what), SAVED_OTHERWISE[1])
            if shard == self._shard:
                names = {line.rsplit(": ", 1)[0] for held in others for line in set(first).symmetric_difference(held)}
                self._state.private.keep_own(names, early=_done(pending) <= EARLY[-1])

    def note_return(self) -> None:
        """A call returns. In the path of every step: what the script does to parameters afterwards is its own."""
        if self._state.compare_every:
            self._left = self._places()

    def at_the_end(self, renewed: Point) -> str:
        """The script has ended: a sum over the parameters as the last call has left them, of what replicas hold alike.

        Empty if ranks have not changed hands, replicas were never alike, or the script has changed parameters since.
        """
        if renewed <= START or TENSORS not in self._state.agreed or self._left != self._places():
            return ""
        digest = Digest()
        for value in sums.of([tensor for _, tensor in self._state.parameters()]):
            digest.add(value.to_bytes(8, "little"))
        return digest.text()

    def _places(self) -> list[int]:
        if self._known != self._state.known:
            self._known = self._state.known
            self._parameters = [tensor for _, tensor in self._state.parameters()]
            self._sharded = any(map(shards.is_shard, self._parameters))
        parts = list(map(shards.local, self._parameters)) if self._sharded else self._parameters
        return [*map(_version, parts), *map(torch.Tensor.data_ptr, parts)]

    def speaks(self, event: ReplicasDiffer) -> bool:
        """Whether this rank is the one to tell of it: the lowest that is not at fault."""
        blamed = set(event.ranks)
        ranks = range(self._session.identity.wait().world_size)
        return self._session.rank == next((rank for rank in ranks if rank not in blamed), 0)

    def _event(self, pending: Point, renewed: Point, verdict: Verdict, everyone: list[list[str]]) -> ReplicasDiffer:
        after = _done(pending)
        named = verdict.doubtful or verdict.differing
        who = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        first = everyone[named[0]]
        others = [lines for rank, lines in enumerate(everyone) if rank not in named]
        if verdict.doubtful:
            others = [everyone[rank] for rank in named[1:]]
        what = next((text for lines in others if (text := _difference(lines, first))), "their parameters")
        how = "differ from one another" if verdict.doubtful else "differs from most of its replicas"
        return ReplicasDiffer(
            worker=self._session.worker,
            job=self._session.job,
            rank=Rank(self._session.rank),
            generation=self._session.position.wired,
            point=Point(after),
            ranks=() if verdict.doubtful else tuple(map(Rank, verdict.differing)),
            evidence=f"{who} {how} after step {after}: {what}",
            since=renewed if _is_recent(pending, renewed) else None,
        )


def _never_alike(told: Sequence[tuple[str, str]]) -> str:
    """A shard whose replicas differ, and have never agreed; empty if there is none. All ranks find the same."""
    return next(iter(_apart([one for one in told if one[0].startswith(NEVER)])), "")


def _apart(told: Sequence[tuple[str, str]]) -> list[str]:
    """The shards whose replicas differ. All ranks find the same."""
    held: dict[str, set[str]] = {}
    for name, value in told:
        held.setdefault(name[1:], set()).add(value)
    return [name for name, values in held.items() if len(values) > 1]


def _done(pending: Point) -> int:
    """Steps that are committed before this point is."""
    return pending.step if pending.section else pending.step - 1


def _is_recent(pending: Point, renewed: Point) -> bool:
    """Whether ranks have changed hands a few steps ago."""
    return renewed > START and _done(pending) - renewed.step <= RECENT


def _difference(expected: list[str], found: list[str]) -> str:
    """The first line in which two ranks of one build differ; empty if they have different things, or the same."""
    if [line.split(":")[0] for line in expected] != [line.split(":")[0] for line in found]:
        return ""
    return next((f"{two} instead of {one}" for one, two in zip(expected, found, strict=True) if one != two), "")


class _Sums:
    """A sum for each tensor, of what is in it now."""

    def __init__(self, state: State, *, saved: bool) -> None:
        """`saved`: look at what save() returns, too."""
        self._named = compared(state)
        # The processor makes them at once, as the step may change small things before its gate. A device's queue keeps
        # them before any later update.
        self._finish = sums.begin([tensor for _, tensor in self._named])
        self.values = [*values_of(state), *(_saved_lines(state) if saved else ())]

    def lines(self) -> list[str]:
        return [f"{name}: {value:016x}" for (name, _), value in zip(self._named, self._finish(), strict=True)]


def values_of(state: State) -> list[str]:
    """A line for each part with values of its own: hyper-parameters, what a schedule or a dict of the script holds."""
    lines = []
    own = state.private.own.paths
    for part in state.flat():
        if isinstance(part, OptimizerPart):
            groups = enumerate(part.options())
            lines += [f"{part.path}{_SETTINGS}{at}]: {_digest(group, part.path)}" for at, group in groups]
            lines.append(f"{part.path}{_SETTINGS}*] state: {_digest(_plain_state(part.optimizer), part.path)}")
        elif isinstance(part, ContainerPart | StatefulPart | TensorPart | ArrayPart) and part.path not in own:
            given = part.give()
            held = given["plain"] if isinstance(part, ContainerPart) else given
            lines.append(f"{part.path}: {_digest(held, part.path)}")
    buffers = state.private.compared()
    told = zip(buffers, sums.of(list(buffers.values())), strict=True)
    return lines + [f"{name}: {value:016x}" for name, value in told]


_NUMBERS = (int, float, bool, str)


def _plain_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What it keeps for parameters and is no tensor: those are compared by themselves."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    kept = (optimizer.state.get(parameter, {}) for parameter in parameters)
    return [
        {str(key): value for key, value in each.items() if type(value) in _NUMBERS}
        for each in kept
        if type(each) is dict and any(type(value) in _NUMBERS for value in each.values())
    ]


def _saved_lines(state: State) -> list[str]:
    """A line for each value that save() returns, besides what is compared anyway, and what a rank keeps of its own."""
    besides = {tensor.data_ptr() for _, tensor in compared(state) if not shards.is_shard(tensor)}
    besides |= {buffer.data_ptr() for buffer in state.private.buffers().values()}
    lines = []
    for part in state.flat():
        if isinstance(part, SavedPart) and part.is_tree:
            alike = part.told_alike(besides)
            lines += [f"{path}: {digest}" for path, digest in part.look(besides).items() if path in alike]
    return lines


def _digest(held: Any, path: str) -> str:
    data, tensors = tree.encode(held, path, canonical=True)
    digest = Digest()
    digest.add(data)
    for one in sums.of(tensors):
        digest.add(one.to_bytes(8, "little"))
    return digest.text()


def compared(state: State) -> list[tuple[str, torch.Tensor]]:
    """What replicas must hold alike: parameters, and the optimizers' tensors, by name."""
    found = list(state.parameters())
    names = {id(parameter): name for name, parameter in found}
    for optimizer in state.optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "a parameter")
                kept = optimizer.state.get(parameter, {})
                tensors = [key for key in sorted(kept, key=str) if isinstance(kept[key], torch.Tensor)]
                found += [(f"{name} {key}", kept[key]) for key in tensors]
    return found


# ---------------------------------------------------------------- the first steps

# They show whether ranks that were equal at protect() are replicas.
#
# A plain tensor that is in no DDP and is no DTensor has nothing to tell who else holds it. Equal at protect(), it may
# be a replica whose gradients the script reduces by hand, or the stage of a pipeline, an expert, a LoRA matrix of
# zeros, that began like the others' and goes its own way. A lost rank would then be given another one's values, and
# train on. So what is trained is compared again when 1, 2, 4 and 8 steps are committed, and refused if it differs.
#
# It is compared in the gate of the step that follows, by all ranks, whether or not they have such tensors: whether
# others have some they do not know. For those without it is two all-gathers of some 50 bytes, four times in a run.

EARLY_AFTER = (1, 2, 4, 8)  # committed steps
EARLY_LAST = EARLY_AFTER[-1] + 1  # in the gate of which it is compared last
EARLY_REMEDY = (
    "They were equal at protect() and so were taken for replicas. Reduce its gradients over all ranks (DDP does); if "
    "each rank trains its own, name what it holds: Options(shard=...), by which a lost one has no replica"
)


class Early:
    """Of one rank."""

    def __init__(self, state: State, shard: str) -> None:
        """`shard`: by which replicas know one another."""
        self._state = state
        self._shard = shard

    def look(self, pending: Point) -> Callable[[], None] | None:
        """Before the update that is to commit this point: what all ranks have to do in its gate; None if nothing.

        All come to the same answer, and the values are those of now.
        """
        if pending.step - 1 not in EARLY_AFTER:
            return None
        return partial(self.compare, self.values(), pending)

    def values(self) -> list[str]:
        """A line for each trained tensor that is only supposed to have replicas."""
        named = layout.supposed(self._state)
        found = sums.of([tensor for _, tensor in named])
        return [f"{name}: {value:016x}" for (name, _), value in zip(named, found, strict=True)]

    def compare(self, values: list[str], pending: Point) -> None:
        """Collective over all ranks. Raises `StateMismatchError` on all of them if replicas differ."""
        steps = "a step" if pending.step == EARLY_AFTER[0] + 1 else f"{pending.step - 1} steps"
        agreement.compare(self._shard, values, f"holds, after {steps}, other values than", EARLY_REMEDY)


# ---------------------------------------------------------------- for tests and the demonstration

# A digest of everything that training depends on, at the entry of each call.
#
# With TORCHRELAY_DIGESTS=DIR every rank appends lines to DIR/rank-<r>.jsonl: {"point", "digest", "generation",
# "worker"}. Two runs are bit-equal if they wrote the same digests at the same points; in a generation a rank has one
# worker.

VARIABLE = "TORCHRELAY_DIGESTS"


class DigestLog:
    """Where the digests of one rank go."""

    def __init__(self, path: Path, session: Session, state: State, cursor: Cursor) -> None:
        self._file = path.open("a", buffering=1)
        self._session = session
        self._state = state
        self._cursor = cursor

    @classmethod
    def from_environment(cls, session: Session, state: State, cursor: Cursor) -> DigestLog | None:
        """None unless it is asked for."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        Path(folder).mkdir(parents=True, exist_ok=True)
        return cls(Path(folder) / f"rank-{session.rank}.jsonl", session, state, cursor)

    def note(self, rng: bytes) -> None:
        """Write the digest at the current point; `rng` is the random state now."""
        digest = Digest()
        digest.add(self._state.digest().encode())
        digest.add(rng)
        digest.add(json.dumps(self._cursor.counts()).encode())
        line = {
            "point": str(self._cursor.point),
            "digest": digest.text(),
            "generation": self._session.position.wired,
            "worker": self._session.worker,
        }
        self._file.write(json.dumps(line) + "\n")
