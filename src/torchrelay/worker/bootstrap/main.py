"""Main: what a worker process does, from its fork to its end.

connect, rehearse        a spare has the costs of a first time behind itself
first random state       alike in all workers, until the rank is known
run the script           it waits for its rank where it asks for it: now a spare is warm
end                      stand at the last safepoint, serve the state until all ranks may leave
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import hashlib
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy.random  # noqa: F401  its generator is part of the random state from the start, seeded or not
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchrelay
from torchrelay.errors import TorchrelayError
from torchrelay.protocol.messages.events import WorkerFinished, WorkerWarm
from torchrelay.protocol.messages.ids import START, Generation, Point, WorkerPhase
from torchrelay.protocol.messages.orders import Leave
from torchrelay.wire.files.launch import UNPROTECTED
from torchrelay.worker.agreement.blame import kind_of, line_of, print_for_people, tell_failed, tell_raised
from torchrelay.worker.bootstrap import lasting, loaded, wiring
from torchrelay.worker.bootstrap.run import Joining
from torchrelay.worker.bootstrap.wiring import destroy_really
from torchrelay.worker.control.agent_connection import EXIT_DEFECT, NotWelcome
from torchrelay.worker.control.position import OrdersStayedAway
from torchrelay.worker.data import alongside
from torchrelay.worker.parallel import ddp
from torchrelay.worker.process_groups import groups
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.session import Session, open_session
from torchrelay.worker.source import program, script
from torchrelay.worker.state import random_state
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values

EXIT_RAISED = 1
EXIT_AWAY = 92
EXIT_INTERRUPTED = 130  # as of any Python that Ctrl-C has ended
EXIT_REFUSED = 93
EXIT_CANNOT_START = 94
GOODBYE_S = 2.0  # what the script has registered to be done at exit may take, when its process is ending by a fault
PATIENCE_S = 15.0  # in which it is found out who waits for whom
PARTS, PART_S = 50, 0.1
UNDECLARED = (
    "torchrelay: a fault has cut a collective between two steps. Put it into run.atomic(function, ...): then it is "
    "repeated, and nothing is lost"
)
INCOMPLETE = (
    "torchrelay: this worker takes over a rank in the middle of a turn. What the turn's earlier calls left in "
    "attributes or variables was lost with its predecessor. Make the calls of a turn one step, "
    "or return what the next one needs"
)


def run_worker() -> None:
    """Run `sys.argv` as a worker. Called once, in a fresh child of the agent's forkserver."""
    faulthandler.enable()
    keep_logging_apart()
    leave_garbage_alone()
    argv = list(sys.argv)
    try:
        session = open_session(os.environ)
    except NotWelcome as error:
        print(f"torchrelay: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_CANNOT_START)
    session.program = program.begin(os.environ)
    rehearse()
    entropy = Entropy(session.welcome.secret)
    joining = Joining(session)
    tell_unprotected(lambda: joining.calls is not None, lambda: session.identity.known and session.rank == 0)
    torchrelay._protect, torchrelay._once = joining.protect, session.once_by_call
    wiring.install(session)
    loaded.install()
    lasting.install()
    alongside.prepare()
    ddp.install()
    # A spare is warm when its script has come to the question which rank it is: imports are behind it by then.
    session.identity.asked = lambda: session.agent.say(WorkerWarm(worker=session.worker))
    session.identity.told = lambda order: entropy.belong_to(order.rank)
    session.identity.let_environment_wait()
    code = run_script(session, joining, argv)
    if code:
        leave(code)
    sys.exit(0)


def keep_logging_apart() -> None:
    """Our own messages go to stderr through our own logger: the root logger, and whatever it says, is the script's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("torchrelay: %(message)s"))
    ours = logging.getLogger("torchrelay")
    ours.addHandler(handler)
    ours.setLevel(os.environ.get("TORCHRELAY_LOG", "WARNING"))
    ours.propagate = False


def run_script(session: Session, joining: Joining, argv: list[str]) -> int:
    """The script, from its first line to the order to leave. Returns the exit code."""
    own = os.getpid()
    try:
        try:
            script.run(argv, session.program)
            leave_as_child(own, 0)
        except SystemExit as end:
            leave_as_child(own, exit_code(end) if os.getpid() != own else 0)
            session.position.ended_at = line_of(end)
            code = exit_code(end)
            if code:
                tell_raised(session, end, fatal=True, replayed=replayed_to(joining))
                return code
        session.position.ended_at = session.position.ended_at or f"the end of {Path(argv[0]).name}"
        return finish(session, joining)
    except OrdersStayedAway as error:
        print(f"torchrelay: {error}: this worker ends", file=sys.stderr, flush=True)
        return EXIT_AWAY
    except BaseException as error:  # noqa: BLE001  the top of the process: whatever it is, it must be told of
        return fail(session, joining, error)


def leave_as_child(own: int, code: int) -> None:
    """In a process that the script has forked: end here, as plain Python does. The worker's own matters are not its."""
    if os.getpid() == own:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def exit_code(end: SystemExit) -> int:
    """As Python has it: a text is printed, and counts as 1."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr, flush=True)
    return 1


def part() -> None:
    """Whoever still waits for this rank in a while hears that it has ended, as from the end of a process."""

    def work() -> None:
        time.sleep(PATIENCE_S)
        for _ in range(PARTS):  # a connection over which something flows is left for the next time
            groups.break_connections()
            time.sleep(PART_S)

    threading.Thread(target=work, name="torchrelay parting", daemon=True).start()


def finish(session: Session, joining: Joining) -> int:
    """The script has ended with 0: serve its state until every rank has come so far. Returns the exit code."""
    position, agent = session.position, session.agent
    calls = joining.calls
    session.identity.wait()
    if calls is None:
        print("torchrelay: this script never called protect(): it ran unprotected", file=sys.stderr, flush=True)
        part()
    else:
        calls.end()
        calls.note_end()
    while True:
        position.enter(WorkerPhase.FINISHED)
        wired = position.wired
        finished = WorkerFinished(
            job=session.job,
            generation=wired or position.heard,
            worker=session.worker,
            rank=session.rank,
            point=position.committed,
            held="" if calls is None else calls.held(),
        )
        agent.answer(finished, Leave)

        def next_thing(told: Generation = wired) -> Leave | bool | None:
            leave = position.order(Leave)
            if leave is not None:
                return leave
            # A halt may have come and gone while we were on our way here: then it is to be said again.
            return True if position.barred or position.wired != told else None

        found = position.wait(next_thing, None)
        if isinstance(found, Leave):
            return found.code
        if calls is None:
            park(session)
        calls.end()


def park(session: Session) -> NoReturn:
    """Interrupted without a state to go on from: all ranks will start again, and this process is ended from outside."""
    session.position.wait(lambda: None, session.welcome.patience_s)
    raise AssertionError("nothing is waited for")


def fail(session: Session, joining: Joining, error: BaseException) -> int:
    """An exception has left the script. Returns the exit code."""
    position = session.position
    cut = any(groups.is_collective_error(one) for one in chain_of(error))
    # Who is not connected yet cannot feel what has hit others.
    echo = cut or (position.poisoned and position.wired > 0)
    if position.committed is None and echo and not isinstance(error, TorchrelayError):
        # A fault before protect(): whose it is, others know, or nobody; then all start again. This worker cannot go on,
        # and must not be blamed.
        print_for_people(error)
        if cut and not position.poisoned:
            tell_failed(session, error)
        try:
            park(session)
        except OrdersStayedAway:
            return EXIT_AWAY
    kind, remedy = judged(joining, error, cut=cut)
    # People first: once the core knows, it may end this process at once.
    print_for_people(error, remedy)
    tell_raised(session, error, fatal=True, kind=kind, remedy=remedy, replayed=replayed_to(joining))
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, TorchrelayError):
        return EXIT_REFUSED if kind == "refused" else EXIT_RAISED
    return EXIT_DEFECT if isinstance(error, AssertionError) and _is_ours(error) else EXIT_RAISED


def replayed_to(joining: Joining) -> Point | None:
    """The point to which a replacement has followed its predecessor; None if this worker has followed nobody."""
    point = START if joining.calls is None else joining.calls.cursor.point
    return point if point > START else None


def judged(joining: Joining, error: BaseException, *, cut: bool) -> tuple[str, str]:
    """What the core calls it, and what to do about it; `cut`: it comes of a collective that a fault has cut."""
    kind = kind_of(error)
    calls = joining.calls
    if kind == "script" and calls is not None:
        if cut and not calls.inside:
            kind = "undeclared"
        elif calls.cursor.incomplete and isinstance(error, Exception):
            return "incomplete", INCOMPLETE
    return kind, UNDECLARED if kind == "undeclared" and cut else ""


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those from which it came."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_ours(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torchrelay.")


def leave(code: int) -> NoReturn:
    """End with this code, soon: others wait for the end of this process before they go on without it."""
    groups.break_connections()
    last_word = threading.Timer(GOODBYE_S, os._exit, (code,))
    last_word.daemon = True
    last_word.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass  # the disk under the log is full: that must not keep anybody waiting
    os._exit(code)


# ---------------------------------------------------------------- a script that has not joined


def tell_unprotected(joined: Callable[[], bool], speaks: Callable[[], bool]) -> None:
    """A script that takes an optimizer step and has not joined is told so at once, and not only at its end.

    `speaks`: whether this worker's rank is known, and is the one that tells."""
    told = False

    def look(*_: Any) -> None:
        nonlocal told
        if told or joined() or not speaks():
            return
        told = True
        print(UNPROTECTED, file=sys.stderr, flush=True)

    register_optimizer_step_pre_hook(look)


# ---------------------------------------------------------------- children that the script forks

# They (a DataLoader's workers) leave their parent's garbage alone.
#
# A child has only the thread that forked it. To destroy what other threads served, a dropped process group of Gloo for
# one, is to wait for these threads for ever. Garbage that the parent has not collected yet would be collected by its
# children, too: whenever they happen to.

_collected: list[bool] = []  # for each fork under way: whether garbage was collected before it


def leave_garbage_alone() -> None:
    """From now on, children of this process never collect what was there when they were forked. Called once.

    No garbage is collected around the fork, either: what others do in the child before us makes objects, too.
    """
    os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_freeze)


