"""Processes: the agent's side of its forkserver. It knows which workers run, and what they find around them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
import zlib
from asyncio.subprocess import Process as Subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from torchrelay.agent.workers.children import send_group, send_signal
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
    ToForkserver,
    from_forkserver,
)
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.schedulers.tether import signal_child
from torchrelay.wire.files.launch import Launch
from torchrelay.wire.files.procfs import ProcessGone, read_stat
from torchrelay.wire.messages.codec import WireError, encode
from torchrelay.wire.messages.framing import Closed, frame, read_frame

logger = logging.getLogger(__name__)

# A forkserver that is there answers at once; if it is still importing, it takes as long as that takes.
INVENTORY_S = 120.0
KILLED_S = 10.0
MOST_ENDED = 1000  # ends that are remembered; of older ones a file still says that the id was used


class CannotFork(RuntimeError):
    """The forkserver does not come up: a module it should load fails, or the machine has no room."""


class Processes:
    """The worker processes of one node.

    `on_ended` is called for each end, from the event loop, at least once; again whenever a worker that has ended is to
    be started or killed. An id is never started twice on one node, whatever happens to agent and forkserver: a file
    in `folder` remembers it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        preload: tuple[str, ...],
        env: Mapping[str, str],
        cwd: str,
        linger_s: float,
        lasts: bool = False,
        on_ended: Callable[[Ended], None],
    ) -> None:
        self._path = folder / "forkserver"
        self._lives = folder / "lives"
        self._preload = preload
        self._env = dict(env)
        self._cwd = cwd
        self._linger_s = linger_s
        self._lasts = lasts  # forkserver and workers outlive a scheduler's SIGTERM
        self._on_ended = on_ended
        self.running: dict[WorkerId, Child] = {}
        self.ended: dict[WorkerId, Ended] = {}
        self._births: dict[WorkerId, int] = {}  # of those that run, as the kernel counts; a process id may come again
        self._asked: dict[WorkerId, Fork] = {}  # to be forked; not heard of yet
        self._changed = asyncio.Condition()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._server: Subprocess | None = None  # None also if it was adopted
        self._served = False  # this forkserver has come up
        self._closing = False

    # ------------------------------------------------------------ what the agent wants

    def start(self, fork: Fork) -> None:
        """Keep this worker running: started if it never was, reported if it has ended."""
        if fork.worker in self.running or fork.worker in self._asked:
            return
        if fork.worker in self.ended:
            self._on_ended(self.ended[fork.worker])
            return
        try:
            (self._lives / fork.worker).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            self._end(absent(fork.worker, fork.slot, "ended together with an earlier agent of its node"))
            return
        except OSError as error:  # no room left, not even for a name
            self._end(absent(fork.worker, fork.slot, f"could not be started: {error.strerror}"))
            return
        self._asked[fork.worker] = fork
        self._send(fork)

    def kill(self, worker: WorkerId, number: int, reason: str) -> None:
        """Send a signal; an unknown worker is reported as ended, and can never be started from then on."""
        if worker in self.running or worker in self._asked:
            self._send(Kill(worker=worker, signal=number, reason=reason))
        else:
            try:
                (self._lives / worker).touch(mode=0o600)
            except OSError as error:  # no room left: for as long as this agent lives it knows without the file
                logger.warning("that %s is never to be started cannot be kept: %s", worker, error.strerror)
            self._end(self.ended.get(worker) or absent(worker, -1, "unknown here"))

    def pass_on(self, worker: WorkerId, number: int, nth: int) -> None:
        """Send a signal of the launcher to a worker that runs, once however often it is asked for."""
        if worker in self.running:
            self._send(Deliver(worker=worker, signal=number, nth=nth))

    def forget(self, worker: WorkerId) -> None:
        """Its end has been acknowledged: the forkserver need not keep it."""
        self._send(Forget(worker=worker))

    async def child_of(self, pid: int, deadline_s: float) -> Child | None:
        """The worker with this process id. It may call before the forkserver has said its number: wait for it."""

        def find() -> Child | None:
            return next((child for child in self.running.values() if child.pid == pid), None)

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: find() is not None or not self._asked)
        except TimeoutError:
            pass
        return find()

    async def none_left(self, deadline_s: float) -> bool:
        """Wait until no worker runs; False at the deadline."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: not self.running and not self._asked)
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------ the forkserver

    async def open(self) -> None:
        """Connect to a forkserver that an earlier agent left, with its workers, or start one."""
        self._lives.mkdir(mode=0o700, exist_ok=True)
        if await self._connect():
            try:
                async with asyncio.timeout(INVENTORY_S):
                    await self._hear_one()
            except (Closed, WireError, TimeoutError) as error:
                logger.warning("the forkserver that was there does not answer (%s): starting another", error)
                self._disconnect()
            else:
                logger.info("adopted a forkserver with %d workers", len(self.running))
                return
        await self._spawn()

    async def run(self) -> None:
        """Hear the forkserver, for ever; start another if it dies. Raises `CannotFork`."""
        while not self._closing:
            try:
                await self._hear_one()
            except (Closed, WireError) as error:
                if not self._closing:
                    await self._recover(str(error))

    async def close(self, deadline_s: float = KILLED_S) -> None:
        """Kill all workers and end the forkserver; wait until it is gone."""
        self._closing = True
        self._send(Stop())
        try:
            async with asyncio.timeout(deadline_s):
                if self._server is not None and self._writer is not None:
                    await self._server.wait()
                while self._server is None and await self._connected():
                    pass
        except TimeoutError:
            logger.error("the forkserver does not end: killing it")
        if self._server is not None:
            signal_child(self._server, signal.SIGKILL)  # its workers go with it
            await self._server.wait()
        self._disconnect()
        self._path.unlink(missing_ok=True)

    async def leave(self, seconds: float) -> None:
        """Go without a word to the workers: for at least so long they wait for a next agent, which adopts them."""
        self._closing = True
        self._send(Bide(seconds=seconds))
        if self._writer is not None:
            try:
                async with asyncio.timeout(KILLED_S):
                    await self._writer.drain()
            except (TimeoutError, ConnectionError):
                pass  # then its own linger counts
        self._disconnect()

    async def _connected(self) -> bool:
        """Hear and forget one report; False if the forkserver is gone."""
        if self._reader is None:
            return False
        try:
            await read_frame(self._reader)
        except (Closed, WireError):
            return False
        return True

    def _send(self, request: ToForkserver) -> None:
        if self._writer is not None:  # else it is being replaced: its replacement is told all that is asked for
            self._writer.write(frame_of(request))

    async def _connect(self) -> bool:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _spawn(self) -> None:
        """Start a forkserver. Our connection waits in the listener before it runs, so it cannot miss our death."""
        self._path.unlink(missing_ok=True)
        self._served = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            listener.listen(8)
            await self._connect()
            command = [sys.executable, "-P", "-m", "torchrelay.agent.workers.forkserver"]
            command += ["--listener", str(listener.fileno()), "--linger", str(self._linger_s)]
            command += ["--lasting"] * self._lasts
            for module in self._preload:
                command += ["--preload", module]
            self._server = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env=self._env,
                cwd=self._cwd,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        for fork in self._asked.values():
            self._send(fork)  # asked for while there was no forkserver

    async def _recover(self, reason: str) -> None:
        """The connection broke: connect again, or, if the forkserver has died, see that its workers are gone too."""
        asked = list(self._asked.values())
        self._disconnect()
        if self._served and await self._connect():
            logger.warning("connected to the forkserver again (%s)", reason)
            return
        if self._server is not None:
            signal_child(self._server, signal.SIGKILL)  # alive, yet not to be reached: who watches its workers?
        code = await self._server.wait() if self._server is not None else None
        if not self._served:
            raise CannotFork(
                f"the forkserver ended with code {code} while it loaded {', '.join(self._preload)}; "
                "its message stands above. Does `python -c 'import torch'` work in this environment?"
            )
        logger.error("the forkserver has died (code %s): its workers go with it; starting another", code)
        for child in list(self.running.values()):
            await see_gone(child, self._births.get(child.worker))
            cause = f"SIGKILL (its forkserver died, code {code})"
            self._end(absent(child.worker, child.slot, cause, pid=child.pid, number=9))
        for fork in asked:  # it may have been forked, unheard of: an id is never started twice
            self._end(absent(fork.worker, fork.slot, f"its forkserver died, code {code}"))
        await self._spawn()

    # ------------------------------------------------------------ what the forkserver says

    async def _hear_one(self) -> None:
        assert self._reader is not None, "connected before it is heard"
        message = from_forkserver.decode(await read_frame(self._reader))
        match message:
            case Inventory():
                self._take(message)
            case Child():
                self._asked.pop(message.worker, None)
                self._see_running(message)
            case Ended():
                self._end(message)
        async with self._changed:
            self._changed.notify_all()

    def _take(self, inventory: Inventory) -> None:
        """Who runs, as the forkserver has it: that is the truth."""
        self._served = True
        self.running.clear()
        for child in inventory.children:
            self._see_running(child)
            self._asked.pop(child.worker, None)
        for ended in inventory.ended:
            self._end(ended)
        for fork in self._asked.values():
            self._send(fork)  # asked for while the connection was broken; twice does no harm

    def _see_running(self, child: Child) -> None:
        self.running[child.worker] = child
        try:
            self._births.setdefault(child.worker, read_stat(child.pid).started)
        except ProcessGone:
            pass  # its end is told next

    def _end(self, ended: Ended) -> None:
        self._asked.pop(ended.worker, None)
        self.running.pop(ended.worker, None)
        self._births.pop(ended.worker, None)
        self.ended[ended.worker] = ended
        if len(self.ended) > MOST_ENDED:
            del self.ended[next(iter(self.ended))]
        self._on_ended(ended)


def absent(worker: WorkerId, slot: int, cause: str, *, pid: int | None = None, number: int | None = None) -> Ended:
    """The end of a worker of which no forkserver can tell."""
    return Ended(worker=worker, slot=slot, pid=pid, signal=number, cause=cause, at_ns=time.monotonic_ns())


def frame_of(request: ToForkserver) -> bytes:
    return frame(encode(request))


async def see_gone(child: Child, started: int | None) -> None:
    """Wait until a worker without a parent is gone: the kernel was told to kill it with its forkserver.

    `started`: when it did, as the kernel counts; None if it had ended before that was seen. Whoever has its process id
    by now and started at another time is a stranger.
    """
    try:
        if read_stat(child.pid).started != started:
            return
        send_signal(child.pid, 9)
        send_group(child.pid, 9)
        while (now := read_stat(child.pid)).started == started and now.state != "Z":
            await asyncio.sleep(0.002)
    except ProcessGone:
        return


# ---------------------------------------------------------------- what a worker finds in os.environ

# Before it knows its rank: torchrun's names, and ours.

# Torch's watchdog ends a process whose communicator fails, at once or after having waited a minute with a lock held.
# Here the process lives on: nobody but us aborts communicators. NVLS binds the memory of all ranks, the lost one's too.
LET_US_RECOVER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def is_loopback(host: str) -> bool:
    """Whether workers that listen on `host` are on one machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def base_environment(launch: Launch, host: str) -> dict[str, str]:
    """The operator's environment with our defaults, for the forkserver.

    OMP_NUM_THREADS counts when torch is imported, which the forkserver does; so it must be set here.
    """
    env = dict(launch.env)
    if launch.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if is_loopback(host):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The order of a set of texts is a matter of chance in each process, unless all have the same seed: a replacement
    # that is forked on another node, or later, must not come to another order of its data.
    env.setdefault("PYTHONHASHSEED", str(zlib.crc32(f"{launch.master_port} {launch.script}".encode())))
    # Broken connections are our daily bread; c10d would print a stack trace for each of them.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return {**LET_US_RECOVER, **env}


