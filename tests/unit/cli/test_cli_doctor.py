"""`torchrelay doctor`: each finding that is not well ends in what to do, and the exit code says how bad it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_doctor import (
    WELL,
    only,
    without_torch,  # noqa: F401  a fixture
)
from torchrelay.cli.diagnose import consult
from torchrelay.cli.diagnose.consult import (
    Check,
    State,
    all_checks,
    check_disk,
    check_limits,
    check_memory,
    check_ports,
    check_torch,
    examine,
    file_system,
    probe_torch,
)
from torchrelay.terminal.show import Output


def test_whatever_is_not_well_comes_with_what_to_do() -> None:
    for check in all_checks():
        assert check.found
        assert bool(check.remedy) == (check.state is not State.WELL), check


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([State.WELL], 0),
        ([State.WELL, State.REMARK], 1),
        ([State.REMARK, State.ILL, State.WELL], 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst(states: list[State], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check(f"check {place}", state, "found", "do this") for place, state in enumerate(states)]
    assert examine(checks, Output.TABLE) == code
    assert capsys.readouterr().out.count("\n") == len(states) + 1
    assert examine(checks, Output.JSON) == code
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == [str(state) for state in states]


@pytest.mark.parametrize(
    ("changed", "name", "state"),
    [
        ({}, "torch", State.WELL),
        ({"torch": "2.10.1"}, "torch", State.ILL),
        ({"torch": "3.0.0a0+git1"}, "torch", State.WELL),
        ({"gloo": "RuntimeError: no such backend"}, "gloo", State.ILL),
        ({"swap": "FreshTypeSwap"}, "communicator swap", State.REMARK),
        ({"swap": "", "swap_reason": "ImportError: x"}, "communicator swap", State.REMARK),
        ({"gpus": 2, "nccl": True}, "devices", State.WELL),
    ],
)
def test_torch_is_judged_by_what_it_can(changed: dict[str, Any], name: str, state: State) -> None:
    assert only(list(check_torch({**WELL, **changed})), name).state is state


def test_without_torch_nothing_else_is_asked_of_it() -> None:
    (check,) = check_torch({"error": "ModuleNotFoundError: No module named 'torch'"})
    assert check.state is State.ILL
    assert "install torch" in check.remedy


def test_a_torch_that_does_not_load_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consult, "PROBE", "import no_such_module_at_all")
    assert probe_torch()["error"] == "ModuleNotFoundError: No module named 'no_such_module_at_all'"


def test_a_torch_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consult, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(consult, "TORCH_S", 0.1)
    assert "longer than 0.1 s" in probe_torch()["error"]


@pytest.mark.parametrize(("text", "state"), [("32768\t60999\n", State.WELL), ("50000 50010", State.REMARK)])
def test_ports_are_counted(tmp_path: Path, text: str, state: State) -> None:
    (tmp_path / "range").write_text(text)
    assert check_ports(tmp_path / "range").state is state


def test_what_cannot_be_told_is_a_remark(tmp_path: Path) -> None:
    assert check_ports(tmp_path / "absent").state is State.REMARK
    assert check_memory(tmp_path / "absent").state is State.REMARK


def test_little_memory_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_memory(tmp_path).state is State.WELL
    monkeypatch.setattr(consult, "LEAST_MEMORY", 1 << 60)
    assert "--shm-size" in check_memory(tmp_path).remedy
    assert list(tmp_path.iterdir()) == []


def test_few_open_files_are_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consult, "LEAST_FILES", 1 << 60)
    assert "ulimit" in check_limits().remedy


def test_a_journal_cannot_be_kept_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk(tmp_path).state is State.WELL
    monkeypatch.setattr(consult, "file_system", lambda _: "nfs4")
    assert check_disk(tmp_path).state is State.ILL


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consult, "LEAST_DISK", 1 << 60)
    assert check_disk(tmp_path).state is State.ILL


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/")) not in ("", "proc")
