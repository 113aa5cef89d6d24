"""Keeper: keeps a run's orchestrator alive. Its death does not touch training; it goes on from its journal.

One that lives and answers nobody is killed; one that cannot even be killed (it waits for a disk) is left behind: the
next one takes the journal over. Where somebody else has taken it over, that one is left alone as long as it answers.

The port is the keeper's, which lends it: while no orchestrator runs nobody else can get it. It is mostly one that the
system has chosen, and the next connection of any process could be given the same, and keep it for a minute.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

from torchrelay.api.endpoint import Endpoint, read_endpoint
from torchrelay.client.asking import ask
from torchrelay.client.runs import NotPossible
from torchrelay.schedulers.tether import signal_child, tethered
from torchrelay.wire.trust.passes import Role, pass_of
from torchrelay.wire.trust.trust import TrustError

START_S = 30.0
AGAIN_S = 0.2
# Ends in a row within this time after a start, before it is tried seldom.
QUICK_S = 20.0
TRIES = 5
SELDOM_S = 10.0
STAYED_AWAY = 92
CANNOT_START = 94
DEFECT = 95
SUPERSEDED = 96
LASTING = "--lasting"
PROBE_S = 2.0  # between two looks at whether it answers, and how long an answer may take
STUCK_S = 20.0  # without any answer, before it is replaced
KILL_S = 5.0  # how long a killed process may take to end


class Keeper:
    """Starts an orchestrator, and starts it again on the same port and journal whenever it ends unasked."""

    def __init__(
        self,
        run_dir: Path,
        port: int,
        host: str = "127.0.0.1",
        inside: Path | None = None,
        *,
        tls: bool = False,
        further: tuple[str, ...] = (),
    ) -> None:
        self._run_dir = run_dir
        self._port = port
        self._host = host
        self._further = further  # flags of it
        # One that lasts ends by this signal, and not by SIGTERM, which the scheduler sends to all processes of a job.
        self._end_by = signal.SIGINT if LASTING in further else signal.SIGTERM
        self._tls = tls  # only with the run's passes
        self.held = pass_of(run_dir, Role.OPERATOR) if tls else None
        self._inside = inside  # where it listens besides, for its owner only
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = True
        self._asked = False  # its next end is a restart that somebody asked for
        self._take_over = False
        self._listener: socket.socket | None = None
        self.endpoint: Endpoint | None = None
        self.trouble: NotPossible | None = None  # why it does not come back, and the code of a run that needs it

    async def start(self) -> Endpoint:
        """Start it and wait until it listens. Raises `NotPossible` with what it said if it does not."""
        self._process = await self._launch()
        ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(START_S):
                while not ended.done():
                    endpoint = read_endpoint(self._run_dir)
                    if endpoint is not None and endpoint.pid == self._process.pid:
                        self.endpoint = endpoint
                        return endpoint
                    await asyncio.wait((ended,), timeout=0.01)
        except TimeoutError:
            raise NotPossible(f"the orchestrator did not listen within {START_S:g} s", CANNOT_START) from None
        finally:
            ended.cancel()
        code = self._process.returncode
        raise NotPossible(self._last_words(), code if code in (CANNOT_START, DEFECT) else CANNOT_START)

    async def keep(self) -> None:
        """Start it again as often as needed, until its end is wanted. One that cannot come back does not end training.

        What is in the way may go away: a full disk, a journal that was moved and is put back. Until then it is tried
        more seldom, and `trouble` says why.
        """
        loop, quick = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            code = await self._end()
            self._refuse()
            if not self._wanted:
                return self._let_go()
            if code == SUPERSEDED:
                await self._leave_to_another()
            quick = 0 if self._asked else quick + 1 if loop.time() - since < QUICK_S else 1
            self._asked = False
            self.trouble = None
            if quick >= TRIES or code in (CANNOT_START, DEFECT):
                reason = f"the orchestrator does not come back (it ended with {code}): {self._last_words()}"
                self.trouble = NotPossible(reason, DEFECT if code == DEFECT else STAYED_AWAY)
            await asyncio.sleep(AGAIN_S if quick < TRIES else SELDOM_S)
            if not await self._launch_again():
                return self._let_go()

    async def _launch_again(self) -> bool:
        """Start it as soon as it can be started. False: that is not wanted any more."""
        while self._wanted:
            try:
                self._process = await self._launch()
                return True
            except (NotPossible, OSError) as error:  # its port, or descriptors, or memory
                self.trouble = error if isinstance(error, NotPossible) else NotPossible(str(error), STAYED_AWAY)
                await asyncio.sleep(SELDOM_S)
        return False

    async def restart(self) -> None:
        """End it in order; `keep` starts it again, with whatever code is installed now."""
        if self._process is not None and self._process.returncode is None:
            self._asked = True
            signal_child(self._process, self._end_by)

    async def _end(self) -> int | None:
        """Wait for its end; one that listens no more although it lives is killed. None: it cannot be."""
        assert self._process is not None, "it has been started"
        process, loop = self._process, asyncio.get_running_loop()
        answered, listened = loop.time(), False
        while True:
            try:
                async with asyncio.timeout(PROBE_S):
                    return await process.wait()
            except TimeoutError:
                pass  # it lives: does it answer?
            endpoint = read_endpoint(self._run_dir)
            if not listened and endpoint is not None and endpoint.pid == process.pid:
                listened, self.trouble = True, None
            if not listened or not self._wanted or await asyncio.to_thread(answers, endpoint, self.held):
                answered = loop.time()
            if loop.time() - answered < STUCK_S:
                continue
            signal_child(process, signal.SIGKILL)
            try:
                async with asyncio.timeout(KILL_S):
                    return await process.wait()
            except TimeoutError:
                self._take_over = True
                self._let_go()  # it may listen there still
                return None

    async def _leave_to_another(self) -> None:
        """Somebody else's orchestrator decides now: wait until nobody answers any more."""
        silent = 0.0
        while self._wanted and silent < STUCK_S:
            alive = await asyncio.to_thread(answers, read_endpoint(self._run_dir), self.held)
            silent = 0.0 if alive else silent + PROBE_S
            await asyncio.sleep(PROBE_S)

    async def stop(self, grace_s: float) -> None:
        """Wait for its end, which somebody has asked it for; after `grace_s` kill it."""
        self._wanted = False
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                signal_child(self._process, signal.SIGKILL)
                await self._process.wait()
        self._let_go()

    def expect_end(self) -> None:
        """Its next end is wanted."""
        self._wanted = False

    async def _launch(self) -> asyncio.subprocess.Process:
        if self._listener is None:
            self._listener = bind(self._host, 0 if self._take_over else self._port)
        held, port = self._listener.fileno(), self._listener.getsockname()[1]
        command = [sys.executable, "-P", "-m", "torchrelay.orchestrator", "--run-dir", str(self._run_dir)]
        command += ["--host", self._host, "--port", str(port), "--kept", *["--take-over"] * self._take_over]
        command += ["--listen", str(held), *self._further]
        if self._tls:
            command.append("--tls")
        if self._inside is not None:
            command += ["--socket", str(self._inside)]
        if self.endpoint is not None:  # it has had a journal: without it, it must not begin anew
            command += ["--journal", self.endpoint.journal]
        with self._words_file().open("wb") as words:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
                preexec_fn=tethered(self._end_by),
                pass_fds=(held,),
            )

    def _refuse(self) -> None:
        """Nobody listens now: whoever connects is to know at once, and does not wait for the next orchestrator."""
        if self._listener is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # it is not to be shared
            # One that does not listen any more must not be shut down again: all that it accepts later would be, too.
            if self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._listener.shutdown(socket.SHUT_RDWR)

    def _let_go(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def where(self) -> Endpoint:
        """Of whichever orchestrator wrote last where it is. Raises ValueError if the file is damaged."""
        return read_endpoint(self._run_dir) or self.endpoint or Endpoint(url="", pid=0)

    def _words_file(self) -> Path:
        return self._run_dir / "logs" / "orchestrator.err"

    def _last_words(self) -> str:
        """What it said last."""
        lines = self._words_file().read_text(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("torchrelay: ") if lines else "it said nothing"
        return said if lines else f"the orchestrator ended; {said}"


def bind(host: str, port: int) -> socket.socket:
    """A socket that has this port, or any for 0, and does not listen. Raises `NotPossible`."""
    try:
        if port:
            return bound(host, port)
        # Linux keeps a port for a socket that does not listen any more only if it was asked for by its number.
        with bound(host, 0) as found:
            return bound(host, found.getsockname()[1])
    except OSError as error:
        hint = "choose another --port, or 0 for any free one"
        raise NotPossible(f"port {port} on {host} cannot be used ({error.strerror}): {hint}", CANNOT_START) from error


def bound(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def answers(endpoint: Endpoint | None, held: Path | None = None) -> bool:
    """Whether anything comes back from there, whatever it is. A crowd at the port says nothing about it.

    `held`: the pass to show over TLS.
    """
    if endpoint is None:
        return False
    try:
        ask(endpoint.url, "GET", "/healthz", {}, b"", PROBE_S, endpoint.socket, held)
    except (OSError, TrustError):
        return False
    return True
