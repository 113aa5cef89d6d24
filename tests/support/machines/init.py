"""The init of a machine: process 1 there. It starts what the test asks for, and reaps whatever ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
from typing import NoReturn

from tests.support.machines import kernel
from tests.support.machines.files import build_root
from tests.support.machines.plan import Plan

START, STOP_ALL, CONTINUE_ALL = b"start", b"stop", b"continue"
DONE = b"done"
FDS = 5  # of a start: where to answer, the request, and standard input, output and error
NAMESPACES = kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNS


def become_init(control: socket.socket, plan: Plan) -> NoReturn:
    """In a process that is the first of its PID namespace: build the machine, say so, and serve until it ends."""
    try:
        kernel.die_with_parent()
        kernel.call_oneself(f"init {plan.name}")
        kernel.unshare(NAMESPACES)
        socket.sethostname(plan.name)
        build_root(plan)
        control.send(DONE)
        Init(control).serve()
    except Exception as error:  # noqa: BLE001  the top of a process: the test is told
        control.send(f"{plan.name}: {error!r}".encode())
    finally:
        os._exit(0)  # and with it go all processes of its namespace


class Init:
    """What process 1 knows: its children that the test asked for, and where their ends are to be told."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def serve(self) -> None:
        """Until the test closes the connection."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([self.control.fileno(), woken], [], [])
            if self.control.fileno() in ready:
                word, fds, _, _ = socket.recv_fds(self.control, 64, FDS)
                if not word:
                    return
                self.obey(word, fds)
            if woken in ready:
                os.read(woken, 4096)
            self.reap()

    def obey(self, word: bytes, fds: list[int]) -> None:
        if word == START:
            self.start(*fds)
            return
        try:
            os.kill(-1, signal.SIGSTOP if word == STOP_ALL else signal.SIGCONT)  # all but this one, and none escapes
        except ProcessLookupError:
            pass  # there is no other
        self.control.send(DONE)

    def start(self, answer: int, request: int, *streams: int) -> None:
        """Start a process, and say its id, or why there is none."""
        told = socket.socket(fileno=answer)
        with os.fdopen(request, encoding="utf-8") as file:
            wish = json.load(file)
        try:
            child = subprocess.Popen(
                wish["command"],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                cwd=wish["cwd"],
                env=wish["env"],
                start_new_session=True,
            )
        except OSError as error:
            told.send(json.dumps([error.errno, error.strerror, error.filename]).encode())
            told.close()
        else:
            self.children[child.pid] = child, told
            tell_id(told, child.pid)
        finally:
            for stream in streams:
                os.close(stream)

    def reap(self) -> None:
        """Whatever has ended, orphans too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                child, told = self.children.pop(pid)
                child.returncode = os.waitstatus_to_exitcode(status)
                try:
                    told.send(str(child.returncode).encode())
                except OSError:
                    pass  # no one waits for it any more
                told.close()


def tell_id(told: socket.socket, pid: int) -> None:
    """As credentials: the kernel translates the id to what the receiver calls that process."""
    credentials = struct.pack("3i", pid, os.getuid(), os.getgid())
    try:
        told.sendmsg([DONE], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    except OSError:
        pass  # no one waits for it any more
