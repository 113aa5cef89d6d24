"""The network part is built with the package, where that is possible; and said to be missing where it was not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.cli.diagnose.consult import State, check_network_part
from torchrelay.cli.main import carry_out
from torchrelay.cli.network import net
from torchrelay.client.runs import NotPossible
from torchrelay.netpath.native import environment, library

ROOT = Path(__file__).parents[2]
LIBRARY = "torchrelay/netpath/libnccl-net-torchrelay.so"
BUILD_S = 240
PLUGINS = {f"ncclNetPlugin_v{version}" for version in range(8, 13)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The package's source, without anything that was built."""
    place = tmp_path / "source"
    place.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, place / name, ignore=left_out)
    return place


def build(source: Path, what: str, **variables: str) -> tuple[Path, str]:
    """A wheel or sdist, as pip's frontends build it; and what was said meanwhile."""
    words = f"from setuptools import build_meta; print(build_meta.build_{what}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", words],
        cwd=source,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = (source / "dist").iterdir()
    return made, done.stdout + done.stderr


def without_compiler(folder: Path) -> str:
    """A PATH on which there is no compiler."""
    folder.mkdir()
    return str(folder)


def test_a_wheel_has_the_library_and_serves_every_python(source: Path, tmp_path: Path) -> None:
    wheel, _ = build(source, "wheel")
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "installed")
    built = library.Library(tmp_path / "installed" / LIBRARY)
    assert re.fullmatch(r"\d+\.\d+\.\d+", built.version())
    assert all(hasattr(built.free, name) for name in PLUGINS)


@pytest.mark.parametrize("which", ["named", "none"])
def test_without_a_compiler_the_package_is_built_without_the_library(source: Path, tmp_path: Path, which: str) -> None:
    if which == "named":
        wheel, said = build(source, "wheel", CC="/nonexistent/cc")
    else:
        wheel, said = build(source, "wheel", PATH=without_compiler(tmp_path / "empty"), CC="")
    assert "the package works without its network part; install a C compiler" in said
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        content.extractall(tmp_path / "installed")
    assert LIBRARY not in names
    assert "torchrelay/netpath/native/library.py" in names
    words = "from torchrelay.cli.diagnose.consult import check_network_part; print(check_network_part())"
    told = subprocess.run(
        [sys.executable, "-c", words],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "not built" in told
    assert "install a C compiler" in told


def test_broken_source_builds_a_package_without_the_library(source: Path) -> None:
    (source / "native/netpath/core/text.c").write_text("this is not C")
    wheel, said = build(source, "wheel")
    assert "exit status" in said
    with zipfile.ZipFile(wheel) as content:
        assert LIBRARY not in content.namelist()


def test_a_source_distribution_can_be_built_from(source: Path, tmp_path: Path) -> None:
    made, _ = build(source, "sdist")
    with tarfile.open(made) as content:
        content.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel, _ = build(unpacked, "wheel")
    with zipfile.ZipFile(wheel) as content:
        assert LIBRARY in content.namelist()


# ---------------------------------------------------------------- what is said of it


@pytest.fixture
def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library would be."""
    monkeypatch.setattr(library, "PATH", tmp_path / "lib.so")
    library.load.cache_clear()
    yield library.PATH
    library.load.cache_clear()


def test_a_library_that_is_missing_or_spoilt_is_told_of_with_the_remedy(missing: Path) -> None:
    with pytest.raises(library.NotBuilt, match=r"is not built: there is no .*; install a C compiler"):
        library.load()
    check = check_network_part()
    assert (check.state, check.found) == (
        State.REMARK,
        f"torchrelay's network part is not built: there is no {missing}",
    )
    with pytest.raises(NotPossible, match="not built"):
        carry_out(["net", "path"])
    missing.write_bytes(b"no library")
    with pytest.raises(library.NotBuilt, match=r"does not load: .*; install a C compiler"):
        library.load()


def test_neither_the_package_nor_the_command_line_needs_torch() -> None:
    words = (
        "import sys, torchrelay, torchrelay.netpath.native.binding, torchrelay.netpath.native.environment; "
        "from torchrelay.cli.main import carry_out; carry_out(['net', 'env', '--ib']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", words], check=True, timeout=60, capture_output=True)


def test_the_plugin_is_switched_on_for_a_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not library.PATH.is_file():
        pytest.skip("the network part is not built")
    carry_out(["net", "env"])
    script = tmp_path / "env"
    script.write_text(capsys.readouterr().out)
    asked = 'eval "$(cat "$0")"; printf "%s\\n%s" "$NCCL_NET" "$NCCL_NET_PLUGIN"'
    told = subprocess.run(["sh", "-c", asked, str(script)], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["torchrelay", str(library.PATH)]
    assert Path(told.splitlines()[1]).is_absolute()


# ---------------------------------------------------------------- NCCL's own failover


@pytest.mark.parametrize(
    ("version", "recovers", "remarks"),
    [((2, 30, 7), True, []), ((2, 29, 7), False, ["stays there"]), (None, True, ["no NCCL is installed"])],
)
def test_ports_that_nccl_fails_over_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...] | None,
    recovers: bool,
    remarks: list[str],
) -> None:
    monkeypatch.setattr(environment, "nccl_version", lambda: version)
    carry_out(["net", "env", "--ib", "--merge", "mlx5_0,mlx5_1;mlx5_2,mlx5_3"])
    told, said = capsys.readouterr()
    assert "export NCCL_IB_RESILIENCY_PORT_FAILOVER=1\n" in told
    assert ("NCCL_IB_RESILIENCY_PORT_RECOVERY=1\n" in told) is recovers
    assert "export NCCL_NET_FORCE_MERGE='mlx5_0,mlx5_1;mlx5_2,mlx5_3'\n" in told
    assert "NCCL_NET_PLUGIN" not in told
    assert len(said.splitlines()) == len(remarks)
    assert all(remark in said for remark in remarks)


@pytest.mark.parametrize(
    ("words", "version", "why"),
    [
        (["--ib"], (2, 27, 5), r"NCCL 2\.27\.5 has no port failover"),
        (["--ib", "--merge", "mlx5_0"], (2, 30, 7), "names no devices that back each other"),
        (["--merge", "mlx5_0,mlx5_1"], None, "--merge is for --ib"),
    ],
)
def test_what_cannot_be_switched_on(
    monkeypatch: pytest.MonkeyPatch, words: list[str], version: tuple[int, ...] | None, why: str
) -> None:
    monkeypatch.setattr(environment, "nccl_version", lambda: version)
    with pytest.raises(NotPossible, match=why):
        net.net(["env", *words])
