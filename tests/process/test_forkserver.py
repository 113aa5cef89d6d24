"""The forkserver, as its agent sees it through the socket, and what it reads from the kernel."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.agent_stage import lives, offspring
from tests.support.forkserver import (
    DEADLINE_S,
    Server,
    server,  # noqa: F401  a fixture
    serving,
)
from torchrelay.agent.workers.children import Children, signal_name
from torchrelay.agent.workers.forks import (
    Child,
    Deliver,
    Ended,
    Forget,
    Fork,
    Inventory,
    Kill,
    Stop,
)
from torchrelay.agent.workers.forkserver import preload, resolve
from torchrelay.agent.workers.oom import OomCounters, own_cgroup_file
from torchrelay.agent.workers.processes import Processes
from torchrelay.protocol.messages.ids import JobId, WorkerId
from torchrelay.wire.files.procfs import ProcessGone, read_stat
from torchrelay.wire.messages.framing import Closed


def gone(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while lives(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# ---------------------------------------------------------------- loading


def test_modules_are_loaded_without_the_garbage_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_by_a_forkserver.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    try:
        preload(["loaded_by_a_forkserver"])
        assert sys.modules["loaded_by_a_forkserver"].COLLECTS is False
        assert gc.isenabled(), "workers collect their garbage as ever"
        assert gc.get_freeze_count() > before, "what was loaded is left alone, so that its pages stay shared"
    finally:
        gc.unfreeze()
        sys.modules.pop("loaded_by_a_forkserver", None)


# ---------------------------------------------------------------- forking


def test_a_worker_is_forked_once_however_often_it_is_asked_for(server: Server) -> None:
    server.fork("w1", "wait")
    server.fork("w1", "wait")
    first, second = server.hear(Child), server.hear(Child)
    assert first == second
    assert first.slot == 1
    server.says("w1", "waiting")
    assert first.pid in offspring(server.process.pid)
    assert len(list(offspring(server.process.pid))) == 2  # and the scribe


def test_an_end_is_told_again_to_who_asks_for_it_again(server: Server) -> None:
    server.fork("w1", "leave", "4")
    child = server.hear(Child)
    ended = server.hear(Ended)
    assert (ended.pid, ended.code, ended.slot) == (child.pid, 4, 1)
    server.fork("w1", "leave", "4")
    assert server.hear(Ended) == ended


def test_the_end_is_dated(server: Server) -> None:
    before = time.monotonic_ns()
    server.fork("w1", "leave", "0")
    server.hear(Child)
    assert before < server.hear(Ended).at_ns < time.monotonic_ns()


@pytest.mark.parametrize("missing", ["cwd", "log"])
def test_what_cannot_be_started_is_reported_with_the_reason(server: Server, missing: str) -> None:
    if missing == "cwd":
        server.fork("w1", "wait", cwd="/no/such/folder")
    else:
        server.fork("w1", "wait", log="/no/such/folder/w1.log")
    ended = server.hear(Ended)
    assert (ended.pid, ended.code) == (None, 94)
    assert ended.cause.startswith("could not be started: ")
    assert "/no/such/folder" in ended.cause


def test_a_function_that_does_not_exist_ends_the_worker_alone(server: Server) -> None:
    server.fork("w1", "no_such_function")
    server.hear(Child)
    assert server.hear(Ended).code == 1
    assert "no_such_function" in server.log("w1").read_text()
    server.fork("w2", "leave", "0")
    server.hear(Child)
    assert server.hear(Ended).code == 0


def test_a_worker_has_the_environment_it_was_given_and_no_other(server: Server) -> None:
    server.fork("w1", "tell_environment")
    server.hear(Child)
    server.hear(Ended)
    names = {line.split("=")[0] for line in server.log("w1").read_text().splitlines() if "=" in line}
    assert names == {"PYTHONPATH"}


def test_every_child_has_entropy_of_its_own(tmp_path: Path) -> None:
    for served in serving(Server(tmp_path, "numpy.random", "tests.support.fake_workers")):
        for name in ("w1", "w2"):
            served.fork(name, "draw")
            served.hear(Child)
            served.hear(Ended)
        first, second = served.log("w1").read_text().split(), served.log("w2").read_text().split()
        assert first[0] != second[0]
        assert first[1] != second[1]


def test_with_torch_loaded_a_worker_trains_at_once_in_one_thread(tmp_path: Path) -> None:
    for served in serving(Server(tmp_path, "torch", "torch._dynamo", "tests.support.fake_workers")):
        assert len(os.listdir(f"/proc/{served.process.pid}/task")) == 1
        took = []
        for name in ("w1", "w2", "w3"):
            begin = time.monotonic()
            served.fork(name, "train")
            served.hear(Child)
            served.says(name, "trained 1")
            took.append(time.monotonic() - begin)
            assert served.hear(Ended).code == 0
        assert min(took) < 1.0  # it takes 0.02 s; importing torch alone would take 2


# ---------------------------------------------------------------- killing


def test_only_sigkill_is_for_the_family(server: Server) -> None:
    server.fork("w1", "have_family")
    server.hear(Child)
    log = server.says("w1", "complete")
    children = [int(line.split()[1]) for line in log.splitlines() if line.startswith("child")]
    server.say(Kill(worker=WorkerId("w1"), signal=signal.SIGCONT, reason="does no harm"))
    server.say(Kill(worker=WorkerId("w1"), signal=signal.SIGTERM, reason="enough"))
    ended = server.hear(Ended)
    assert (ended.signal, ended.cause) == (signal.SIGTERM, "SIGTERM (enough)")
    assert all(gone(pid) for pid in children)  # they live through SIGTERM: it was the clearing up that killed them
    assert "a child got SIGTERM" not in server.log("w1").read_text()


def test_a_signal_of_the_launcher_comes_once_and_to_who_listens(server: Server) -> None:
    server.fork("w1", "hear")
    server.hear(Child)
    server.says("w1", "listening")
    server.say(Deliver(worker=WorkerId("w1"), signal=signal.SIGUSR1, nth=1))
    server.says("w1", "heard SIGUSR1")
    for nth, number in ((1, signal.SIGUSR1), (2, signal.SIGUSR2), (3, signal.SIGTERM)):
        server.say(Deliver(worker=WorkerId("w1"), signal=number, nth=nth))
    server.says("w1", "heard SIGTERM")
    for nth, number in ((4, signal.SIGUSR1), (5, signal.SIGTERM)):
        server.say(Deliver(worker=WorkerId("w1"), signal=number, nth=nth))
    deadline = time.monotonic() + DEADLINE_S
    while server.log("w1").read_text().count("heard SIG") < 4:
        assert time.monotonic() < deadline, server.log("w1").read_text()
        time.sleep(0.002)
    heard = [line for line in server.log("w1").read_text().splitlines() if line.startswith("heard")]
    assert sorted(heard) == [*["heard SIGTERM"] * 2, *["heard SIGUSR1"] * 2], "SIGUSR2 would have ended it"


def test_who_has_no_handler_is_ended_by_a_signal_that_ends(server: Server) -> None:
    server.fork("w1", "wait")
    server.hear(Child)
    server.says("w1", "waiting")
    server.say(Deliver(worker=WorkerId("w1"), signal=signal.SIGUSR1, nth=1))
    server.say(Deliver(worker=WorkerId("w1"), signal=signal.SIGTERM, nth=2))
    ended = server.hear(Ended)
    assert (ended.signal, ended.cause) == (signal.SIGTERM, "SIGTERM (passed on by the launcher)")


def test_a_worker_that_has_just_been_forked_can_be_killed(server: Server) -> None:
    for number in range(20):
        name = f"w{number}"
        server.fork(name, "stay")
        server.say(Kill(worker=WorkerId(name), signal=signal.SIGKILL, reason="fenced"))
        server.hear(Child)
        assert server.hear(Ended).cause == "SIGKILL (fenced)"


def test_killing_who_has_ended_or_never_was_does_nothing(server: Server) -> None:
    server.fork("w1", "leave", "0")
    server.hear(Child)
    server.hear(Ended)
    for name in ("w1", "nobody"):
        server.say(Kill(worker=WorkerId(name), signal=signal.SIGKILL, reason="fenced"))
    server.fork("w2", "leave", "0")
    assert server.hear(Child).worker == "w2"


def test_no_process_outlives_the_server_not_even_a_daemon(server: Server) -> None:
    server.fork("w1", "have_daemon")
    server.hear(Child)
    assert server.hear(Ended).code == 0
    daemon = int(server.log("w1").read_text().split()[1])
    assert lives(daemon)  # it may have something to finish, like an upload
    server.say(Stop())
    assert server.process.wait(DEADLINE_S) == 0
    assert not lives(daemon)


def test_what_workers_leave_behind_is_reaped(server: Server) -> None:
    server.fork("w1", "have_daemon")
    server.hear(Child)
    server.hear(Ended)
    daemon = int(server.log("w1").read_text().split()[1])
    os.kill(daemon, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while daemon in offspring(server.process.pid):
        assert time.monotonic() < deadline, "a zombie stays"
        time.sleep(0.002)


def test_workers_die_with_a_server_that_is_killed(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.hear(Inventory)
    server.fork("w1", "stay")
    pid = server.hear(Child).pid
    server.says("w1", "staying")
    server.process.kill()
    server.process.wait()
    assert gone(pid)
    server.hang_up()


# ---------------------------------------------------------------- agents come and go


def test_an_agent_that_comes_back_hears_who_runs_and_whose_end_is_not_forgotten(server: Server) -> None:
    server.fork("runs", "wait")
    runs = server.hear(Child)
    for name in ("kept", "forgotten"):
        server.fork(name, "leave", "6")
        server.hear(Child)
    ends = {end.worker: end for end in (server.hear(Ended), server.hear(Ended))}
    server.say(Forget(worker=WorkerId("forgotten")))
    server.agent.close()
    server.agent = server.connect()
    inventory = server.hear(Inventory)
    assert inventory.pid == server.process.pid
    assert inventory.children == (runs,)
    assert inventory.ended == (ends[WorkerId("kept")],)


@pytest.mark.usefixtures("no_kernel_kills")
def test_an_end_while_nobody_listens_is_kept(server: Server) -> None:
    server.fork("w1", "wait")
    pid = server.hear(Child).pid
    server.agent.close()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    server.agent = server.connect()
    kept = server.hear(Inventory).ended
    ended = kept[0] if kept else server.hear(Ended)  # if it had not been collected yet when we called
    assert (ended.pid, ended.signal, ended.cause) == (pid, signal.SIGKILL, "SIGKILL")


def test_the_newest_agent_counts(server: Server) -> None:
    newer = server.connect()
    server.hear(Inventory, newer)
    with pytest.raises(Closed):
        server.agent.receive(DEADLINE_S)
    server.agent = newer
    server.fork("w1", "leave", "0")
    server.hear(Child)


def test_an_agent_that_talks_nonsense_is_dropped_and_nobody_else(server: Server) -> None:
    server.fork("w1", "wait")
    child = server.hear(Child)
    server.agent.send(b"nonsense")
    with pytest.raises(Closed):
        server.agent.receive(DEADLINE_S)
    server.agent = server.connect()
    assert server.hear(Inventory).children == (child,)


def test_ctrl_c_is_not_for_the_server(server: Server) -> None:
    server.process.send_signal(signal.SIGINT)
    server.fork("w1", "leave", "0")
    server.hear(Child)
    server.hear(Ended)


# ---------------------------------------------------------------- what the kernel says


def test_out_of_memory_is_told_by_the_cgroups_counter(tmp_path: Path) -> None:
    events, vmstat = tmp_path / "memory.events", tmp_path / "vmstat"
    events.write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    vmstat.write_text("nr_free_pages 7\noom_kill 5\n")
    counters = OomCounters(events, vmstat)
    assert counters.rose() is None
    events.write_text("oom_kill 3\n")
    assert counters.rose() == "cgroup oom_kill rose from 2 to 3"
    assert counters.rose() is None
    vmstat.write_text("oom_kill 6\n")
    assert counters.rose() == "the kernel's oom_kill rose from 5 to 6"


def test_without_counters_nothing_is_claimed(tmp_path: Path) -> None:
    assert OomCounters(tmp_path / "none", tmp_path / "nor this").rose() is None


def test_a_kill_is_called_out_of_memory_only_if_a_counter_rose(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 0\n")
    children = Children(OomCounters(tmp_path / "none", vmstat))
    causes = []
    for count in (0, 1):
        pid = os.fork()
        if pid == 0:
            time.sleep(DEADLINE_S)
            os._exit(0)
        children.add(Child(worker=WorkerId(f"w{count}"), job=JobId("j"), slot=0, pid=pid))
        vmstat.write_text(f"oom_kill {count}\n")
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        causes += [ended.cause for ended in children.collect()]
    assert causes == ["SIGKILL", "SIGKILL (out of memory: the kernel's oom_kill rose from 0 to 1)"]


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/b/memory.events"),  # version 2
        ("0::/the/hosts/path", "memory.events"),  # version 2, in a container
        ("4:memory:/a/b", "memory/a/b/memory.oom_control"),  # version 1
        ("4:cpu,memory:/the/hosts/path", "memory/memory.oom_control"),
    ],
)
def test_the_counter_is_found_wherever_the_cgroup_is(tmp_path: Path, line: str, file: str) -> None:
    cgroup, root = tmp_path / "cgroup", tmp_path / "root"
    cgroup.write_text(f"9:freezer:/x\n{line}\n")
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("oom_kill 0\n")
    assert own_cgroup_file(cgroup, root) == root / file
    assert own_cgroup_file(tmp_path / "none", root) is None


def test_a_process_with_a_name_full_of_brackets_is_read_right() -> None:
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/comm").write_text("a) R 1 (b")
        signal.pause()
        os._exit(0)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "a) R" not in Path(f"/proc/{pid}/stat").read_text() or read_stat(pid).state != "S":
            assert time.monotonic() < deadline
        stat = read_stat(pid)
        assert (stat.parent, stat.session) == (os.getpid(), os.getsid(0))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(ProcessGone):
        read_stat(pid)


def test_signals_have_names() -> None:
    assert (signal_name(9), signal_name(35)) == ("SIGKILL", "signal 35")


@pytest.mark.parametrize("name", ["", "module", "module:", ":function"])
def test_a_function_needs_a_module_and_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="module:function"):
        resolve(name)


def test_an_unknown_worker_is_ended_also_where_there_is_no_room_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Ended] = []
    processes = Processes(tmp_path, preload=(), env={}, cwd="/", linger_s=0.0, on_ended=ends.append)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(Path, "touch", full)
        processes.kill(WorkerId("w9"), signal.SIGKILL, "fenced")
    fork = Fork(worker=WorkerId("w9"), job=JobId("j"), slot=1, function="m:f", log=str(tmp_path / "log"))
    processes.start(fork)
    assert [(ended.worker, ended.cause) for ended in ends] == [("w9", "unknown here")] * 2, "never to be started"
