"""The backend "torchrelay" and what is below it, in one process: how messages and groups end, and what the engine does
to the process that it is in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import netpath_below as below
from tests.scripts import netpath_pairs as pairs
from tests.scripts.groups_ranks import Troupe, troupe
from torchrelay.netpath.native import library
from torchrelay.wire.messages.netreport import MAX_ROWS

TWO_PATHS = {"TORCHRELAY_NET_PATHS": "127.0.1.1,127.0.2.1"}

if not library.PATH.is_file():
    pytest.skip("the network part is not built", allow_module_level=True)


@pytest.fixture(scope="module")
def one() -> Iterator[Troupe]:
    """A process whose groups have all their ranks in it."""
    with troupe(1, **TWO_PATHS) as ranks:
        yield ranks


def test_who_waits_is_told_when_another_thread_closes_the_comm(one: Troupe) -> None:
    assert one.ranks[0].do("call", below.closed_while_waiting).startswith("6: the message did not get through")


def play(script: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    words = [*command, sys.executable, "-c", script]
    return subprocess.run(words, env=os.environ | TWO_PATHS | variables, capture_output=True, text=True, timeout=60)


def test_a_signal_that_somebody_waits_for_is_not_taken_by_the_engine() -> None:
    done = play(
        "import os, signal\n"
        "from torchrelay.netpath.native import binding\n"
        "binding.start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert signal.sigtimedwait({signal.SIGUSR1}, 5) is not None\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def full(tmp_path: Path) -> list[str]:
    """Runs a command where no byte is left in this folder."""
    mount = f'mount -t tmpfs -o size=4k none {tmp_path} && head -c 4096 /dev/zero > {tmp_path}/all && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no folder of one's own can be mounted here (unshare -Urm): none is full")
    return command


def test_a_full_folder_for_figures_does_not_end_the_process(full: list[str], tmp_path: Path) -> None:
    script = (
        "import os\nfrom torchrelay.netpath.native import binding\n"
        f"binding.start()\nprint(os.listdir({str(tmp_path)!r}))\n"
    )
    done = play(script, *full, TORCHRELAY_NET_STATS=str(tmp_path))
    assert done.returncode == 0, done
    assert done.stdout == "['all']\n"
    assert "no page of figures" in done.stderr


def test_a_greeting_for_a_path_that_cannot_be_makes_no_comm(one: Troupe) -> None:
    assert one.ranks[0].do("call", below.path_too_many) == (3, False)


def test_peers_that_are_gone_leave_their_place_in_the_figures_to_others(tmp_path: Path) -> None:
    with troupe(1, **TWO_PATHS, TORCHRELAY_NET_STATS=str(tmp_path)) as ranks:
        shown = ranks.ranks[0].do("call", below.peers_one_by_one, MAX_ROWS + 7)
    assert shown.count(f"127.0.3.{MAX_ROWS + 7}") == 1
    assert len(shown) == MAX_ROWS


# ---------------------------------------------------------------- two ranks in one process


def test_of_a_conjugate_the_values_travel(one: Troupe) -> None:
    assert one.ranks[0].do("call", pairs.conjugates) == [True] * 6


def test_tags_that_cannot_be_are_refused(one: Troupe) -> None:
    said = one.ranks[0].do("call", pairs.tags)
    assert len(said) == 9
    assert said[0] == "send: tag -1; give one from 0 to 2147483647"


def test_a_message_fails_when_the_store_is_gone(one: Troupe) -> None:
    found = one.ranks[0].do("call", pairs.without_a_store)
    assert all("the store of netpath/" in str(end) for end in found), found


def test_what_is_sent_to_oneself_and_not_taken_fails(one: Troupe) -> None:
    no_room, nobody = one.ranks[0].do("call", pairs.to_oneself)
    assert no_room.count("has sent 16 bytes, and there is room for 12") == 2
    assert "the group was aborted" in nobody


def test_who_ends_lets_others_come_to_its_last_collective(one: Troupe) -> None:
    assert one.ranks[0].do("call", pairs.last_words) == ["ended", [7.0] * 3]


def test_a_group_that_could_not_connect_anew_does_not_pretend_to_work(one: Troupe) -> None:
    found = one.ranks[0].do("call", pairs.not_connected_anew)
    assert all("there is no store" in str(end) for end in found[:2]), found
    assert all("broken: the group is being connected anew" in str(end) for end in found[2:4]), found
    assert found[4:] == [True] * 2


def test_a_group_that_nobody_has_is_closed_wherever_it_is_dropped(one: Troupe) -> None:
    wrong, other = one.ranks[0].do("call", pairs.dropped)
    assert not wrong
    assert "the peer has closed" in str(other)


@pytest.mark.parametrize("others_s", [4.0, 2.0])
def test_a_monitored_barrier_names_nobody_who_has_come(one: Troupe, others_s: float) -> None:
    """Nor who has come, and gone again when its own time was over."""
    assert "ranks 1 have not come" in one.ranks[0].do("call", pairs.one_is_missing, others_s)


def test_what_a_root_brings_may_lie_in_one_place(one: Troupe) -> None:
    assert one.ranks[0].do("call", pairs.spread_out) == [[1.0] * 5] * 2
