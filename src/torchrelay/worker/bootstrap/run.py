"""Run: what `torchrelay.protect()` gives a script under the launcher."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrelay.errors import RefusedError
from torchrelay.face import Options
from torchrelay.plain import check_micro_batches
from torchrelay.protocol.messages.events import WorkerJoined
from torchrelay.protocol.messages.ids import START, WorkerPhase
from torchrelay.worker.agreement import comparing
from torchrelay.worker.agreement.agreement import check_agreement
from torchrelay.worker.bootstrap import loaded
from torchrelay.worker.data import alongside, beside, holdings
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.data.loops import Loop
from torchrelay.worker.hardware import device
from torchrelay.worker.hidden_state import variables
from torchrelay.worker.parallel import of_state, pipeline
from torchrelay.worker.parallel.prepared import Prepared
from torchrelay.worker.peers import snapshots
from torchrelay.worker.process_groups import groups
from torchrelay.worker.replacement.changes import places_of
from torchrelay.worker.replacement.dry_run import PlaceAsked
from torchrelay.worker.replacement.taking_over import await_place
from torchrelay.worker.session import Session
from torchrelay.worker.state import layout, random_state
from torchrelay.worker.state.record import Private
from torchrelay.worker.state.state import State
from torchrelay.worker.step.calls import Calls

P = ParamSpec("P")
R = TypeVar("R")


class WorkerRun:
    """A run whose steps and sections are committed by all ranks or by none."""

    def __init__(self, session: Session, calls: Calls, cursor: Cursor) -> None:
        self._session = session
        self._calls = calls
        self._cursor = cursor
        beside.watch(cursor, lambda: calls.inside)

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def global_step(self) -> int:
        if self._session.rehearsing:
            raise PlaceAsked
        self._calls.arrive()
        if not self._calls.inside and threading.current_thread() is threading.main_thread() and self._cursor.looks:
            # A loop of the script's own may go by it.
            here = sys._getframe(1)
            used, place = holdings.of_functions(here), self._calls.places.here(1)
            if not self._cursor.replaying:
                used.see()
            plain = self._calls.returned.place
            turn = self._cursor.ask(place, random_state.capture, lambda: variables.told(here), used.told, plain)
            if turn is not None:
                used.check(turn.holds)
                variables.put(here, turn.kept)
                random_state.restore(turn.drawn)
                if self._cursor.on_way is not None:
                    self._cursor.on_way(True, turn.plain)
        return self._calls.committed.step

    def step(self, function: Callable[P, R]) -> Callable[P, R]:
        run = self._calls.run
        known = self._calls.function("step", function)
        look = self._calls.examples.add(function).look
        self._calls.hidden.add(function)

        @functools.wraps(function)
        def committed_step(*args: P.args, **kwargs: P.kwargs) -> R:
            look(args, kwargs)
            result: R = run(known, args, kwargs)
            return result

        return committed_step

    def atomic(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        holdings.of_functions(sys._getframe(1)).see()  # it may fill caches, and is not run again in a replacement
        result: R = self._calls.run(self._calls.function("section", function), args, kwargs)
        return result

    def epochs(self, count: int) -> Iterable[int]:
        return self._loop("epochs", range(count))

    def steps(self, count: int) -> Iterable[int]:
        return self._loop("steps", range(count))

    def batches(self, loader: Any, micro_batches: int = 1) -> Iterable[Any]:
        check_micro_batches(micro_batches)
        return self._loop("batches", loader, None if micro_batches == 1 else micro_batches)

    def once(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._session.once(name, function, args, kwargs)
        return result

    def _loop(self, kind: str, items: Any, group: int | None = None) -> Iterable[Any]:
        source = source_of(items, self._calls.hidden)
        around = holdings.of_functions(sys._getframe(2))
        around.see()
        holds = around if isinstance(items, range) else holdings.of(items)
        return Loop(
            self._cursor,
            kind,
            source,
            group=group,
            length=lambda: len(items),
            name=f"a {type(items).__module__}.{type(items).__qualname__}",
            inside_call=lambda: self._calls.inside,
            arrive=lambda: self._before(source),
            here=self._calls.places.here,
            keeps=True,
            holds=holds,
            plain=self._calls.returned.place,
            since=self._calls.returned.since,
        )

    def _before(self, source: Any) -> None:
        """A loop is about to begin: it has a place, and ranks may have to agree on something before."""
        self._calls.arrive()
        agreement = source.agreement() if isinstance(source, Prepared) else None
        if agreement is not None:
            source.agree(agreement() if self._calls.inside else self.atomic(agreement))


class Joining:
    """The one protect() of a worker."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: Calls | None = None  # once the script has joined

    def protect(
        self, model: Any, optimizer: Any, state: Mapping[str, Any] | None, *, save: Callable[..., Any] | None,
        load: Callable[..., Any] | None, options: Options,
    ) -> WorkerRun:  # fmt: skip
        """See `torchrelay.protect`."""
        session = self._session
        if self.calls is not None:
            raise RefusedError("protect() was called twice", "call it once, with all of the state")
        if not dist.is_initialized():
            raise RefusedError(
                "protect() was called without a process group",
                'call torch.distributed.init_process_group("gloo") before',
            )
        groups.protect()
        built = State(model, optimizer, state, save=save, load=load)
        device.settle(parameter for _, parameter in built.parameters())
        if built.saves:
            _watch_living_optimizers(built)
        of_state.leave_to_state(lambda: (places_of(built)[1], {id(part.held()) for part in built.flat()}))
        refused = layout.refusal(built) or layout.blind(built, options.shard)
        if refused is not None:
            raise RefusedError(*refused)
        pipeline.forbid()
        shard, world_size = options.shard, session.identity.wait().world_size
        if shard is None:
            shard = layout.shard_name(built, session.rank, world_size)
        built.snapshot_auto = options.snapshot_every == snapshots.AUTO
        built.snapshot_buddies = snapshots.buddies(options.snapshot_buddies)
        if not session.replacement:
            session.snapshot_store.clear()  # before the ranks meet: nobody has a snapshot of this start yet
            alone = check_agreement(built, shard, _asked(options))
            built.snapshot_every = snapshots.interval(options.snapshot_every, alone=bool(alone) and not built.saves)
            replicas = len(alone) < world_size > 1
            built.compare_every = comparing.interval(options.compare_every, replicas=replicas)
            if alone and session.rank == 0:
                print(snapshots.warning(len(alone), built.snapshot_every), file=sys.stderr, flush=True)
        joined = WorkerJoined(
            worker=session.worker, job=session.job, rank=session.rank, shard=shard,
            snapshot_every=None if session.replacement else built.snapshot_every,
            snapshot_buddies=built.snapshot_buddies,
        )  # fmt: skip
        session.agent.say(joined)
        cursor = Cursor()
        self.calls = self._begin(built, cursor, shard, options.rehearse)
        register_optimizer_step_pre_hook(self.calls.before_update)
        return WorkerRun(session, self.calls, cursor)

    def _begin(self, state: State, cursor: Cursor, shard: str, rehearse: bool | None) -> Calls:
        """A replacement's calls begin when it knows its place, all others' here."""
        session = self._session
        checkpoints = loaded.loaded.over(module for _, module in state.modules())
        if session.replacement:
            state.expect()
            alongside.install()
            return Calls(session, state, cursor, partial(_arrive, session, cursor, checkpoints), shard, rehearse)
        loaded.tell(session, checkpoints)
        calls = Calls(session, state, cursor, None, shard)
        session.position.start(START)
        session.position.enter(WorkerPhase.BETWEEN)
        return calls


