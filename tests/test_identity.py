"""A script runs before its rank is known, and waits exactly where it asks for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Assign
from torchrelay.worker.control import identity
from torchrelay.worker.control.identity import Identity, environment_of


def assign(rank: int = 5, replacement: bool = False) -> Assign:
    return Assign(
        node=NodeId("n"), worker=WorkerId("w"), job=JobId("j"), generation=Generation(1), rank=Rank(rank), world_size=8,
        local_world_size=4, local_rank=rank % 4, replacement=replacement, restarts=2,
    )  # fmt: skip


# What a script may do to learn its rank. Each is run in a process of its own, before it is assigned.
ASKING = {
    "item": "found = os.environ['RANK']",
    "get": "found = os.environ.get('RANK')",
    "getenv": "found = os.getenv('RANK', 'none')",
    "getenvb": "found = os.getenvb(b'RANK').decode()",
    "contains": "assert 'RANK' in os.environ; found = os.environ['RANK']",
    "not contains": "found = '5' if not ('RANK' not in os.environ) else 'none'",
    "setdefault": "found = os.environ.setdefault('RANK', '0')",
    "copy": "found = os.environ.copy()['RANK']",
    "dict": "found = dict(os.environ)['RANK']",
    "splat": "found = {**os.environ, 'A': 'b'}['RANK']",
    "or": "found = (os.environ | {'A': 'b'})['RANK']",
    "items": "found = [v for k, v in os.environ.items() if k == 'RANK'][0]",
    "iteration": "found = os.environ[[k for k in os.environ if k == 'RANK'][0]]",
    "length": "n = len(os.environ); found = '5' if asked.is_set() else ''",
    "local": "found = str(int(os.environ['LOCAL_RANK']) + 4)",
    "group": "found = str(int(os.environ['GROUP_RANK']) + 4)",
    "role": "found = os.environ['ROLE_RANK']",
    "expandvars": "found = os.path.expandvars('$RANK')",
    "child with a copy": (
        "found = subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"RANK\"])'], "
        "env={**os.environ}, capture_output=True, text=True).stdout.strip()"
    ),
    "restarts": "assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '2'; found = os.environ['RANK']",
}
# What it may do without being told.
NOT_ASKING = {
    "world size": "found = os.environ['WORLD_SIZE']",
    "another": "found = '8' if os.environ.get('SOMETHING') is None else ''",
    "setting": "os.environ['X'] = '8'; found = os.environ['X']",
    "path": "import tempfile, shutil; shutil.which('ls'); found = '8'",
    "child": "found = subprocess.run(['echo', '8'], capture_output=True, text=True).stdout.strip()",
    "forked child": (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    len(os.environ); os._exit(8 if 'RANK' not in os.environ else 1)\n"
        "found = str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
}

PROGRAM = """
import os, subprocess, sys, threading
os.environ["RANK"] = "99"  # of the operator's shell
os.environ["WORLD_SIZE"] = "8"
from tests.test_identity import assign
from torchrelay.worker.control import identity
me = identity.Identity()
asked = threading.Event()
def wait():
    asked.set()
    me.wait()
identity.make_environment_wait(wait)
def tell():
    while not asked.wait(0.01):
        if done:
            return
    me.assign(assign())
done = []
teller = threading.Thread(target=tell)
teller.start()
{code}
done.append(1)
teller.join()
print(found, asked.is_set(), type(os.environ).__name__)
"""


def run(code: str) -> list[str]:
    program = PROGRAM.format(code=code)
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("how", ASKING)
def test_whoever_asks_for_the_rank_waits_until_it_is_known(how: str) -> None:
    assert run(ASKING[how]) == ["5", "True", "_Environ"]


@pytest.mark.slow
@pytest.mark.parametrize("how", NOT_ASKING)
def test_whoever_does_not_ask_goes_on(how: str) -> None:
    assert run(textwrap.dedent(NOT_ASKING[how])) == ["8", "False", "_WaitingEnviron"]


def test_the_variables_are_torchruns() -> None:
    assert environment_of(assign(6)) == {
        "RANK": "6", "LOCAL_RANK": "2", "GROUP_RANK": "1", "ROLE_RANK": "6", "WORLD_SIZE": "8", "ROLE_WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what an assignment writes."""
    for name in environment_of(assign()):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("environment")
