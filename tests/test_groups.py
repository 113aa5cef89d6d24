"""Process groups are wired anew under their handles, and whoever is blocked in them can be released."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.scripts import groups_actions as acts
from tests.scripts.groups_ranks import Failed, Puppet, Troupe, troupe, until
from torchrelay.worker import abandon, groups, swap
from torchrelay.worker.abandon import Abandoned, await_unless_broken
from torchrelay.worker.backends import kinds_of
from torchrelay.worker.collective_errors import is_collective_error
from torchrelay.worker.sockets import Ours, open_sockets

RELEASED_S = 0.05  # how long a broken waiter may take; it takes about 1 ms on an idle core
EMPTY_CACHE = {"TORCHRELAY_CACHE": "/nonexistent"}


@pytest.fixture(scope="session")
def extension() -> dict[str, str]:
    """The environment in which the extension is found; compiled if it was not yet."""
    try:
        path = groups.build_extension()
    except RuntimeError as error:
        pytest.skip(f"no extension: {error}")
    return {"TORCHRELAY_CACHE": str(path.parent)}


@pytest.fixture(params=["extension", "fresh backend type"])
def four(request: pytest.FixtureRequest) -> Iterator[Troupe]:
    """Four connected ranks, by either method."""
    environment = request.getfixturevalue("extension") if request.param == "extension" else EMPTY_CACHE
    with troupe(4, **environment) as ranks:
        ranks.start()
        assert ranks.ranks[0].do("method") == request.param
        yield ranks


@pytest.fixture
def two(extension: dict[str, str]) -> Iterator[Troupe]:
    with troupe(2, **extension) as ranks:
        ranks.start()
        yield ranks


def wait_until_blocked(ranks: Troupe, *waiting: int, started: int) -> None:
    """Until these ranks have started their `started`-th collective of this generation, and cannot end it."""
    for rank in waiting:
        puppet = ranks.ranks[rank]
        until(partial(has_started, puppet, started))
        puppet.assert_busy()


def has_started(puppet: Puppet, collectives: int) -> bool:
    return bool(puppet.control_do("collectives") >= collectives)


# ---------------------------------------------------------------- rewire


@pytest.mark.slow
def test_groups_work_after_every_rewire_and_keep_their_handles(four: Troupe) -> None:
    four.do("new_group", "low", [0, 1])
    four.do("new_group", "odd", [1, 3])
    for _ in range(3):
        four.rewire()
        assert four.do("all_reduce") == [4.0] * 4
        assert four.do("all_reduce", group="low", ranks=[0, 1]) == [2.0] * 2
        assert four.do("all_reduce", group="odd", ranks=[1, 3]) == [2.0] * 2
    four.do("new_group", "late", [0, 2, 3])
    assert four.do("all_reduce", group="late", ranks=[0, 2, 3]) == [3.0] * 3
    four.rewire()
    assert four.do("all_reduce", group="late", ranks=[0, 2, 3]) == [3.0] * 3
    assert four.do("backend_names")[1] == {"default": "gloo", "low": "gloo", "odd": "gloo"}


@pytest.mark.slow
def test_a_lost_rank_is_replaced_by_a_process_that_was_alone(four: Troupe) -> None:
    four.do("new_group", "low", [0, 1])
    four.do("call", acts.make_and_destroy_a_group)  # what the newcomer does not do again
    four.ranks[1].kill()
    newcomer = four.replace(1)
    newcomer.do("init")
    newcomer.do("new_group", "low", [0, 1])  # alone, as its script does it
    assert newcomer.do("backend_names") == {"default": "gloo", "low": "gloo"}
    four.rewire(host=2)
    assert four.do("all_reduce", group="low", ranks=[0, 1]) == [2.0] * 2
    four.do("new_group", "late", [1, 2])  # torch counts names: the newcomer must be in step
    assert four.do("all_reduce", group="late", ranks=[1, 2]) == [2.0] * 2


@pytest.mark.slow
def test_a_mesh_that_was_made_alone_works_after_every_rewire(extension: dict[str, str]) -> None:
    for environment in (extension, EMPTY_CACHE):
        with troupe(4, **environment) as ranks:
            ranks.do("init")
            ranks.do("call", acts.make_mesh)
            for _ in range(2):
                ranks.rewire()
                # rows: ranks 0 and 2, 1 and 3; columns: ranks 0 and 1, 2 and 3
                assert ranks.do("call", acts.sums_over_mesh) == [[2, 2, 1, 1], [4, 4, 1, 1], [2, 2, 5, 5], [4, 4, 5, 5]]
            ranks.do("call", acts.monitored_barrier)


@pytest.mark.slow
def test_collectives_keep_the_timeout_of_their_group(two: Troupe) -> None:
    assert two.do("call", acts.timeouts) == [60.0, 60.0]
    two.rewire(timeout_s=20.0)
    assert two.do("call", acts.timeouts) == [60.0, 60.0]


@pytest.mark.slow
def test_collectives_are_counted_from_each_rewire(two: Troupe) -> None:
    before = two.ranks[0].control_do("collectives")
    two.do("all_reduce")
    assert two.ranks[0].control_do("collectives") == before + 1
    two.rewire()
    assert two.ranks[0].control_do("collectives") == before


@pytest.mark.slow
def test_a_rewire_fails_at_once_on_all_ranks_if_one_has_not_made_a_group(extension: dict[str, str]) -> None:
    with troupe(2, **extension) as ranks:
        ranks.do("init")
        ranks.ranks[0].do("new_group", "both", [0, 1])
        address = ranks.ranks[0].do("host_store")
        begin = time.monotonic()
        ranks.tell("rewire", address, 1, timeout_s=20.0)
        failures = ranks.results()
        assert time.monotonic() - begin < 10
        for failure in failures:
            assert re.search(r"has a group '1' of ranks \[0, 1\], rank 1 has not: make all groups", str(failure))
        ranks.ranks[1].do("new_group", "both", [0, 1])
        ranks.rewire()
        assert ranks.do("all_reduce", group="both") == [2.0] * 2


@pytest.mark.slow
def test_a_rewire_that_nobody_joins_can_be_broken_and_tried_again(four: Troupe) -> None:
    address = four.ranks[0].do("host_store")
    four.tell("rewire", address, 100, timeout_s=30.0, ranks=[0, 1, 2])
    for rank in (0, 1, 2):
        puppet = four.ranks[rank]
        until(partial(puppet.control_do, "call", acts.waits_for, "generation 100"))
        at, _ = four.ranks[rank].control_do("break_connections")
        with pytest.raises(Failed, match=r"RewireError: generation 100: "):
            four.ranks[rank].result()
        assert four.ranks[rank].ended_at - at < RELEASED_S
    four.rewire()
    assert four.do("all_reduce") == [4.0] * 4


@pytest.mark.slow
def test_a_rewire_that_nobody_joins_ends_by_its_timeout(two: Troupe) -> None:
    address = two.ranks[0].do("host_store")
    for puppet in two.ranks:
        with pytest.raises(Failed, match="RewireError"):
            puppet.do("rewire", address, 100 + puppet.rank, timeout_s=0.5)
        puppet.do("new_group", "both", [0, 1])  # alone again: it waits for nobody
    two.rewire()
    assert two.do("all_reduce", group="both") == [2.0] * 2


@pytest.mark.slow
def test_no_store_is_an_error_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(groups.RewireError, match="no store at 127"):
        groups.connect_store(address, 30.0)
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_nothing_is_left_of_old_generations(extension: dict[str, str]) -> None:
    with troupe(2, **extension) as ranks:
        ranks.start()
        ranks.do("new_group", "both", [0, 1])
        ranks.rewire()
        held = ranks.ranks[1].do("held")
        for _ in range(20):
            ranks.rewire()
        assert ranks.ranks[1].do("held") == held


@pytest.mark.slow
def test_without_the_extension_little_is_left_of_old_generations() -> None:
    with troupe(2, **EMPTY_CACHE) as ranks:
        ranks.start()
        threads, descriptors = ranks.ranks[1].do("held")
        for _ in range(10):
            ranks.rewire()
        after = ranks.ranks[1].do("held")
        assert after[0] - threads <= 2 * 10  # two threads of each old backend
        assert after[1] - descriptors <= 2 * 10


# ---------------------------------------------------------------- breaking


@pytest.mark.slow
def test_a_blocked_gate_is_released_within_milliseconds(four: Troupe) -> None:
    for _ in range(3):
        started = four.ranks[1].control_do("collectives") + 1
        four.tell("call", acts.gate, ranks=[1, 2, 3])
        wait_until_blocked(four, 1, 2, 3, started=started)
        for rank in (1, 2, 3):
            at, broken = four.ranks[rank].control_do("break_connections")
            assert broken > 0
            with pytest.raises(Failed) as failed:
                four.ranks[rank].result()
            assert failed.value.collective
            assert four.ranks[rank].ended_at - at < RELEASED_S
        four.rewire()
    assert four.do("call", acts.gate) == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gate", "large", "broadcast", "gather_objects", "barrier"])
def test_every_collective_can_be_broken_and_says_what_it_was(two: Troupe, name: str) -> None:
    started = two.ranks[1].control_do("collectives") + 1
    two.tell("call", getattr(acts, name), ranks=[1])
    wait_until_blocked(two, 1, started=started)
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result()
    assert failed.value.collective
    with pytest.raises(Failed) as failed:  # what it enters next fails, too
        two.ranks[1].do("call", getattr(acts, name))
    assert failed.value.collective


@pytest.mark.slow
@pytest.mark.parametrize("name", ["receive", "send", "key_of_the_store", "call_that_nobody_else_ends"])
def test_every_other_wait_can_be_broken_and_says_what_it_was(two: Troupe, name: str) -> None:
    two.tell("call", getattr(acts, name), ranks=[1])
    two.ranks[1].assert_busy()
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result(within_s=5)
    assert failed.value.collective


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [0, 1])  # one end made the connection, the other accepted it
def test_a_group_that_was_made_while_connected_can_be_broken(two: Troupe, waiting: int) -> None:
    two.do("new_group", "late", [0, 1])
    two.tell("all_reduce", group="late", ranks=[waiting])
    two.ranks[waiting].assert_busy()
    two.ranks[waiting].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[waiting].result(within_s=5)
    assert failed.value.collective


@pytest.mark.slow
def test_a_collective_in_flight_does_not_hold_up_the_next_rewire(two: Troupe) -> None:
    two.do("call", acts.start_what_cannot_end)
    two.rewire(timeout_s=5.0)  # shorter than the collective's own timeout
    assert two.do("all_reduce") == [2.0] * 2


@pytest.mark.slow
def test_who_waits_for_who_waits_for_the_dead_is_released_by_a_break_alone(four: Troupe) -> None:
    # A broadcast goes down a tree: below rank 2 hangs rank 3, which never talks to rank 0.
    started = four.ranks[3].control_do("collectives") + 1
    four.tell("call", acts.broadcast, ranks=[1, 2, 3])
    wait_until_blocked(four, 1, 2, 3, started=started)
    four.ranks[0].kill()
    with pytest.raises(Failed) as failed:
        four.ranks[2].result()
    assert failed.value.collective
    four.ranks[3].assert_busy()  # its own neighbour lives: no error will come
    at, _ = four.ranks[3].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        four.ranks[3].result()
    assert failed.value.collective
    assert four.ranks[3].ended_at - at < RELEASED_S


@pytest.mark.slow
def test_making_a_group_can_be_broken(two: Troupe) -> None:
    two.tell("new_group", "never", [0, 1], ranks=[1])
    until(lambda: two.ranks[1].control_do("call", acts.waits_for, "connecting group"))
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result()
    assert failed.value.collective


@pytest.mark.slow
def test_breaking_leaves_the_sockets_of_the_script_alone(two: Troupe) -> None:
    two.ranks[1].do("call", acts.open_own_sockets)
    two.ranks[1].control_do("break_connections")
    assert two.ranks[1].do("call", acts.own_sockets_work)
    _, broken = two.ranks[1].control_do("break_connections")
    assert broken == 0  # nothing was left to break
    two.rewire()
    assert two.ranks[1].do("call", acts.own_sockets_work)


@pytest.mark.slow
def test_breaking_while_nobody_communicates_does_no_harm(two: Troupe) -> None:
    for _ in range(3):
        two.ranks[0].control_do("break_connections")
    two.rewire()
    assert two.do("all_reduce") == [2.0] * 2


@pytest.mark.slow
def test_a_forked_child_does_not_hold_the_connections_of_a_dead_rank(two: Troupe) -> None:
    child = two.ranks[0].do("call", acts.fork_a_child)
    try:
        started = two.ranks[1].control_do("collectives") + 1
        two.tell("call", acts.gate, ranks=[1])
        wait_until_blocked(two, 1, started=started)
        two.ranks[0].kill()
        with pytest.raises(Failed) as failed:
            two.ranks[1].result(within_s=10)
        assert failed.value.collective
    finally:
        os.kill(child, 9)


@pytest.mark.slow
def test_stores_and_devices_listen_on_loopback_only(two: Troupe) -> None:
    two.ranks[0].do("host_store")
    hosts = {host for host, _ in two.ranks[0].do("call", acts.listening)}
    assert hosts == {"127.0.0.1"}


# ---------------------------------------------------------------- which errors are of communication


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("[/src/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv"),
        RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors"),
        RuntimeError("No backend type associated with device type cpu"),
        dist.DistNetworkError("Broken pipe"),
        dist.DistStoreError("wait timeout after 1000ms, keys: /nokey"),
        Abandoned("connecting a new group was interrupted"),
    ],
)
def test_errors_of_communication_are_known(error: BaseException) -> None:
    assert is_collective_error(error)
    assert is_collective_error(raised_from(error, explicit=True))
    assert is_collective_error(raised_from(error, explicit=False))


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), ValueError("gloo/transport"), KeyboardInterrupt(), OSError("Broken")]
)
def test_errors_of_the_script_are_not(error: BaseException) -> None:
    assert not is_collective_error(error)
    assert not is_collective_error(raised_from(error, explicit=True))


def raised_from(cause: BaseException, *, explicit: bool) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as error:
            if explicit:
                raise ValueError("while training") from error
            raise ValueError("while training")  # noqa: B904  that is the case under test
    except ValueError as error:
        return error


def test_an_error_hidden_by_from_none_is_found_too_for_the_step_is_redone_all_the_same() -> None:
    error = raised_from(dist.DistNetworkError("Broken pipe"), explicit=False)
    error.__suppress_context__ = True
    assert is_collective_error(error)


# ---------------------------------------------------------------- sockets


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
            yield listener, here, there


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_connection_is_known_by_where_it_was_accepted(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.add_devices([listener.getsockname()])
    assert ours.break_backends() == 1
    assert not is_open(here)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    with socket.create_connection(listener.getsockname()):
        pass  # the listener listens on
    assert not is_open(there)


def test_a_connection_is_known_by_whom_it_was_made_to(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, _, there = connection
    ours = Ours()
    ours.peers = frozenset([listener.getsockname()])
    assert ours.break_backends() == 1
    assert not is_open(there)


def test_a_connection_to_another_address_is_a_strangers(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.peers = frozenset([("127.0.0.1", 1)])
    ours.store = ("127.0.0.1", 2)
    ours.hosted = frozenset([listener.getsockname()])  # a hosted store's clients are other ranks' business
    assert ours.break_backends() == ours.break_store() == 0
    assert is_open(here)
    assert is_open(there)


@pytest.mark.parametrize(
    ("known_as", "covered"),
    [("devices", 2), ("hosted", 2), ("peers", 1), ("store", 1), ("", 0)],  # the listener and what it accepted; our end
)
def test_a_child_covers_our_sockets_and_no_others(
    connection: tuple[socket.socket, socket.socket, socket.socket], known_as: str, covered: int
) -> None:
    listener, here, there = connection
    ours = Ours()
    address = listener.getsockname()
    if known_as:
        setattr(ours, known_as, address if known_as == "store" else frozenset([address]))
    child = os.fork()
    if child == 0:
        os._exit(ours.cover())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == covered
    assert is_open(here)  # the parent's are untouched
    assert is_open(there)


def test_looking_at_sockets_leaves_no_descriptor_behind(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    _, here, _ = connection
    assert here.getsockname() in [sock.ends.local for sock in open_sockets()]
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- calls that can be left behind


def test_a_call_gives_its_result_or_its_error() -> None:
    assert await_unless_broken(lambda: 7, 5.0, "counting") == 7
    with pytest.raises(ZeroDivisionError):
        await_unless_broken(lambda: 1 / 0, 5.0, "dividing")


def test_a_call_asks_no_name_server() -> None:
    assert acts.name_servers() > 0
    assert await_unless_broken(acts.name_servers, 5.0, "looking") == 0
    assert acts.name_servers() > 0


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(Abandoned, match=r"waiting took longer than 0.05 s"):
        await_unless_broken(never.wait, 0.05, "waiting")
    never.set()


def test_a_call_is_left_behind_when_it_is_broken() -> None:
    inside, never = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        never.wait()

    def break_it() -> None:
        inside.wait()
        abandon.break_all()

    threading.Thread(target=break_it).start()
    with pytest.raises(Abandoned, match="waiting was interrupted"):
        await_unless_broken(block, 30.0, "waiting")
    never.set()


def test_what_a_call_brings_after_it_was_left_behind_is_dropped() -> None:
    class Connection:
        closed = threading.Event()

        def __del__(self) -> None:
            self.closed.set()

    go_on = threading.Event()

    def connect() -> Connection:
        go_on.wait()
        return Connection()

    with pytest.raises(Abandoned):
        await_unless_broken(connect, 0.05, "connecting")
    go_on.set()
    assert Connection.closed.wait(10)


# ---------------------------------------------------------------- kinds, and the extension's cache


def test_kinds_are_read_from_torchs_configuration() -> None:
    assert kinds_of("cpu:gloo,cuda:nccl") == {"gloo": ("cpu",), "nccl": ("cuda",)}
    assert kinds_of("cpu:gloo,cuda:gloo") == {"gloo": ("cpu", "cuda")}
    with pytest.raises(ValueError, match="'mpi' cannot be rewired: use gloo or nccl"):
        kinds_of("cpu:mpi")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHRELAY_CACHE", str(tmp_path))
    return tmp_path


def compile_to(content: bytes) -> Callable[[Path], None]:
    def compile_(target: Path) -> None:
        target.write_bytes(content)

    return compile_


def test_without_a_compiled_extension_there_is_another_way(cache: Path) -> None:
    chosen, reason = swap.load()
    assert chosen.name == "fresh backend type"
    assert "python -m torchrelay.worker.groups build" in reason
    assert str(cache) in reason


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not what was compiled"),
        (lambda path: path.with_suffix(".json").write_text("{}"), "cannot be trusted"),
        (lambda path: path.with_suffix(".json").write_text(json.dumps({"sha256": 1})), "not what was compiled"),
        (lambda path: path.with_suffix(".json").unlink(), "not compiled"),
        (lambda path: path.chmod(0o666), "can be written by, somebody else"),
        (lambda path: path.parent.chmod(0o777), "can be written by, somebody else"),
        (lambda _: None, "does not load"),  # it was no extension from the beginning
    ],
)
def test_a_spoilt_cache_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, why: str) -> None:
    monkeypatch.setattr(swap, "_compile", compile_to(b"no shared object at all"))
    path = swap.build_extension()
    assert path.parent == cache
    spoil(path)
    chosen, reason = swap.load()
    assert chosen.name == "fresh backend type"
    assert why in reason


def test_another_torch_has_another_extension(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_compile", compile_to(b"for this torch"))
    path = swap.build_extension()
    monkeypatch.setattr("torch.__version__", "99.0")
    assert "not compiled" in swap.load()[1]
    assert swap.build_extension() != path
    assert len(list(cache.glob("*.so"))) == 2


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_compile", compile_to(b"first"))
    first = swap.build_extension()
    monkeypatch.setattr(swap, "_compile", compile_to(b"second"))
    assert swap.build_extension() == first
    assert first.read_bytes() == b"first"
    first.write_bytes(b"spoilt")
    assert swap.build_extension().read_bytes() == b"second"
    assert not list(cache.glob("build-*"))


def test_a_compiler_that_fails_or_is_missing_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false failed"):
        swap.build_extension()
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        swap.build_extension()
    assert not list(cache.glob("*.so"))
