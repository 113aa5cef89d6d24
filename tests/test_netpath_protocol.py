"""The network protocol, in C: its stories, simulated worlds, every state of a small one, and hostile frames."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import netpath_mutants
from tests.netpath_changes import CHANGES, EQUIVALENT

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


def test_stories_hold(built: Built) -> None:
    holds(built("stories", SANITIZED))


def test_what_the_kernel_says_of_links_is_understood(built: Built) -> None:
    holds(built("links", SANITIZED))


@pytest.mark.slow
def test_worlds_hold(built: Built) -> None:
    said = holds(built("world", SANITIZED), "0", "400")
    assert "paths lost by silence 0," not in said
    assert "bits turned 0," not in said


@pytest.mark.slow
def test_a_small_world_holds_in_every_state(built: Built) -> None:
    holds(built("exhaustive", SANITIZED), "1", "1")


@pytest.mark.slow
def test_hostile_frames_touch_nothing(built: Built) -> None:
    holds(built("frames", SANITIZED), "1", "1.5")


def test_a_seed_has_one_story(built: Built) -> None:
    world = built("world", SANITIZED)
    story = holds(world, "--story", "7")
    assert story == holds(world, "--story", "7")
    assert "posts message 0" in story


@pytest.mark.soak
def test_many_worlds_hold(built: Built) -> None:
    said = holds(built("world", FAST), "400", "20000")
    for what in ("chunks sent again 0,", "come twice 0,", "ends that failed 0,", "chunks cut short 0,"):
        assert what not in said


@pytest.mark.soak
def test_a_small_world_holds_with_three_faults_and_steps_out_of_turn(built: Built) -> None:
    exhaustive = built("exhaustive", FAST)
    holds(exhaustive, "3", "0")
    holds(exhaustive, "2", "1")


@pytest.mark.soak
def test_many_hostile_frames_touch_nothing(built: Built) -> None:
    holds(built("frames", SANITIZED), "1000000", "30")


@pytest.mark.slow
@pytest.mark.parametrize("checked", [False, True])
def test_a_listener_under_attack_goes_on_serving(built: Built, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    monkeypatch.setenv("TORCHRELAY_NET_CRC", str(int(checked)))
    said = holds(built("listener", SANITIZED), "1", "6")
    assert "each right" in said


def rules() -> dict[str, str]:
    """The rules that a world can leave out, and their numbers."""
    return dict(RULE.findall((TESTS / "world.h").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES_AND_SEEDS)
def test_a_rule_of_the_engine_is_needed(built: Built, rule: str) -> None:
    world, seed = built("world", FAST), str(RULES_AND_SEEDS[rule])
    holds(world, seed, "1")
    done = run(world, "--without", rules()[rule], seed, "1")
    assert done.returncode == 1, f"without {rule} nothing goes wrong in seed {seed}: find another, world --without"


def test_each_rule_of_the_engine_is_shown_to_be_needed() -> None:
    assert set(RULES_AND_SEEDS) == set(rules())


def test_changes_fit_the_protocol() -> None:
    texts = netpath_mutants.sources()
    for change in CHANGES:
        assert netpath_mutants.mutated(change, texts) != texts
    names = [change.name for change in CHANGES]
    assert len(set(names)) == len(names)
    assert set(EQUIVALENT) <= set(names)


@pytest.mark.slow
def test_some_mutants_die(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc): no mutant can be made")
    netpath_mutants.compile_parts(tmp_path)
    for change in [change for change in CHANGES if change.name not in EQUIVALENT][::40]:
        assert netpath_mutants.meet(change, tmp_path).killer, change.name
