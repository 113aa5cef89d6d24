"""Code that is edited while it trains: replacements run the code of the start, whenever and however they come to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases.running import CASES, FLAGS, Case, Fate, Ran, Verdict, disturbed, migrate, run_calm

pytestmark = pytest.mark.timeout(300)

COLD = ("--nproc-per-node", "2", "--spares", "0")
ANEW = (*COLD, "--max-restarts", "1")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A plain run."""
    ran = run_calm(tmp_path_factory.mktemp("calm"), "edited", flags=COLD)
    assert ran.code == 0, ran.output[-3000:]
    return ran


def project_in(folder: Path) -> Path:
    """A copy that may be edited."""
    project = folder / "project"
    shutil.copytree(CASES / "edited", project, ignore=shutil.ignore_patterns("__pycache__"))
    return project


def edit(path: Path) -> None:
    """Another factor; size and time stamp stay, so that cached bytecode would be taken for that of the new source."""
    then = path.stat()
    path.write_text(path.read_text().replace("FACTOR = 1.0", "FACTOR = 3.0"))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_size == then.st_size
    assert "3.0" in path.read_text()


def spare_is_warm(case: Case) -> bool:
    """Whether a spare has imported what a worker imports before it has a rank."""
    return '"warm"' in case.order("spares", "-o", "json")


def editing(*files: Path, warm: bool = False, then: Callable[[Case], None] | None = None) -> Callable[[Case], None]:
    """Edit these when some steps are made, and a spare is warm if there is to be one."""

    def drive(case: Case) -> None:
        case.until_step(20)
        if warm:
            case.until("a warm spare", lambda: spare_is_warm(case))
        for path in files:
            edit(path)
        if then is not None:
            then(case)
        case.go()

    return drive


def edited(
    tmp_path: Path,
    calm: Ran,
    *names: str,
    flags: tuple[str, ...] = COLD,
    mode: str = "",
    script: list[str] | None = None,
    then: Callable[[Case], None] | None = None,
    strike: str = "grad:30:1",
    warm: bool = False,
) -> Verdict:
    project = project_in(tmp_path)
    files = [project / name for name in names]
    words = script or [str(project / "train.py")]
    env = {"PYTHONPATH": f"{project}{os.pathsep}{CASES}"} if "-m" in words else None
    if warm:  # training waits for the spare
        env = (env or {}) | {"SLOW": "21"}
    drive = editing(*files, warm=warm, then=then)
    return disturbed(tmp_path, words, strike=strike, drive=drive, mode=mode, flags=flags, calm=calm, env=env)


def test_a_cold_replacement_runs_the_code_of_the_start(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "train.py", "factors.py", "parts/late.py")
    assert verdict.fate is Fate.EQUAL, verdict
    for name in ("train.py", "factors.py", "parts/late.py"):
        assert f"{name} is not what it was" in verdict.ran.output, verdict


def test_a_warm_spare_that_has_imported_one_half_runs_the_other_half_of_the_start(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "factors.py", "parts/late.py", flags=FLAGS, warm=True)
    assert verdict.fate is Fate.EQUAL, verdict
    assert "late.py is not what it was" in verdict.ran.output, verdict
    assert "factors.py is not what it was" not in verdict.ran.output, verdict


def test_a_module_that_is_started_by_its_name(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "train.py", "factors.py", script=["-m", "train"])
    assert verdict.fate is Fate.EQUAL, verdict


def test_workers_of_loaders_that_are_spawned(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "train.py", "pairs.py", mode="spawn")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_target_of_a_move(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "parts/late.py", flags=FLAGS, then=migrate(1), strike="")
    assert verdict.fate is Fate.EQUAL, verdict


def test_all_ranks_that_start_again(tmp_path: Path, calm: Ran) -> None:
    verdict = edited(tmp_path, calm, "train.py", "factors.py", flags=ANEW, strike="grad:30:0,grad:30:1")
    assert verdict.fate is Fate.FELL_BACK, verdict


def test_a_link_that_leads_to_another_version(tmp_path: Path, calm: Ran) -> None:
    project_in(tmp_path)
    (tmp_path / "next").symlink_to(shutil.copytree(tmp_path / "project", tmp_path / "version-2"))
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "project")
    for name in ("train.py", "factors.py"):
        edit(tmp_path / "version-2" / name)

    def deploy(case: Case) -> None:
        case.until_step(20)
        (tmp_path / "next").rename(current)

    verdict = disturbed(tmp_path, [str(current / "train.py")], strike="grad:30:1", drive=deploy, flags=COLD, calm=calm)
    assert (current / "train.py").read_text() != (tmp_path / "project" / "train.py").read_text()
    assert verdict.fate is Fate.EQUAL, verdict


def test_code_that_could_not_be_kept_is_refused(tmp_path: Path, calm: Ran) -> None:
    def lose(case: Case) -> None:
        shutil.rmtree(case.run_dir / "code")

    project = project_in(tmp_path)
    verdict = disturbed(
        tmp_path,
        [str(project / "train.py")],
        strike="grad:30:1",
        flags=COLD,
        calm=calm,
        drive=editing(project / "factors.py", then=lose),
    )
    assert verdict.fate is Fate.REFUSED, verdict
    assert "factors.py: the rank's last holder ran other code" in verdict.ran.output, verdict
