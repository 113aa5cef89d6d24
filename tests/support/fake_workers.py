"""Worker functions without torch, for tests of the agent and its forkserver: `tests.support.fake_workers:<name>`."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from torchrelay.protocol.messages.events import WorkerJoined, WorkerRaised, WorkerReported, WorkerStarted, WorkerWarm
from torchrelay.protocol.messages.ids import JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import Assign, Interrupt, Leave, Order
from torchrelay.wire.files.output import announce
from torchrelay.wire.files.page import Page
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.framing import Closed, FrameSocket
from torchrelay.wire.messages.worker_frames import Attended, Welcome, decode_to_worker

PATIENCE_S = 60.0  # longer than any test waits for an end


def leave() -> None:
    """End with the code in argv[1]; say something before, and something from atexit."""
    print("argv", *sys.argv)
    atexit.register(print, "atexit ran")
    print("a warning", file=sys.stderr)
    sys.exit(int(sys.argv[1]))


def crash() -> None:
    raise RuntimeError("the script is broken")


def signal_myself() -> None:
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(PATIENCE_S)


def wait() -> None:
    """Do nothing, and end by SIGTERM like any process."""
    print("waiting")  # not flushed: a line is a line
    time.sleep(PATIENCE_S)


def stay() -> None:
    """Do nothing, and do not listen to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("staying", flush=True)
    time.sleep(PATIENCE_S)


def hear() -> None:
    """Say which signals come, of SIGTERM and SIGUSR1."""

    def say(number: int, _: object) -> None:
        os.write(1, f"heard {signal.Signals(number).name}\n".encode())  # print may not be entered twice

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, say)
    print("listening", flush=True)
    while True:
        signal.pause()


def tell_environment() -> None:
    for name in sorted(os.environ):
        print(f"{name}={os.environ[name]}")
    print("cwd", os.getcwd())
    print("session", os.getsid(0) == os.getpid())
    print("stdin", repr(sys.stdin.read()))
    listed = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    print("open", sorted(os.readlink(fd).split(":")[0] for fd in listed if fd.is_symlink()))
    print("terminated by default", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def draw() -> None:
    """Print a random number of each kind."""
    import random

    import numpy

    print(random.random(), numpy.random.random())


def have_family() -> None:
    """Two children, as a loader has; the second in a process group of its own. Says their numbers."""
    for own_group in (False, True):
        pid = os.fork()
        if pid == 0:
            if own_group:
                os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, lambda *_: print("a child got SIGTERM", flush=True))
            time.sleep(PATIENCE_S)
            os._exit(0)
        print(f"child {pid}", flush=True)
    print("complete", flush=True)
    time.sleep(PATIENCE_S)


