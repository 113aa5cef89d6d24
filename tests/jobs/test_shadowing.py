"""Files of a project that are named like modules of ours: they are the script's; no process of ours imports them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What our processes import at their starts, or later.
NAMES = ("secrets", "platform", "msgspec", "aiohttp", "runpy", "sqlite3", "json")
PLANTED = "raise ImportError(f'{__name__}.py of the project was imported')\n"
SCRIPT = """
import os, sys
import torch.distributed as dist
import beside
dist.init_process_group("gloo")
dist.barrier()
print("FOUND", os.environ["RANK"], sys.path[0], beside.__file__, flush=True)
"""


def torchrelay(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: Python puts its folder onto `sys.path`, and not the working folder."""
    command = [sys.executable, "-P", "-m", "torchrelay.cli.main", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module for each of these names."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(PLANTED)
    return tmp_path


@pytest.mark.timeout(120)
def test_a_run_in_a_folder_with_modules_named_like_ours_works(project: Path) -> None:
    home = project / "src"
    home.mkdir()
    (home / "train.py").write_text(SCRIPT)
    (home / "beside.py").write_text("")
    done = torchrelay(project, "run", "--nproc-per-node", "2", "src/train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"FOUND (\d) (\S+) (\S+)", done.stdout)
    assert sorted(found) == [(str(rank), str(home), str(home / "beside.py")) for rank in range(2)]


@pytest.mark.timeout(120)
def test_a_module_is_found_in_the_working_folder_as_with_python_m(project: Path) -> None:
    (project / "training.py").write_text(SCRIPT)
    (project / "beside.py").write_text("")
    done = torchrelay(project, "run", "-m", "training")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"FOUND 0 (\S+)", done.stdout) == [str(project)]


@pytest.mark.timeout(120)
def test_a_layout_is_foreseen_in_such_a_folder(project: Path) -> None:
    (project / "beside.py").write_text("")
    (project / "train.py").write_text(
        "import beside\nimport torch, torchrelay\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "torchrelay.protect(model=model, optimizer=optimizer)\n"
    )
    done = torchrelay(project, "doctor", "--layout", "train.py")
    assert "node-0" in done.stdout, done.stderr
    assert "was imported" not in done.stderr
