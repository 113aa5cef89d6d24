"""What tests of netpath protocol share."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import netpath_mutants

TESTS = netpath_mutants.NATIVE / "tests"
CORE = netpath_mutants.NATIVE / "core"
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-g")
SANITIZED = (*STRICT, "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FAST = (*STRICT, "-O2")
LIMIT_S = 250
# What the ends have to keep to beside calling the protocol (see world.h), and a seed that shows what it is good for.
RULES_AND_SEEDS = {
    "RULE_BREAK_UNWANTED": 661,
    "RULE_MEMORY_SUM": 4639,
    "RULE_BYE_AGAIN": 178,
    "RULE_NEW_EPOCH": 335,
    "RULE_NO_OLDER": 368,
    "RULE_ALIVE": 50,
    "RULE_REFUSED": 7333,
    "RULE_SUM_ALL": 9,
    "RULE_WOKEN": 50,
}
RULE = re.compile(r"^ +(RULE_[A-Z_]+) = (\d+),", re.MULTILINE)

Built = Callable[[str, tuple[str, ...]], Path]


def can_link(flags: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler makes programs with these flags."""
    source = folder / "nothing.c"
    source.write_text("int main(void) { return 0; }\n")
    return (
        subprocess.run(["cc", *flags, "-o", str(folder / "nothing"), str(source)], capture_output=True).returncode == 0
    )


def sources_of(program: str) -> list[str]:
    """What a test program is made of: the protocol alone, the whole core, or one file that takes in what it tests."""
    if program == "links":
        return [str(TESTS / "link_stories.c")]
    if program == "listener":
        return ["-pthread", str(TESTS / "fuzz_listener.c"), *sorted(map(str, CORE.glob("*.c")))]
    return [*(str(TESTS / name) for name in netpath_mutants.PROGRAMS[program]), *map(str, netpath_mutants.PROTOCOL)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Compiles a test program once for each set of flags."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc): the network protocol is not tested")
    folder = tmp_path_factory.mktemp("netpath")
    made: dict[tuple[str, tuple[str, ...]], Path] = {}

    def build(program: str, flags: tuple[str, ...]) -> Path:
        if flags == SANITIZED and not can_link(flags, folder):
            pytest.skip("cc has no sanitizers (install libasan and libubsan): nothing would be shown")
        if (program, flags) not in made:
            path = folder / f"{program}-{len(made)}"
            subprocess.run(["cc", *flags, "-o", str(path), *sources_of(program)], check=True)
            made[program, flags] = path
        return made[program, flags]

    return build


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it; what it says is its proof, or the story of what went wrong."""
    return subprocess.run([str(program), *words], capture_output=True, text=True, timeout=LIMIT_S)


def holds(program: Path, *words: str) -> str:
    """Run it, and expect that nothing is wrong. Returns what it says."""
    done = run(program, *words)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def rules() -> dict[str, str]:
    """The rules that a world can leave out, and their numbers."""
    return dict(RULE.findall((TESTS / "world.h").read_text()))
