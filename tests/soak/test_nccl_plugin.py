"""The net plugin, as NCCL and RCCL see it: a harness in C plays their part through the plugin's own symbols.

The scenarios are in native/netpath/tests/nccl_*.c: what is sent, checked byte by byte, and how things begin and end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NETPATH = Path(__file__).parents[2] / "native" / "netpath"
VERSIONS = (8, 9, 10, 11, 12)
COMPILER = shutil.which(os.environ.get("CC", "cc"))
STRICT = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")
AS_SHIPPED = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,nodelete", "-Wl,-z,now")
SANITIZERS = {
    "addresses": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "threads": ("-O1", "-fsanitize=thread"),
}

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the network part needs Linux (epoll, netlink)"),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (cc, or what CC names)"),
]


def compiled(folder: Path, *flags: str) -> tuple[Path, Path]:
    """The harness and the library, made with these flags; the first warning is an error."""
    harness, library = folder / "nccl_harness", folder / "libnccl-net-torchrelay.so"
    plugin = [*NETPATH.glob("core/*.c"), *NETPATH.glob("nccl/*.c")]
    for options, sources, result in (
        (AS_SHIPPED, plugin, library),
        ((), NETPATH.glob("tests/nccl_*.c"), harness),
    ):
        command = [str(COMPILER), *STRICT, *flags, *options, *map(str, sorted(sources)), "-ldl", "-o", str(result)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert made.returncode == 0, made.stderr
    return harness, library


@pytest.fixture(scope="module")
def as_shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return compiled(tmp_path_factory.mktemp("plugin"), "-O2")


def play(harness: Path, library: Path, version: int, *scenarios: str, **more: str) -> subprocess.CompletedProcess[str]:
    settings = {name: text for name, text in os.environ.items() if not name.startswith(("TORCHRELAY_", "NCCL_"))}
    settings |= {"TORCHRELAY_NET_PATHS": "127.0.1.1,127.0.2.1", **more}
    command = [str(harness), str(library), str(version), *scenarios]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280, check=False)


def exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines()}


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_nccl_does_with_a_plugin(as_shipped: tuple[Path, Path], version: int) -> None:
    played = play(*as_shipped, version, "all")
    assert played.returncode == 0, played.stderr
    assert played.stdout.count("ok ") > 30, played.stdout


def test_the_harness_notices_wrong_bytes_and_says_where(as_shipped: tuple[Path, Path]) -> None:
    played = play(*as_shipped, 12, "wrong_byte")
    assert played.returncode == 1
    assert "FAILED v12 wrong_byte (right, " in played.stderr
    assert "wrong at 77776" in played.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_only_what_is_meant_for_others_can_be_seen(as_shipped: tuple[Path, Path]) -> None:
    names = exported(as_shipped[1])
    assert {name for name in names if not name.startswith("np_")} == {f"ncclNetPlugin_v{v}" for v in VERSIONS}
    assert "np_start" in names


@pytest.mark.parametrize("kind", SANITIZERS)
def test_a_sanitizer_finds_nothing(tmp_path: Path, kind: str) -> None:
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    made = [str(COMPILER), *SANITIZERS[kind], str(trial), "-o", str(tmp_path / "trial")]
    for command in (made, [str(tmp_path / "trial")]):
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"the compiler's sanitizer of {kind} does not work here: {tried.stderr.strip()[-200:]}")
    harness, library = compiled(tmp_path, *SANITIZERS[kind])
    played = play(harness, library, 12, "all", TSAN_OPTIONS="die_after_fork=0", HARNESS_SECONDS="90")
    assert played.returncode == 0, played.stderr
    assert "Sanitizer" not in played.stderr, played.stderr
