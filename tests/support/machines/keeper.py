"""The keeper: parent of all inits, in the network namespace of the switches. It ends when the test process ends.

python -m tests.support.machines.keeper FD      FD: a socket, on which plans of machines come
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from tests.support.machines import kernel
from tests.support.machines.init import become_init
from tests.support.machines.plan import Plan

MOST = 1 << 17  # bytes of a plan
READY = b"ready"


def keep(asked: socket.socket) -> None:
    """Start a machine for each plan that comes, until the test process is gone."""
    tester = os.pidfd_open(os.getppid())
    inits: list[int] = []
    while True:
        ready, _, _ = select.select([asked.fileno(), tester], [], [])
        plan = b"" if tester in ready else asked.recv(MOST)
        if not plan:
            break
        answer_with_init(asked, Plan(**json.loads(plan)), inits)
    for pidfd in inits:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended before
    try:
        os.waitpid(-1, 0)  # as SIGCHLD is ignored: for all of them
    except ChildProcessError:
        pass


def answer_with_init(asked: socket.socket, plan: Plan, inits: list[int]) -> None:
    """Start an init; the test gets its id, a connection to it, and what becomes readable when it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        for fd in (asked.fileno(), ours.fileno(), own, *inits):
            os.close(fd)
        become_init(theirs, plan)
    kernel.set_namespace(own, kernel.CLONE_NEWPID)
    inits.append(os.pidfd_open(pid))
    socket.send_fds(asked, [str(pid).encode()], [ours.fileno(), inits[-1]])
    os.close(own)
    ours.close()
    theirs.close()


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who started the tests may have had it ignored
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    kernel.call_oneself("keeper")
    kernel.unshare(kernel.CLONE_NEWNET)
    for which in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")  # switches say nothing themselves
    asked.send(READY)
    keep(asked)


if __name__ == "__main__":
    main()