def _asked(options: Options) -> str:
    """What all ranks must have asked for alike."""
    names = ("snapshot_every", "snapshot_buddies", "compare_every")
    return ", ".join(f"{name}={getattr(options, name)!r}" for name in names)


variables.call_is(Calls.run.__code__)


def _arrive(session: Session, cursor: Cursor, checkpoints: list[loaded.File]) -> Private:
    private = await_place(session, cursor)
    loaded.check(session, checkpoints)
    return private


def _watch_living_optimizers(state: State) -> None:
    """With save() and load() the optimizers are not named: those that are there now are the ones that will step."""
    gc.collect()
    found = [
        thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)
    ]  # isinstance would wake lazy objects
    for optimizer in sorted(found, key=_build_of):
        state.watch(optimizer)
    places = {id(optimizer): at for at, optimizer in enumerate(state.optimizers())}
    schedules = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    inner = {id(one) for each in schedules for one in getattr(each, "_schedulers", ())}
    known = [one for one in schedules if id(one) not in inner and id(getattr(one, "optimizer", None)) in places]
    state.schedules = sorted(known, key=lambda one: (places[id(one.optimizer)], type(one).__qualname__))


def _build_of(optimizer: Optimizer) -> tuple[str, list[list[tuple[int, ...]]]]:
    """Sorts optimizers alike on all ranks."""
    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    return type(optimizer).__qualname__, shapes
