"""Forkserver: a process that has imported torch once and forks workers in milliseconds.

It is started by an agent, imports the modules it is told to, and from then on has one thread. It is the parent of the
workers: it reports their ends at once, kills on request, and keeps them while its agent is away, at most `--linger`
seconds. If it dies itself, the kernel kills the workers. It never touches a GPU: a child could not use it any more.

    python -P -m torchrelay.agent.workers.forkserver --listener FD --linger SECONDS [--lasting] [--preload MODULE]...
"""

from __future__ import annotations

import argparse
import array
import fcntl
import gc
import importlib
import io
import mmap
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchrelay.agent.output.scribe import Named, Source, become_scribe, enlarge
from torchrelay.agent.workers.children import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, Children, prctl
from torchrelay.agent.workers.forks import (
    Bide,
    Child,
    Deliver,
    Ended,
    Forget,
    Fork,
    Inventory,
    Kill,
    Stop,
    to_forkserver,
)
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.schedulers.lasting import outlive
from torchrelay.wire.files.descriptors import allow_many
from torchrelay.wire.files.output import open_channel
from torchrelay.wire.files.page import reserve
from torchrelay.wire.messages.codec import WireError, encode
from torchrelay.wire.messages.framing import Closed, FrameSocket

# An agent that does not read for so long is as good as gone; it may connect again.
REPORT_TIMEOUT_S = 1.0
FIRST_AGENT_S = 5.0


@dataclass(frozen=True, slots=True)
class Birth:
    """What `ForkServer.serve` returns in a forked child."""

    request: Fork
    output: int  # descriptor
    key: bytes  # of the mark that it may leave there
    server: int  # the forkserver's process id
    lasts: bool = False  # it outlives a scheduler's SIGTERM


