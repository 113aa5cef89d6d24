"""Kept: the code that a run is made of, as its first worker that loaded it found it on the disk.

    RUN_DIR/code/9f6b01c2a7d4e835-train.py

The first process of a run that loads a source file leaves it here, and all others run that: replacements that start
after somebody has edited the file, ranks that import a module late, ranks that start again. So a run is one program.
A file that is loaded several times (`importlib.reload`) has a version for each time.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xxhash
from msgspec import Struct

FOLDER = "code"
MAIN = "__main__"


class Load(Struct, frozen=True):
    """One loading of a source file by a process."""

    module: str  # the name under which it is run
    path: str  # absolute, as the process knows it; links are not followed
    time: int = 0  # how often the process had loaded it under this name before

    @property
    def key(self) -> int:
        """64 bits that are the same in all processes of a run."""
        return xxhash.xxh3_64_intdigest(f"{self.path}\0{self.module}\0{self.time}".encode(errors="surrogateescape"))


class Kept:
    """The folder with the code of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def begin(cls, run_dir: Path) -> Kept:
        """For a run that begins: an empty folder. Raises `OSError`."""
        folder = run_dir.absolute() / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return cls(folder)

    def keep(self, load: Load, found: bytes) -> bytes:
        """What the run has of this file; if it has nothing yet, from now on what was found on the disk.

        Raises `OSError` if it can neither be read nor kept.
        """
        place = self.folder / f"{load.key:016x}-{os.path.basename(load.path)[-100:]}"
        kept = _read(place)
        if kept is not None:
            return kept
        draft = self.folder / f".{os.getpid()}-{load.key:016x}"
        try:
            draft.write_bytes(found)
            os.link(draft, place)  # all of it or nothing, and only the first
        except FileExistsError:
            return place.read_bytes()
        finally:
            draft.unlink(missing_ok=True)
        return found


def _read(place: Path) -> bytes | None:
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return None


def digest_of(source: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(source)