def _rest() -> None:
    _collected.append(gc.isenabled())
    gc.disable()


def _go_on() -> None:
    if _collected.pop():
        gc.enable()


def _freeze() -> None:
    gc.freeze()
    if any(_collected):  # another thread may have been about to fork: its end does not come here
        gc.enable()
    _collected.clear()


# ---------------------------------------------------------------- rehearsal

# A tiny training step, so that a spare has the costs of a first time behind itself.
#
# First uses are slow: autograd's machinery, optimizers (they import a compiler), DDP's reducer. Afterwards everything
# is as it was: no process group, and the random state put back.


def rehearse() -> None:
    """Go through a step of everything once."""
    rng, hook = random_state.capture(), sys.excepthook
    groups.method()  # loads the compiled extension, if there is one
    groups.init_replacement("gloo", rank=0, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train()
    finally:
        destroy_really()
        gc.collect()  # what was rehearsed with must not be taken for the script's
        sys.excepthook = hook  # torch has put its own in its place
        random_state.restore(rng)


def _train() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = State(model, optimizer)
    redo = Redo(state)
    for _ in range(2):
        redo.mark()
        redo.probe_entry()
        optimizer.zero_grad()
        with model.no_sync():  # the pretended backend cannot reduce gradients
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
        redo.probe_gate()
        optimizer.step()
        values.decode(values.encode(loss, "loss"))
    for wrapper, layout in zip(state.ddps(), state.ddp_layouts(), strict=True):
        ddp.renew(wrapper, layout)
    state.receive(state.manifest()[0])
    state.digest()


# ---------------------------------------------------------------- the first random state

# That with which an unseeded script begins belongs to the rank, not to the process.
#
# Whoever takes a rank over draws the same: an unseeded `random_split` gives it the data of its predecessor. Before the
# rank is known all workers of a job begin alike. When it is known, what nobody has touched since gets a seed of the
# rank: as under torchrun, ranks draw differently. What the script has seeded, or drawn from, stays as it is.

BYTES = 8


class Entropy:
    """Of one worker: torch's generator for the CPU, Python's and NumPy's."""

    def __init__(self, secret: bytes) -> None:
        """Seed all three alike in all workers of a job. `secret`: the job's, so that two jobs draw differently."""
        self._secret = secret
        self._seed_all("a worker")
        self._first = self._states()

    def belong_to(self, rank: int) -> None:
        """The rank is known: give it its own first state, where nothing has been drawn or seeded since."""
        now = self._states()
        for name, state in self._first.items():
            if now.get(name) == state:
                self._seed(name, f"rank {rank}")

    def _seed_all(self, whose: str) -> None:
        for name in ("torch", "python", "numpy"):
            self._seed(name, whose)

    def _seed(self, name: str, whose: str) -> None:
        told = hashlib.sha256(self._secret + f"|first random state|{name}|{whose}".encode()).digest()
        seed = int.from_bytes(told[:BYTES], "big")
        numpy = sys.modules.get("numpy")
        if name == "torch":
            torch.default_generator.manual_seed(seed)
        elif name == "python":
            random.seed(seed)
        elif numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {
            "torch": bytes(torch.default_generator.get_state().numpy()),
            "python": random.getstate(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            states["numpy"] = (kind, bytes(keys), *rest)
        return states
