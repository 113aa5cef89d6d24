"""Parkings on a disk: whole or not there, nobody else's, and said what is missing or damaged."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from torchrelay.protocol.messages.enclosed import Snapshot
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.wire.files.snapshot_store import HEADER, NoRoom, Sizes, SnapshotStore, name_of
from torchrelay.wire.parked import folder as folders
from torchrelay.wire.parked.folder import (
    InUse,
    NotOurs,
    bytes_per_s,
    clear_older,
    clear_parkings,
    lock,
    make_folder,
    new_key,
)
from torchrelay.wire.parked.manifest import (
    MANIFEST,
    RESUMED,
    Gone,
    Manifest,
    NoParking,
    ParkedFile,
    lacking,
    read_gone,
    read_manifest,
    write_gone,
    write_manifest,
)

NAME = "parked-0123456789abcdef-2"
POINT = Point(7, 1)
PRIVATE, HEAD, BODY = b"private", b"head", b"body" * 1000


def write(parked: Path, rank: int) -> ParkedFile:
    """A rank's file."""
    (parked / NAME).mkdir(mode=0o700, exist_ok=True)
    what, sizes = Snapshot(Rank(rank), POINT, 1), Sizes(len(PRIVATE), len(HEAD), len(BODY))
    with SnapshotStore(parked / NAME, durable=True).begin(what, sizes, None) as draft:
        for part in (PRIVATE, HEAD, BODY):
            draft.write(part)
        draft.finish()
        digest = draft.digest().hex()
    private = xxhash.xxh3_128_hexdigest(PRIVATE)
    return ParkedFile(rank=Rank(rank), node=NodeId(f"n{rank}"), size=sizes.whole, private=private, digest=digest)


def manifest(*files: ParkedFile) -> Manifest:
    return Manifest(
        job="job",
        name=NAME,
        at="now",
        reason="asked",
        point=POINT,
        world_size=2,
        nproc_per_node=1,
        restarts=1,
        files=files,
        once=((Rank(1), (("id", b"\x00\xff"),)),),
    )


@pytest.fixture
def parked(tmp_path: Path) -> Path:
    """A folder with a whole parking of two ranks."""
    made = tmp_path / "parked"
    make_folder(made)
    write_manifest(made, manifest(write(made, 0), write(made, 1)))
    return made


def path_of(parked: Path, rank: int) -> Path:
    return parked / NAME / name_of(Snapshot(Rank(rank), POINT, 1))


def test_what_is_written_is_read_and_whole(parked: Path) -> None:
    found = read_manifest(parked)
    assert found == manifest(*found.files)
    assert lacking(parked, found) == ([], [])
    resumed = found.resumed(parked)
    assert (resumed.folder, resumed.point, resumed.restarts) == (str(parked / NAME), POINT, 1)
    assert resumed.once == ((1, (("id", b"\x00\xff"),)),)


