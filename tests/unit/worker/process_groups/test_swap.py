"""Which kinds of groups can be reconfigured, and how the extension is compiled, cached and done without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrelay.worker.process_groups import swap
from torchrelay.worker.process_groups.backends import kinds_of


def test_kinds_are_read_from_torchs_configuration() -> None:
    assert kinds_of("cpu:gloo,cuda:nccl") == {"gloo": ("cpu",), "nccl": ("cuda",)}
    assert kinds_of("cpu:gloo,cuda:gloo") == {"gloo": ("cpu", "cuda")}
    with pytest.raises(ValueError, match="'mpi' cannot be reconfigured: use gloo, nccl or torchrelay"):
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
    assert "python -m torchrelay.worker.process_groups.groups build" in reason
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