class ForkServer:
    """Serves one agent at a time on `listener`; the newest connection counts."""

    def __init__(self, listener: socket.socket, *, linger_s: float, lasts: bool = False) -> None:
        self._listener = listener
        self._lasts = lasts  # a scheduler's SIGTERM ends neither this one nor its workers
        self._linger_s = linger_s
        self._bide_s = 0.0  # the agent of now has asked for at least so long
        self._children = Children()
        self._agent: FrameSocket | None = None
        # The first agent connects before it starts us: its connection waits in the listener.
        self._alone_since: float | None = time.monotonic() + FIRST_AGENT_S
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._listener, self._wake, self._woken):
            end.setblocking(False)
        self._stopping = False
        self._outputs = Outputs(Path(listener.getsockname()).parent, self._leave_server)

    def serve(self) -> Birth | None:
        """Serve until told to stop: then None. In a forked child: returns what the child is to become."""
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up alone matters
        if not self._lasts:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends us in order
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain_wake)
        self._selector.register(self._outputs.control, selectors.EVENT_READ, self._hear_scribe)
        while not self._stopping:
            for key, _ in self._selector.select(self._linger_left()):
                birth: Birth | None = key.data()
                if birth is not None:
                    return birth
            for ended in self._children.collect():
                self._outputs.settle(ended.worker, ABORT_SETTLE_S if ended.signal == signal.SIGABRT else SETTLE_S)
                self._report(ended)
            if self._linger_left() == 0.0:
                log(f"no agent for {max(self._linger_s, self._bide_s)} s: ending all workers")
                break
        self._children.end_all(keep=self._outputs.pid)
        self._outputs.close()
        return None

    def _hear_scribe(self) -> None:
        """It has something to say, or has been killed: then there is another one now."""
        before, there = self._outputs.control, self._outputs.pid
        if self._outputs.hear():
            if self._outputs.pid:
                log("the scribe was killed: another one goes on")
            elif there:
                log("the scribe was killed, and there is no room for another one yet: prints wait for it")
            self._selector.unregister(before)
            self._selector.register(self._outputs.control, selectors.EVENT_READ, self._hear_scribe)

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True

    def _linger_left(self) -> float | None:
        if self._alone_since is None:
            return None
        return max(0.0, self._alone_since + max(self._linger_s, self._bide_s) - time.monotonic())

    # ------------------------------------------------------------ the agent

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        self._drop_agent()
        self._agent = FrameSocket(connection)
        self._alone_since, self._bide_s = None, 0.0
        self._selector.register(self._agent, selectors.EVENT_READ, self._hear)
        running, ended = self._children.list_running(), self._children.list_ended()
        self._report(Inventory(pid=os.getpid(), children=running, ended=ended))

    def _drop_agent(self) -> None:
        if self._agent is not None:
            self._selector.unregister(self._agent)
            self._agent.close()
            self._agent = None
            self._alone_since = time.monotonic()

    def _report(self, message: Inventory | Child | Ended) -> None:
        if self._agent is None:
            return  # it is kept for the next inventory
        try:
            self._agent.send(encode(message), timeout_s=REPORT_TIMEOUT_S)
        except (Closed, TimeoutError):
            self._drop_agent()

    def _hear(self) -> Birth | None:
        """Obey all requests that have arrived. In a forked child: what it is to become."""
        while self._agent is not None:
            try:
                data = self._agent.receive(timeout_s=0)
                request = to_forkserver.decode(data) if data is not None else None
            except (Closed, WireError) as error:
                if isinstance(error, WireError):
                    log(f"dropped the agent: {error}")
                self._drop_agent()
                return None
            if request is None:
                return None
            match request:
                case Fork():
                    birth = self._fork(request)
                    if birth is not None:
                        return birth
                case Kill(worker=worker, signal=number, reason=reason):
                    self._children.kill(worker, number, reason)
                case Deliver(worker=worker, signal=number, nth=nth):
                    self._children.deliver(worker, number, nth)
                case Forget(worker=worker):
                    self._children.forget(worker)
                case Bide(seconds=seconds):
                    self._bide_s = seconds
                case Stop():
                    self._stopping = True
                    return None
        return None

    def _drain_wake(self) -> None:
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass

    # ------------------------------------------------------------ forking

    def _fork(self, request: Fork) -> Birth | None:
        """Start a worker, once. In the child: what it is to become."""
        known = self._children.find(request.worker)
        if known is not None:
            self._report(known)
            return None
        server = os.getpid()
        try:
            reserve_page(request)
            check_folders(request)
            output, key = self._outputs.open(request.worker, request.log)
        except OSError as error:
            self._report(self._children.fail(request.worker, request.slot, error))
            return None
        try:
            pid = os.fork()
        except OSError as error:
            os.close(output)
            self._report(self._children.fail(request.worker, request.slot, error))
            return None
        if pid == 0:
            self._leave_server()
            self._outputs.abandon()
            return Birth(request, output, key, server, self._lasts)
        os.close(output)
        child = Child(worker=request.worker, job=request.job, slot=request.slot, pid=pid)
        self._report(self._children.add(child))
        return None

    def _leave_server(self) -> None:
        """In the child: nothing of the server may stay open, else its agent would not see it end."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *[signal.SIGTERM] * (not self._lasts)):  # ignored until `settle` sees to it
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for end in (self._listener, self._wake, self._woken):
            end.close()
        if self._agent is not None:
            self._agent.abandon()


def check_folders(request: Fork) -> None:
    """Where it is to work and where its log is to be. Raises `OSError` if that is not there."""
    for what, folder in (("working folder", request.cwd), ("folder for logs", os.path.dirname(request.log))):
        if not os.path.isdir(folder):
            raise NotADirectoryError(f"{what} {folder} does not exist")


def reserve_page(request: Fork) -> None:
    """Memory for the worker's page, before there is a worker: then the reason is heard. Raises OSError."""
    page = request.env.get("TORCHRELAY_PAGE")
    if page:
        reserve(Path(page))


def settle(birth: Birth) -> None:
    """In the child: session, stdio, environment, working folder and argv, as if it had been started by itself."""
    request = birth.request
    if birth.lasts:
        outlive()
    os.dup2(birth.output, 1)
    os.dup2(birth.output, 2)
    open_channel(birth.output, birth.key)
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != birth.server:  # it died before the kernel knew of our wish
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        vars(sys)[name] = vars(sys)[f"__{name}__"] = fresh_stream(descriptor, f"<{name}>")
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    sys.argv = list(request.argv) or [""]
    reseed()