def test_all_is_for_its_owner_alone(parked: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [parked, *parked.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_what_is_parked_is_handed_out_and_told_of_apart(parked: Path, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "memory", parked=parked / NAME)
    assert store.kept() == ()
    kept = store.open(Snapshot(Rank(1), POINT, 1))
    assert kept is not None
    assert kept.private == PRIVATE
    kept.close()
    assert store.open(Snapshot(Rank(1), POINT, 0)) is None


# ---------------------------------------------------------------- what is not whole


def test_files_that_are_missing_are_named_with_their_nodes(parked: Path) -> None:
    path_of(parked, 1).unlink()
    assert lacking(parked, read_manifest(parked)) == (["rank 1 (written on n1)"], [])


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(at: int) -> Callable[[Path], None]:
    def deed(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return deed


@pytest.mark.parametrize("deed", [cut, flip(0), flip(30), flip(HEADER)], ids=["cut", "magic", "head", "private"])
def test_files_that_are_damaged_are_named(parked: Path, deed: Callable[[Path], None]) -> None:
    deed(path_of(parked, 0))
    missing, damaged = lacking(parked, read_manifest(parked))
    assert missing == []
    assert len(damaged) == 1
    assert damaged[0].startswith("rank 0: ")


def test_a_file_of_another_parking_is_not_taken_for_this_one(parked: Path) -> None:
    found = read_manifest(parked)
    other = msgspec.structs.replace(found.files[0], digest="0" * 32)
    _, damaged = lacking(parked, msgspec.structs.replace(found, files=(other,)))
    assert "is another file than was written" in damaged[0]


def test_a_manifest_that_is_damaged_is_none(parked: Path) -> None:
    path = parked / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"reason":"asked"', b'"reason":"other"'))
    with pytest.raises(NoParking, match="its digest differs"):
        read_manifest(parked)
    path.write_bytes(b"{")
    with pytest.raises(NoParking, match="damaged, or of another version"):
        read_manifest(parked)


def test_a_manifest_that_is_a_link_is_not_trusted(parked: Path, tmp_path: Path) -> None:
    (parked / MANIFEST).rename(tmp_path / "elsewhere")
    (parked / MANIFEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoParking, match="it is a link"):
        read_manifest(parked)


def test_a_parking_that_was_begun_only_is_said_to_be_so(parked: Path, tmp_path: Path) -> None:
    (parked / MANIFEST).unlink()
    with pytest.raises(NoParking, match=f"begun and is not whole .{NAME}"):
        read_manifest(parked)
    empty = tmp_path / "empty"
    with pytest.raises(NoParking, match="there is no folder"):
        read_manifest(empty)
    make_folder(empty)
    with pytest.raises(NoParking, match="holds no parking"):
        read_manifest(empty)


def test_a_name_that_leads_elsewhere_is_refused(parked: Path) -> None:
    write_manifest(parked, msgspec.structs.replace(manifest(), name="../other"))
    with pytest.raises(NoParking, match="another version"):
        read_manifest(parked)


def test_a_disk_that_is_full_is_told_before_and_leaves_nothing(parked: Path) -> None:
    store = SnapshotStore(parked / NAME, durable=True)
    before = sorted((parked / NAME).iterdir())
    with pytest.raises(NoRoom, match="has no room for"):
        store.begin(Snapshot(Rank(0), Point(9), 1), Sizes(0, 0, 1 << 60), None)
    assert sorted((parked / NAME).iterdir()) == before


def test_a_draft_that_is_not_finished_leaves_nothing(parked: Path) -> None:
    store = SnapshotStore(parked / NAME, durable=True)
    before = sorted((parked / NAME).iterdir())
    with store.begin(Snapshot(Rank(0), Point(9), 1), Sizes(0, 0, 10), None) as draft:
        draft.write(b"12345")
    assert sorted((parked / NAME).iterdir()) == before


# ---------------------------------------------------------------- the folder


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_one = tmp_path / "open"
    open_one.mkdir(mode=0o755)
    with pytest.raises(NotOurs, match="chmod 700"):
        make_folder(open_one)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotOurs, match="is no folder"):
        make_folder(file)


def test_one_run_at_a_time_uses_it(parked: Path) -> None:
    held = lock(parked, "process 5 on here")
    with pytest.raises(InUse, match="process 5 on here"):
        lock(parked, "another")
    os.close(held)
    os.close(lock(parked, "another"))


def test_only_our_own_parkings_are_removed(parked: Path) -> None:
    other = f"parked-{new_key()}-3"
    (parked / other).mkdir()
    (parked / "results").mkdir()
    (parked / "parked-x-1").symlink_to(parked / NAME)
    clear_parkings(parked, frozenset({NAME}))
    left = {path.name for path in parked.iterdir()}
    assert left == {NAME, MANIFEST, "results", "parked-x-1"}


def stand(parked: Path, name: str, at: int) -> None:
    (parked / name).mkdir()
    os.utime(parked / name, (at, at))


def test_one_that_is_late_removes_nothing_that_is_newer(tmp_path: Path) -> None:
    """A rank that was cut off, or an orchestrator that was stopped, while its run parked without it; or another run."""
    mine, other, former = "0123456789abcdef", "a" * 16, f"parked-{'b' * 16}-9"
    stand(tmp_path, former, 100)
    stand(tmp_path, f"parked-{other}-1", 50)  # of before the one that the run goes on from
    stand(tmp_path, f"parked-{other}-7", 150)
    for number in (4, 5, 10, 11):
        stand(tmp_path, f"parked-{mine}-{number}", 200)
    clear_older(tmp_path, f"parked-{mine}-10", former)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {former, f"parked-{other}-7", f"parked-{mine}-10", f"parked-{mine}-11"}
    clear_older(tmp_path, f"parked-{mine}-4", f"parked-{mine}-4")  # late by far: it is not even there itself
    assert {path.name for path in tmp_path.iterdir()} == left
    clear_older(tmp_path, f"parked-{mine}-11", f"parked-{mine}-11")  # the manifest names it: all before is over
    assert {path.name for path in tmp_path.iterdir()} == {f"parked-{mine}-11"}
    clear_older(tmp_path / "nowhere", f"parked-{mine}-11", "")


def test_who_has_gone_on_is_kept_by_parking(parked: Path) -> None:
    found = read_manifest(parked)
    assert read_gone(parked, found) is None
    gone = Gone(name=NAME, run="/run", who="me", at="now")
    write_gone(parked, gone)
    assert read_gone(parked, found) == gone
    assert read_gone(parked, msgspec.structs.replace(found, name="parked-0123456789abcdef-3")) is None
    (parked / RESUMED).write_text("{")
    told = read_gone(parked, found)
    assert told is not None
    assert "cannot be read" in told.run


def test_how_fast_it_is_is_measured_and_leaves_nothing(parked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PROBE", 1 << 20)
    before = sorted(parked.iterdir())
    assert bytes_per_s(parked, 1 << 30) > 0
    assert sorted(parked.iterdir()) == before
