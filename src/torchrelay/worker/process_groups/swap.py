"""Two ways to give a live ProcessGroup another backend: a compiled extension, or a fresh backend type.

    extension            takes the old backend out of the group and frees it: threads joined, sockets closed
    fresh backend type   needs no compiler; the old backend stays in the group for the life of the process

The extension is compiled once per torch version, on request, into a cache. It is never compiled at import, and it is
loaded only if it is exactly what was compiled here, for this torch, by this user.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

log = logging.getLogger(__name__)

EXTENSION = "extension"
FRESH_TYPE = "fresh backend type"
SOURCE = Path(__file__).parents[1] / "native" / "swap.cpp"
MODULE = "torchrelay_swap"
BUILD_TIMEOUT_S = 600
LAST_TYPE = 255  # a BackendType is one byte


class Swap(Protocol):
    """How a group gets another backend."""

    name: str

    def take(self, group: ProcessGroup, /) -> Callable[[], object]:
        """Take the group's backends out; the result lets go of them, which may block. At once, in any state."""

    def put(
        self, group: ProcessGroup, devices: Sequence[str], kind: str, backend: Backend, store: Store, /, *, main: bool
    ) -> None:
        """Give the group this backend for these types of device, and its store.

        `main`: the backend also serves what has no device, and names the group.
        """


class ExtensionSwap:
    """By the compiled extension: the old backend is gone afterwards."""

    name = EXTENSION

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def take(self, group: ProcessGroup) -> Callable[[], object]:
        released: Callable[[], object] = self._module.take(group).release
        return released

    def put(
        self, group: ProcessGroup, devices: Sequence[str], kind: str, backend: Backend, store: Store, *, main: bool
    ) -> None:
        _register(group, devices, c10d.Backend.backend_type_map[kind], backend)
        if main:
            group._set_default_backend(c10d.Backend.backend_type_map[kind])
        self._module.set_store(group, store)


class FreshTypeSwap:
    """By a backend type that the group has not seen: no compiler needed, and the old backends stay.

    The first real backend comes under its own type, which goes on to name the group; later ones under numbers that
    mean nothing else. Collectives go by device, to the newest. What cannot be replaced so is the group's C++ store.
    """

    name = FRESH_TYPE

    def __init__(self) -> None:
        self._put: weakref.WeakKeyDictionary[ProcessGroup, list[str]] = weakref.WeakKeyDictionary()

    def take(self, _group: ProcessGroup) -> Callable[[], object]:
        return lambda: None

    def put(
        self, group: ProcessGroup, devices: Sequence[str], kind: str, backend: Backend, _store: Store, *, main: bool
    ) -> None:
        before = self._put.setdefault(group, [])
        if kind not in before:
            _register(group, devices, c10d.Backend.backend_type_map[kind], backend)
            if main:
                group._set_default_backend(c10d.Backend.backend_type_map[kind])
        else:
            number = int(ProcessGroup.BackendType.CUSTOM.value) + len(before)
            if number > LAST_TYPE:
                raise ValueError(
                    f"group {group.group_name} has been reconfigured too often for '{FRESH_TYPE}': "
                    "build the extension (python -m torchrelay.worker.process_groups.groups build)"
                )
            _register(group, devices, ProcessGroup.BackendType(number), backend)
        before.append(kind)


def _register(
    group: ProcessGroup, devices: Sequence[str], backend_type: ProcessGroup.BackendType, backend: Backend
) -> None:
    for device in devices:
        group._register_backend(torch.device(device), backend_type, backend)


# ---------------------------------------------------------------- the extension: build, cache, load


def load() -> tuple[Swap, str]:
    """The best way that is there, and why it is that one. Compiles nothing."""
    module, reason = _load_extension()
    if module is not None:
        return ExtensionSwap(module), reason
    return FreshTypeSwap(), reason


def build_extension() -> Path:
    """Compile the extension into the cache, unless it is there; returns its file. About a quarter of a minute.

    Raises `RuntimeError` with the remedy if there is no compiler, or if it fails.
    """
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"{_key()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it at once: one compiles
        if _refusal(target) is None:
            return target
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            built = Path(scratch) / "swap.so"
            _compile(built)
            built.chmod(0o600)
            _note(target).write_text(json.dumps({"sha256": _sha256(built), "built for": _facts()}))
            built.replace(target)
        log.info("compiled %s in %.1f s", target, time.monotonic() - begin)
    return target


def _compile(target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ (or name one in CXX); without it torchrelay uses fresh types")
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-DTORCHRELAY_MODULE={MODULE}"]
    for include in includes:
        command += ["-isystem", str(include)]
    command += [str(SOURCE), "-o", str(target), "-L", str(root / "lib"), "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{compiler} took longer than {BUILD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        missing = " (install Python's headers, python3-dev)" if "Python.h" in done.stderr else ""
        raise RuntimeError(f"{compiler} failed{missing}:\n{done.stderr[-2000:]}")


def _load_extension() -> tuple[ModuleType | None, str]:
    path = _cache() / f"{_key()}.so"
    reason = _refusal(path)
    if reason is not None:
        return None, reason
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    if spec is None:
        return None, f"{path} is no module"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{path} does not load: {error}"
    return module, f"{path}"


def _refusal(path: Path) -> str | None:
    """Why this file must not be loaded; None if it may be. Loading the wrong code would crash, or worse."""
    try:
        for place in (path.parent, path):
            facts = place.stat()
            if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o022:
                return f"{place} belongs to, or can be written by, somebody else"
        noted = json.loads(_note(path).read_text())
        if noted["sha256"] != _sha256(path):
            return f"{path} is not what was compiled: build it again"
    except FileNotFoundError:
        return f"the extension is not compiled (python -m torchrelay.worker.process_groups.groups build): no {path}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be trusted: {error}"
    return None


def _note(path: Path) -> Path:
    return path.with_suffix(".json")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cache() -> Path:
    own = os.environ.get("TORCHRELAY_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrelay"


def _facts() -> dict[str, str]:
    """All that the compiled file depends on."""
    return {
        "torch": torch.__version__,
        "torch commit": torch.version.git_version,
        "c++ abi": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
        "python": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "source": _sha256(SOURCE),
    }


def _key() -> str:
    facts = _facts()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"swap-torch{facts['torch'].replace('+', '-')}-{facts['python']}-{digest}"
