"""The code of a run: whoever loads a file first leaves it for all others."""

from __future__ import annotations

import importlib
import os
import py_compile
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.errors import RefusedError
from torchrelay.wire.files.kept import MAIN, Kept, Load
from torchrelay.worker.source import program
from torchrelay.worker.source.program import SPAWNED, Program


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept.begin(tmp_path)


def test_the_first_that_loads_a_file_leaves_it_for_all(kept: Kept) -> None:
    load = Load("a", "/p/a.py")
    assert kept.keep(load, b"1") == b"1"
    assert kept.keep(load, b"2") == b"1"
    assert Kept(kept.folder).keep(load, b"3") == b"1"
    assert [path.name for path in kept.folder.iterdir()] == [f"{load.key:016x}-a.py"]


def test_a_run_that_begins_has_nothing_of_another(kept: Kept) -> None:
    kept.keep(Load("a", "/p/a.py"), b"1")
    again = Kept.begin(kept.folder.parent)
    assert again.keep(Load("a", "/p/a.py"), b"2") == b"2"


@pytest.mark.parametrize("other", [Load("b", "/p/a.py"), Load("a", "/p/b.py"), Load("a", "/p/a.py", 1)])
def test_other_names_paths_and_times_are_other_loads(kept: Kept, other: Load) -> None:
    kept.keep(Load("a", "/p/a.py"), b"1")
    assert kept.keep(other, b"2") == b"2"


def test_a_file_that_is_loaded_again_has_a_version_for_each_time(kept: Kept) -> None:
    first, second = Program(kept), Program(kept)
    assert [first.source("a", "/p/a.py", text) for text in (b"1", b"2")] == [b"1", b"2"]
    assert [second.source("a", "/p/a.py", text) for text in (b"2", b"3")] == [b"1", b"2"]


def test_what_a_spawned_process_calls_the_script_is_the_script(kept: Kept) -> None:
    kept.keep(Load(MAIN, "/p/train.py"), b"1")
    assert Program(kept).source(SPAWNED, "/p/train.py", b"2") == b"1"


def test_it_is_said_once_that_other_code_runs_than_is_on_the_disk(kept: Kept) -> None:
    told: list[str] = []
    kept.keep(Load("a", "/p/a.py"), b"1")
    kept.keep(Load("a", "/p/a.py", 1), b"1")
    asked = Program(kept, told.append)
    asked.source("a", "/p/a.py", b"2")
    asked.source("a", "/p/a.py", b"2")
    assert told == ["/p/a.py is not what it was when this run first loaded it: what it was then is run"]


def test_code_that_cannot_be_kept_is_run_and_its_digest_refused_where_it_differs(tmp_path: Path) -> None:
    told: list[str] = []
    gone = Kept(tmp_path / "gone")
    first, same, other = Program(gone, told.append), Program(), Program()
    assert first.source("a", "/p/a.py", b"1") == b"1"
    assert len(told) == 1
    assert "could not be kept" in told[0]
    same.source("a", "/p/a.py", b"1")
    same.source("b", "/p/b.py", b"never loaded by the first")
    same.check(first.digests())
    other.source("a", "/p/a.py", b"2")
    with pytest.raises(RefusedError, match=r"^/p/a\.py: the rank's last holder ran other code"):
        other.check(first.digests())


def test_nothing_is_compared_with_a_record_that_has_no_digests() -> None:
    mine = Program()
    mine.source("a", "/p/a.py", b"1")
    mine.check(b"")


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("json.tool", f"{sysconfig.get_path('stdlib')}/json/tool.py"),
        ("torchrelay.face", str(Path(program.__file__).parents[1] / "face.py")),
        ("wandb", "/home/me/.venv/lib/python3.11/site-packages/wandb/__init__.py"),
        ("msgspec.new", "/home/me/msgspec/new.py"),
    ],
)
def test_what_is_installed_is_not_the_users(module: str, path: str) -> None:
    assert not Program().own(module, path)


@pytest.mark.parametrize("module", [MAIN, SPAWNED, "model", "lib.model"])
def test_scripts_and_modules_beside_them_are(module: str) -> None:
    assert Program().own(module, "/home/me/project/model.py")


@pytest.fixture
def installed(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process asks a program for a while. The folder of a module that it can import."""
    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "get_code", _plain)
    monkeypatch.setattr("runpy._get_code_from_file", sys.modules["runpy"]._get_code_from_file)
    monkeypatch.setattr("multiprocessing.spawn.get_preparation_data", _data)
    program.install(Program(kept, lambda _: None))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_module.py").write_text("VALUE = 1\n\n\ndef fail():\n    raise ValueError\n")
    yield tmp_path / "a_module.py"
    sys.modules.pop("a_module", None)


_plain = importlib.machinery.SourceFileLoader.get_code


def _data(name: str) -> dict[str, str]:
    return {"name": name}


def test_python_loads_what_is_kept(installed: Path, kept: Kept) -> None:
    kept.keep(Load("a_module", str(installed)), installed.read_bytes().replace(b"1", b"7"))
    module = importlib.import_module("a_module")
    assert (module.VALUE, module.__file__) == (7, str(installed))


def test_bytecode_that_seems_to_be_of_this_source_is_not_taken(installed: Path) -> None:
    then = installed.stat()
    py_compile.compile(str(installed), doraise=True)
    installed.write_text(installed.read_text().replace("1", "7"))
    os.utime(installed, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert importlib.import_module("a_module").VALUE == 7


def test_a_traceback_shows_the_lines_that_are_run(installed: Path, kept: Kept) -> None:
    kept.keep(Load("a_module", str(installed)), installed.read_bytes())
    installed.write_text("# another file\n" * 9)
    module = importlib.import_module("a_module")
    with pytest.raises(ValueError) as caught:
        module.fail()
    assert "raise ValueError" in "".join(traceback.format_exception(caught.value))


def test_what_cannot_be_read_is_python_s_to_tell(installed: Path) -> None:
    installed.write_text("VALUE = (\n")
    with pytest.raises(SyntaxError, match="never closed"):
        importlib.import_module("a_module")