def have_daemon() -> None:
    """A child that has left the session, and its number; then end."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(PATIENCE_S)
        os._exit(0)
    while os.getsid(pid) != pid:  # it has not left yet, and would be killed with us
        time.sleep(0.001)
    print(f"child {pid}", flush=True)


def train() -> None:
    """One step with torch, which must be loaded already."""
    assert "torch" in sys.modules, "preloaded"
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    print("trained", torch.get_num_threads())


def eat_memory() -> None:
    """Allocate, and touch, until somebody objects."""
    Path("/sys/fs/cgroup/memory", sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    hoard = []
    while True:
        hoard.append(b"x" * (4 << 20))


class FakeWorker:
    """Talks to the agent as a worker should; does what a test tells it by orders."""

    def __init__(self) -> None:
        self.me = WorkerId(os.environ["TORCHRELAY_WORKER"])
        self.node = NodeId(os.environ["TORCHRELAY_NODE"])
        self.job = JobId(os.environ["TORCHRELAY_JOB"])
        self.page = Page(Path(os.environ["TORCHRELAY_PAGE"]), create=True)
        self.rank: Rank | None = None

    def greet(self) -> FrameSocket:
        """Connect, as often as it takes, and say who we are. An agent that dies may take a call and say nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(os.environ["TORCHRELAY_AGENT_SOCKET"])
                return self.introduce(FrameSocket(connection))
            except OSError:
                connection.close()
                assert time.monotonic() < deadline, "no agent"
                time.sleep(0.01)

    def introduce(self, link: FrameSocket) -> FrameSocket:
        first = link.receive(PATIENCE_S)
        assert first is not None, "no welcome"
        welcome = decode_to_worker(first)
        assert isinstance(welcome, Welcome)
        print("welcome", welcome.worker, len(welcome.secret), welcome.patience_s, welcome.host, flush=True)
        slot = int(os.environ["TORCHRELAY_SLOT"])
        link.send(encode(WorkerStarted(worker=self.me, node=self.node, slot=slot, pid=os.getpid(), address="a:1")))
        link.send(encode(WorkerWarm(worker=self.me)))
        if self.rank is not None:
            link.send(encode(WorkerJoined(worker=self.me, job=self.job, rank=self.rank)))
        return link

    def serve(self) -> None:
        link = self.greet()
        while True:
            try:
                data = link.receive(PATIENCE_S)
            except Closed:
                print("the agent is gone", flush=True)
                link = self.greet()
                continue
            assert data is not None, "forgotten by its test"
            order = decode_to_worker(data)
            if isinstance(order, Attended):
                print("attended", flush=True)
                continue
            assert isinstance(order, Order)
            print("ordered", type(order).__name__, flush=True)
            self.obey(link, order)

    def obey(self, link: FrameSocket, order: Order) -> None:
        match order:
            case Assign(rank=rank, generation=generation):
                self.rank = rank
                now = time.monotonic_ns()
                self.page.beat(now, 7, generation)
                self.page.commit(Point(3), WorkerPhase.COMPUTING, now, 12_000_000)
                self.page.keep(Point(3), b"private three")
                self.page.keep(Point(4), b"private four")
                if "silent" not in sys.argv:
                    link.send(encode(WorkerJoined(worker=self.me, job=self.job, rank=rank)))
            case Interrupt(reason="shout"):
                while not Path("shout").exists():
                    time.sleep(0.002)
                for number in range(3):
                    link.send(encode(self.raised(order.rank, f"{number}" * 50_000)))
                os._exit(17)
            case Interrupt(reason="call again"):
                second = self.greet()
                try:
                    link.receive(PATIENCE_S)
                except Closed:
                    print("the older call is over", flush=True)
                second.close()
            case Interrupt(reason="raise"):
                link.send(encode(self.raised(order.rank, "the script is broken")))
                os._exit(17)
            case Interrupt(reason="lie"):
                link.send(encode(WorkerWarm(worker=WorkerId("somebody-else"))))
            case Interrupt():
                reported = WorkerReported(
                    job=self.job,
                    generation=order.generation,
                    worker=self.me,
                    rank=order.rank,
                    committed=Point(3),
                    phase=WorkerPhase.GATE,
                    pending=Point(4),
                )
                link.send(encode(reported))
            case Leave(code=code):
                sys.exit(code)

    def raised(self, rank: Rank, summary: str) -> WorkerRaised:
        return WorkerRaised(
            worker=self.me, job=self.job, rank=rank, point=None, kind="script", signature="s", summary=summary
        )


def work() -> None:
    FakeWorker().serve()


def become_a_rank() -> None:
    """Print before and after it is known which rank this is, and let a child print, which knows nothing of it."""
    print("nobody yet")
    rank = int(sys.argv[1])
    announce(rank)
    print(f"rank {rank}")
    subprocess.run(["sh", "-c", f"echo a child of rank {rank}"], check=True)


def print_on() -> None:
    """Print numbers, until SIGTERM."""
    announce(int(sys.argv[1]))
    for number in itertools.count():
        print(number)
        time.sleep(0.0005)