def fresh_stream(descriptor: int, name: str) -> io.TextIOWrapper:
    """The server's own were made for a file, and would seek in a pipe."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = name
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def reseed() -> None:
    """Give the child entropy of its own, as a fresh process has. (Python's `random` does so by itself.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def resolve(function: str) -> Callable[[], object]:
    """The function that "module:function" names. Raises ImportError, AttributeError or ValueError."""
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(f"{function!r} is not of the form module:function")
    found: Callable[[], object] = getattr(importlib.import_module(module), name)
    return found


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def log(text: str) -> None:
    try:
        print(f"forkserver {os.getpid()}: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # the disk is full: no worker is to die of that


def preload(modules: list[str]) -> None:
    """Import what every worker needs. Raises what the import raises.

    The garbage collector rests meanwhile: nearly all that an import makes stays, and to search it again and again is a
    third of the time. Nor is there a search at the end: it would free little, and cost more than it frees.
    """
    begin = time.monotonic()
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    note = f", {threads} threads" if threads > 1 else ""
    log(f"{len(modules)} modules loaded in {time.monotonic() - begin:.2f} s{note}")
    gc.freeze()  # the children's collector leaves our objects alone, so their pages stay shared
    gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(prog="torchrelay.agent.workers.forkserver", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="descriptor of a listening unix socket")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds to keep workers without an agent")
    parser.add_argument("--preload", action="append", default=[], help="module to import first")
    parser.add_argument("--lasting", action="store_true", help="SIGTERM ends neither this process nor its workers")
    options = parser.parse_args()
    if options.lasting:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    allow_many()  # workers inherit it: a rank must not end because somebody fills its ports
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    preload(options.preload)
    listener = socket.socket(fileno=options.listener)
    birth = ForkServer(listener, linger_s=options.linger, lasts=options.lasting).serve()
    if birth is None:
        return 0
    # A worker from here on. It ends like any Python process: atexit functions, threads joined, streams flushed.
    settle(birth)
    resolve(birth.request.function)()
    return 0


# ---------------------------------------------------------------- the forkserver's side of its scribe

SETTLE_S = 0.25  # that the report of an end may wait for what the worker printed last
ABORT_SETTLE_S = 2.0  # where the last words are the reason: Gloo's, and the stack behind them
END_S = 3.0  # for the scribe to end, since it was seen to go on
MOST_END_S = 13.0  # in all
AGAIN_S = 0.05  # before another scribe is tried, when there was no room for one


class Outputs:
    """The pipes of the workers that run. Single-threaded.

    leave   called in the child that becomes the scribe: closes all that is the forkserver's
    pid     of the scribe; 0 as long as there is no room for one: then `control` says that it has ended
    """

    def __init__(self, folder: Path, leave: Callable[[], None]) -> None:
        self._folder = folder
        self._leave = leave
        self._pipes: dict[WorkerId, tuple[int, Source]] = {}
        self._busy = mmap.mmap(-1, mmap.PAGESIZE)
        self.pid = 0
        self.control = self._start()

    def _start(self) -> socket.socket:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            child = os.fork()
        except OSError:  # too many processes, or too little memory, as when the last one was killed: no worker's fault
            self.pid = 0
            time.sleep(AGAIN_S)
            other.close()
            return control
        self.pid = child
        if child == 0:
            control.close()
            self._leave()
            become_scribe(other, self._busy, self._folder, dict(self._pipes.values()))
        other.close()
        return control

    def open(self, worker: WorkerId, log: str) -> tuple[int, bytes]:
        """A pipe for a worker: the end to write to, and the key of its mark. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        enlarge(writing)
        source = Source(worker, b"\0torchrelay " + secrets.token_hex(16).encode() + b" rank ", log)
        self._pipes[worker] = reading, source
        try:
            socket.send_fds(self.control, [msgspec.msgpack.encode(source)], [reading])
        except OSError:
            pass  # the scribe has ended: the next one finds it among the pipes
        return writing, source.key

    def hear(self) -> bool:
        """Listen to the scribe. True if it has ended and another one was started, or tried: `control` is a new one."""
        try:
            data = self.control.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.control.close()
            self.control = self._start()
            return True
        named = msgspec.msgpack.decode(data, type=Named)
        if known := self._pipes.get(WorkerId(named.worker)):
            self._pipes[WorkerId(named.worker)] = known[0], msgspec.structs.replace(known[1], rank=named.rank)
        return False

    def settle(self, worker: WorkerId, settle_s: float = SETTLE_S) -> None:
        """It has ended: wait a moment until all that it printed is in its log."""
        pipe = self._pipes.pop(worker, None)
        if pipe is None:
            return
        until = time.monotonic() + settle_s
        while (waiting(pipe[0]) or self._busy[0]) and time.monotonic() < until:
            time.sleep(0.0005)
        os.close(pipe[0])

    def close(self) -> None:
        """No worker runs any more: the scribe writes what is left, and ends."""
        self.control.close()
        for reading, _ in self._pipes.values():
            os.close(reading)
        until, last, seen = time.monotonic() + END_S, time.monotonic() + MOST_END_S, self._busy[1]
        try:
            while self.pid and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if seen != self._busy[1]:
                    until, seen = min(last, time.monotonic() + END_S), self._busy[1]
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.001)
        except (ChildProcessError, ProcessLookupError):
            pass

    def abandon(self) -> None:
        """In a forked worker: these are the forkserver's."""
        self.control.close()
        for reading, _ in self._pipes.values():
            os.close(reading)


def waiting(descriptor: int) -> int:
    """Bytes in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


if __name__ == "__main__":
    sys.exit(main())