def torchrun_environment(launch: Launch, spec: JobSpec) -> dict[str, str]:
    """torchrun's variables that are the same for every rank. Those of the rank come with it."""
    nodes = max(1, spec.world_size // spec.nproc_per_node)
    return {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
    }


def worker_environment(
    base: Mapping[str, str],
    launch: Launch,
    spec: JobSpec,
    *,
    node: NodeId,
    worker: WorkerId,
    slot: int,
    agent_socket: Path,
    page: Path,
    logs: Path,
    guest: bool = False,
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of one worker. It holds no secret of ours: that comes with the agent's welcome.

    `guest`: another rank uses the device of this slot. NCCL refuses two ranks on one device of one host, so this one
    says that it is on a host of its own (NCCL_HOSTID), and talks to the others over the network. `network`: where its
    network core reports to.
    """
    ours = {
        "TORCHRELAY_WORKER": worker,
        "TORCHRELAY_AGENT_SOCKET": str(agent_socket),
        "TORCHRELAY_PAGE": str(page),
        "TORCHRELAY_JOB": spec.job,
        "TORCHRELAY_NODE": node,
        "TORCHRELAY_SLOT": str(slot),
        "TORCHRELAY_LOGS": str(logs),
    }
    if launch.code:
        ours["TORCHRELAY_CODE"] = launch.code
    if guest:
        ours["NCCL_HOSTID"] = worker
    return {**base, **torchrun_environment(launch, spec), **(network or {}), **ours}