class TestBecomingARank:
    def test_who_waits_goes_on_with_the_assignment(self) -> None:
        me = Identity()
        ranks: list[Rank] = []
        waiter = threading.Thread(target=lambda: ranks.append(me.rank))
        waiter.start()
        assert not me.known
        me.assign(assign(3, replacement=True))
        waiter.join(10)
        assert ranks == [Rank(3)]
        assert me.wait().replacement

    def test_a_repetition_changes_nothing(self) -> None:
        me = Identity()
        me.assign(assign(3, replacement=True))
        me.assign(assign(3, replacement=False))
        assert me.wait().replacement

    def test_who_asks_writes_the_environment(self) -> None:
        """Not who brings the rank: a variable that is set may move what another thread reads from C."""
        me = Identity()
        me.let_environment_wait()
        bringing = threading.Thread(target=lambda: me.assign(assign()))
        bringing.start()
        bringing.join(10)
        assert me.known
        assert os.environ.__class__.__name__ == "_WaitingEnviron"
        read = ctypes.CDLL(None).getenv
        read.restype = ctypes.c_char_p
        assert read(b"RANK") is None
        assert os.environ["RANK"] == "5"
        assert read(b"RANK") == b"5"

    def test_it_becomes_no_other_rank(self) -> None:
        me = Identity()
        me.assign(assign(3))
        with pytest.raises(ValueError, match="is rank 3 and cannot become rank 4"):
            me.assign(assign(4))


@pytest.mark.slow
def test_output_goes_to_the_ranks_log_whoever_prints(tmp_path: Path) -> None:
    (tmp_path / "rank-5.log").write_text("its predecessor\n")
    program = f"""
import os, subprocess
from pathlib import Path
from tests.test_identity import assign
from torchrelay.worker.control.identity import Identity
print("before")
Identity(Path({str(tmp_path)!r})).assign(assign())
print("after", flush=True)
os.write(2, b"from C\\n")
subprocess.run(["echo", "a child"])
"""
    root = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout == "before\n"
    assert (tmp_path / "rank-5.log").read_text() == "its predecessor\nafter\nfrom C\na child\n"


def test_this_process_waits_for_nobody() -> None:
    assert type(os.environ).__name__ == "_Environ"


EARLY = """
import os
from tests.test_identity import assign
from torchrelay.worker.control.identity import Identity
me = Identity()
me.assign(assign())
me.let_environment_wait()
print(os.environ["RANK"], type(os.environ).__name__)
"""


@pytest.mark.slow
def test_a_rank_that_comes_before_the_script_is_there_when_it_asks() -> None:
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert done.stdout.split() == ["5", "_Environ"], done.stderr


@pytest.mark.parametrize("slot", [0, 2, 3, 9])
def test_the_local_rank_is_the_ranks_own_whatever_slot_it_has_moved_to(slot: int) -> None:
    told = environment_of(replace(assign(6), local_rank=slot))
    assert (told["RANK"], told["LOCAL_RANK"], told["GROUP_RANK"]) == ("6", "2", "1")
    assert int(told["LOCAL_RANK"]) < int(told["LOCAL_WORLD_SIZE"])


class TestDevices:
    def test_the_slots_device_is_found_under_the_local_rank(self) -> None:
        env = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}
        found = identity.arrange(env, 2, 0)
        assert found == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-b,GPU-a"}

    @pytest.mark.parametrize("listed", [None, "4,5,6,7"])
    def test_no_two_ranks_of_a_node_find_the_same_device(
        self, monkeypatch: pytest.MonkeyPatch, listed: str | None
    ) -> None:
        monkeypatch.setattr(identity, "count", lambda: ["4", "5", "6", "7"])
        env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
        for slots in ([0, 1], [2, 1], [2, 3], [1, 0], [3, 0]):  # of local ranks 0 and 1, wherever they have gone
            orders = [env | identity.arrange(env, slot, rank) for rank, slot in enumerate(slots)]
            seen = [order.get("CUDA_VISIBLE_DEVICES", "4,5,6,7").split(",") for order in orders]
            assert [seen[rank][rank] for rank in (0, 1)] == [str(4 + slot) for slot in slots]
            assert all(sorted(one) == ["4", "5", "6", "7"] for one in seen), "all stay visible"

    def test_without_devices_or_away_from_them_nothing_is_arranged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "count", list)
        assert identity.arrange({}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": ""}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, 1) == {}

    def test_cuda_that_was_used_too_early_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RefusedError, match=r"slot 2.*Read RANK"):
            identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 0)
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1, 1) == {}
