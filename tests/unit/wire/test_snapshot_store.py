"""The snapshot store: snapshots in files that outlive who has written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.wire.files.snapshot_store import Kept, NoRoom, Sizes, SnapshotStore, snapshot_store_in


def snapshot(step: int, rank: int = 1, restarts: int = 0) -> Snapshot:
    return Snapshot(Rank(rank), Point(step), restarts)


def put(snapshot_store: SnapshotStore, what: Snapshot, keep: Point | None = None, body: bytes = b"tensors") -> None:
    with snapshot_store.begin(what, Sizes(3, 4, len(body)), keep) as draft:
        draft.write(b"rnghead" + body)
        draft.finish()


def read(kept: Kept) -> tuple[bytes, bytes]:
    """Head and body."""
    _, head, body = kept.places
    return os.pread(kept.file, body - head, head), os.pread(kept.file, kept.sizes.body, body)


@pytest.fixture
def snapshot_store(tmp_path: Path) -> SnapshotStore:
    return snapshot_store_in(tmp_path)


def test_what_is_put_there_is_found_as_it_was(snapshot_store: SnapshotStore) -> None:
    assert snapshot_store.kept() == ()
    put(snapshot_store, snapshot(3))
    kept = snapshot_store.open(snapshot(3))
    assert kept is not None
    assert (kept.private, *read(kept)) == (b"rng", b"head", b"tensors")
    assert kept.digest == xxhash.xxh3_128_digest(b"headtensors")
    kept.close()


def test_one_that_is_not_finished_is_not_there(snapshot_store: SnapshotStore) -> None:
    draft = snapshot_store.begin(snapshot(3), Sizes(1, 1, 1), None)
    assert snapshot_store.kept() == ()
    draft.drop()
    assert snapshot_store.open(snapshot(3)) is None


def test_the_one_that_all_have_stays_and_an_older_one_gives_its_memory(snapshot_store: SnapshotStore) -> None:
    for step in (3, 4):
        put(snapshot_store, snapshot(step), Point(3))
    put(snapshot_store, snapshot(5), Point(4))
    assert snapshot_store.kept() == (snapshot(4), snapshot(5))


def test_who_does_not_know_which_one_all_have_keeps_them_all(snapshot_store: SnapshotStore) -> None:
    for step in (3, 4, 5):
        put(snapshot_store, snapshot(step), None)
    assert snapshot_store.kept() == (snapshot(3), snapshot(4), snapshot(5))


def test_other_ranks_are_left_alone(snapshot_store: SnapshotStore) -> None:
    put(snapshot_store, snapshot(3, rank=2))
    put(snapshot_store, snapshot(4), Point(3))
    assert snapshot_store.kept() == (snapshot(4), snapshot(3, rank=2))


def test_another_start_of_the_job_is_of_no_use(snapshot_store: SnapshotStore) -> None:
    put(snapshot_store, snapshot(9))
    put(snapshot_store, snapshot(2, restarts=1), Point(9))
    assert snapshot_store.kept() == (snapshot(2, restarts=1),)


def test_what_is_older_is_cleared_away_for_all_ranks(snapshot_store: SnapshotStore) -> None:
    for rank in (0, 1):
        put(snapshot_store, snapshot(3, rank))
        put(snapshot_store, snapshot(7, rank), None)
    snapshot_store.clear_before(Point(7), 0)
    assert snapshot_store.kept() == (snapshot(7, 0), snapshot(7, 1))


def test_memory_that_is_used_again_fits_what_is_larger_and_smaller(
    snapshot_store: SnapshotStore, tmp_path: Path
) -> None:
    put(snapshot_store, snapshot(3), None, b"x" * 10_000)
    put(snapshot_store, snapshot(4), Point(2), b"y" * 20_000)
    put(snapshot_store, snapshot(5), Point(3), b"z")
    assert snapshot_store.kept() == (snapshot(5),)
    kept = snapshot_store.open(snapshot(5))
    assert kept is not None
    assert read(kept)[1] == b"z"
    assert len(list((tmp_path / "snapshots").iterdir())) == 1


def test_one_that_is_read_stays_readable_when_it_is_cleared_away(snapshot_store: SnapshotStore) -> None:
    put(snapshot_store, snapshot(3))
    kept = snapshot_store.open(snapshot(3))
    assert kept is not None
    snapshot_store.clear_before(Point(9), 0)
    assert read(kept)[1] == b"tensors"


def test_no_room_is_found_out_before_a_byte_is_written(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="no room for 14 bytes in"):
        put(snapshot_store, snapshot(3))
    assert snapshot_store.kept() == ()


def test_a_part_of_the_memory_is_left_to_others(snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(snapshot_store, snapshot(3), None, b"x" * 50_000)
    known = os.statvfs("/dev/shm")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*known[:1], 4096, 100, 12, 12, *known[5:])))
    put(snapshot_store, snapshot(4), Point(2), b"y" * 50_000)  # in the memory of the one before
    with pytest.raises(NoRoom, match="would leave less than 10% of that memory to others"):
        put(snapshot_store, snapshot(5), None, b"z" * 50_000)


def test_what_dead_processes_have_begun_is_swept_away(snapshot_store: SnapshotStore, tmp_path: Path) -> None:
    put(snapshot_store, snapshot(3))
    begun = snapshot_store.begin(snapshot(4), Sizes(1, 1, 1), None)
    dead = tmp_path / "snapshots" / ".part-1-99999999-0"
    dead.write_bytes(b"half")
    put(snapshot_store, snapshot(5), None)
    assert not dead.exists()
    begun.write(b"abc")
    begun.finish()  # two at a time are no hindrance to each other
    assert snapshot_store.kept() == (snapshot(3), snapshot(4), snapshot(5))


def test_strange_files_are_no_snapshots(snapshot_store: SnapshotStore, tmp_path: Path) -> None:
    put(snapshot_store, snapshot(3))
    (tmp_path / "snapshots" / "notes.txt").write_text("mine")
    (tmp_path / "snapshots" / "0.1.8.0").write_bytes(b"\0" * 5_000)
    assert snapshot(3) in (snapshot_store.kept() or ())
    assert snapshot_store.open(snapshot(8)) is None


def test_what_is_left_in_the_middle_is_dropped(snapshot_store: SnapshotStore, tmp_path: Path) -> None:
    with snapshot_store.begin(snapshot(3), Sizes(1, 1, 1), None) as draft:
        draft.write(b"ab")
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_memory_that_is_there_is_not_reserved_again(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(snapshot_store, snapshot(3), None, b"x" * 50_000)
    put(snapshot_store, snapshot(4), None, b"y" * 50_000)
    reserved: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, __, size: reserved.append(size))
    put(snapshot_store, snapshot(5), Point(4), b"z" * 50_000)
    assert reserved == []
    put(snapshot_store, snapshot(6), Point(5), b"w" * 60_000)
    assert reserved == [4096 + 7 + 60_000]


def test_the_private_record_has_a_digest_of_its_own(snapshot_store: SnapshotStore, tmp_path: Path) -> None:
    put(snapshot_store, snapshot(3))
    path = tmp_path / "snapshots" / "0.1.3.0"
    data = bytearray(path.read_bytes())
    data[4097] ^= 1
    path.write_bytes(data)
    assert snapshot_store.open(snapshot(3)) is None


def test_how_it_is_cut_does_not_matter(snapshot_store: SnapshotStore) -> None:
    body = bytes(range(256)) * 10_000
    put(snapshot_store, snapshot(3), None, body)
    with snapshot_store.begin(snapshot(4), Sizes(3, 4, len(body)), None) as draft:
        whole = b"rnghead" + body
        for start in range(0, len(whole), 100_001):
            draft.write(whole[start : start + 100_001])
        draft.finish()
    one, other = snapshot_store.open(snapshot(3)), snapshot_store.open(snapshot(4))
    assert one is not None
    assert other is not None
    assert (one.digest, one.private, read(one)) == (other.digest, other.private, read(other))
