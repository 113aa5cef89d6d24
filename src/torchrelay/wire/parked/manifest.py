"""Manifest: what a parking consists of, and what must be the same for a run that goes on from it.

It is JSON, and a digest over it. Nothing in a parking is unpickled: the files hold tensors, and what msgspec decodes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from torchrelay.protocol.messages.enclosed import Resumed, Snapshot
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.wire.files.owned import Foreign, read_owned
from torchrelay.wire.files.snapshot_store import Kept, name_of
from torchrelay.wire.parked.folder import IN_USE, NAME, write_whole

MANIFEST, RESUMED = "parked.json", "resumed.json"
VERSION = 1
MOST = 1 << 30  # bytes that are read of a manifest
MOST_NAMED = 4  # files that a message names


class NoParking(Exception):
    """There is nothing to go on from, or not all of it: what is missing or damaged."""


class ParkedFile(Struct, frozen=True, kw_only=True):
    """A rank's file, and digests of what is in it."""

    rank: Rank
    node: NodeId  # on which it was written
    size: int  # bytes of private record, head and body
    private: str
    digest: str
    shard: str = ""


class Manifest(Struct, frozen=True, kw_only=True):
    """A whole parking."""

    version: int = VERSION
    job: str
    name: str  # of its folder
    at: str  # when it was written, in UTC
    reason: str
    point: Point
    world_size: int
    nproc_per_node: int
    restarts: int
    every: int = 0
    buddies: int = 1
    torch: str = ""
    torchrelay: str = ""
    script: str = ""
    module: bool = False
    args: tuple[str, ...] = ()
    cwd: str = ""
    code: str = ""  # digest of the script
    files: tuple[ParkedFile, ...] = ()
    once: tuple[tuple[Rank, tuple[tuple[str, bytes], ...]], ...] = ()

    def what(self, rank: Rank) -> Snapshot:
        """The snapshot that this rank's file is."""
        return Snapshot(rank, self.point, self.restarts)

    def resumed(self, folder: Path) -> Resumed:
        """What the core is told of it. `folder`: that of all parkings."""
        return Resumed(
            folder=str(folder / self.name),
            point=self.point,
            restarts=self.restarts,
            every=self.every,
            buddies=self.buddies,
            once=self.once,
        )


class Whole(Struct, frozen=True):
    """The file: the manifest as it was written, and its digest."""

    digest: str
    manifest: msgspec.Raw


class Gone(Struct, frozen=True, kw_only=True):
    """Which run has gone on from a parking, or was about to."""

    name: str
    run: str  # its folder
    who: str  # on which machine, as which process
    at: str


def encode(manifest: Manifest) -> bytes:
    """The file's bytes."""
    raw = msgspec.json.encode(manifest)
    return msgspec.json.encode(Whole(xxhash.xxh3_128_hexdigest(raw), msgspec.Raw(raw)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """From now on this is the parking in the folder. Raises OSError; then it may still be the former one, or none."""
    write_whole(folder / MANIFEST, encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """The parking in this folder. Raises `NoParking`."""
    path = folder / MANIFEST
    try:
        text = read_owned(path, MOST).text
    except FileNotFoundError:
        raise NoParking(why_none(folder)) from None
    except Foreign as error:
        raise NoParking(f"{path} is not trusted: {error}") from error
    except OSError as error:
        raise NoParking(f"{path} cannot be read: {error.strerror}") from error
    try:
        whole = msgspec.json.decode(text.encode(), type=Whole)
        if xxhash.xxh3_128_hexdigest(bytes(whole.manifest)) != whole.digest:
            raise NoParking(f"{path} is damaged: its digest differs")
        found = msgspec.json.decode(bytes(whole.manifest), type=Manifest)
    except msgspec.DecodeError as error:
        raise NoParking(f"{path} is damaged, or of another version of torchrelay: {error}") from error
    if found.version != VERSION or not NAME.fullmatch(found.name):
        raise NoParking(f"{path} is of another version of torchrelay ({found.version}): go on with that one")
    return found


def why_none(folder: Path) -> str:
    """Why there is no manifest."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    begun = [path.name for path in folder.iterdir() if NAME.fullmatch(path.name)]
    if begun:
        return f"{folder} holds a parking that was begun and is not whole ({', '.join(sorted(begun)[:MOST_NAMED])})"
    return f"{folder} holds no parking"


def lacking(folder: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Files that are not there, and files that are damaged, in words; of the latter also what is in their heads."""
    missing, damaged = [], []
    for file in manifest.files:
        path = folder / manifest.name / name_of(manifest.what(file.rank))
        try:
            kept = Kept(path)
        except FileNotFoundError:
            missing.append(f"rank {file.rank} (written on {file.node})")
            continue
        except (OSError, ValueError) as error:
            damaged.append(f"rank {file.rank}: {error}")
            continue
        told = (file.size, file.private, file.digest)
        if (kept.sizes.whole, xxhash.xxh3_128_hexdigest(kept.private), kept.digest.hex()) != told:
            damaged.append(f"rank {file.rank}: {path} is another file than was written")
        kept.close()
    return missing, damaged


def read_gone(folder: Path, manifest: Manifest) -> Gone | None:
    """Which run has gone on from this parking; None if none has."""
    try:
        found = msgspec.json.decode(read_owned(folder / RESUMED, MOST).text.encode(), type=Gone)
    except FileNotFoundError:
        return None
    except (OSError, Foreign, msgspec.DecodeError) as error:
        return Gone(name=manifest.name, run=f"somewhere ({folder / RESUMED} cannot be read: {error})", who="", at="")
    return found if found.name == manifest.name else None


def write_gone(folder: Path, gone: Gone) -> None:
    """Raises OSError."""
    write_whole(folder / RESUMED, msgspec.json.encode(gone))


__all__ = [
    "IN_USE",
    "Gone",
    "Manifest",
    "NoParking",
    "ParkedFile",
    "lacking",
    "read_gone",
    "read_manifest",
    "write_gone",
    "write_manifest",
]
