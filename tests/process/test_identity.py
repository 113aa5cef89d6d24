"""A script runs before its rank is known, and waits exactly where it asks for it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
from tests.support.identity import assign
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
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("how", ASKING)
def test_whoever_asks_for_the_rank_waits_until_it_is_known(how: str) -> None:
    assert run(ASKING[how]) == ["5", "True", "_Environ"]


@pytest.mark.parametrize("how", NOT_ASKING)
def test_whoever_does_not_ask_goes_on(how: str) -> None:
    assert run(textwrap.dedent(NOT_ASKING[how])) == ["8", "False", "_WaitingEnviron"]


def test_output_goes_to_the_ranks_log_whoever_prints(tmp_path: Path) -> None:
    (tmp_path / "rank-5.log").write_text("its predecessor\n")
    program = f"""
import os, subprocess
from pathlib import Path
from tests.support.identity import assign
from torchrelay.worker.control.identity import Identity
print("before")
Identity(Path({str(tmp_path)!r})).assign(assign())
print("after", flush=True)
os.write(2, b"from C\\n")
subprocess.run(["echo", "a child"])
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout == "before\n"
    assert (tmp_path / "rank-5.log").read_text() == "its predecessor\nafter\nfrom C\na child\n"


EARLY = """
import os
from tests.support.identity import assign
from torchrelay.worker.control.identity import Identity
me = Identity()
me.assign(assign())
me.let_environment_wait()
print(os.environ["RANK"], type(os.environ).__name__)
"""


def test_a_rank_that_comes_before_the_script_is_there_when_it_asks() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert done.stdout.split() == ["5", "_Environ"], done.stderr
