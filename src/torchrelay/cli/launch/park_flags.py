"""Park flags: where a job may be written down, and from where it goes on; checked before anything starts."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec.structs import replace

from torchrelay.client.runs import NotPossible
from torchrelay.launcher.parking import ParkPlace
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.wire.files.kept import digest_of
from torchrelay.wire.parked.folder import InUse, clear_parkings, lock, make_folder, new_key, user_of
from torchrelay.wire.parked.manifest import (
    MANIFEST,
    MOST_NAMED,
    Manifest,
    NoParking,
    lacking,
    read_gone,
    read_manifest,
)

BAD_ARGUMENTS = 2
CANNOT_START = 94
MOST_ONCE = 512 << 10  # bytes of results of once() that fit into what is submitted


def add_parking(group: argparse._ArgumentGroup) -> None:
    """Of a job that may have to leave all its nodes."""
    group.add_argument(
        "--park-dir",
        type=Path,
        metavar="DIR",
        help="where the job may write itself down, to go on later: by `torchrelay park`, and at a SIGTERM",
    )
    group.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from the parking in DIR, with the same script and arguments"
    )
    group.add_argument(
        "--resume-again",
        action="store_true",
        help="with --resume, although another run has gone on from there: its steps since are made again",
    )


def parking_of(given: argparse.Namespace, spec: JobSpec, source: bytes | None, *, apart: bool) -> ParkPlace | None:
    """Where this run may park, and what it goes on from; both folders are its own from now on. Raises `NotPossible`.

    `source`: of the script; None: it is a module. `apart`: nodes have folders of their own.
    """
    if given.resume_again and given.resume is None:
        raise NotPossible("--resume-again means nothing without --resume", BAD_ARGUMENTS)
    if given.park_dir is None and given.resume is None:
        return None
    resume: Path | None = None if given.resume is None else given.resume.absolute()
    folder: Path = (given.park_dir or given.resume).absolute()
    if resume is not None and not resume.is_dir():
        raise NotPossible(f"--resume {given.resume}: there is no such folder", BAD_ARGUMENTS)
    key = new_key()
    for place in dict.fromkeys((folder, resume)):
        if place is not None:
            take(place, key)
    manifest = None if resume is None else going_on_from(given, spec, source, resume, apart=apart)
    check_free(folder, None if folder != resume else manifest)
    return ParkPlace(folder, key, resume, manifest)


def take(folder: Path, key: str) -> None:
    """Nobody else may use it while this process lives. Raises `NotPossible`."""
    try:
        make_folder(folder)
        lock(folder, user_of(key))
    except InUse as error:
        raise NotPossible(f"{folder} is in use by another run ({error}): wait for its end", CANNOT_START) from error
    except OSError as error:
        raise NotPossible(f"{folder}: {error.strerror or error}", CANNOT_START) from error


def check_free(folder: Path, ours: Manifest | None) -> None:
    """Nothing of another job may lie where this one parks. What was begun there and is not whole is removed."""
    keep = frozenset({ours.name} if ours is not None else ())
    if ours is None and (folder / MANIFEST).exists():
        try:
            other = read_manifest(folder)
            what = f"a parking of {other.job} after {other.point} ({other.at})"
        except NoParking as error:
            what = f"what may be a parking ({error})"
        raise NotPossible(
            f"--park-dir {folder} holds {what}: go on from it with --resume, or give another folder", CANNOT_START
        )
    clear_parkings(folder, keep)


def going_on_from(
    given: argparse.Namespace, spec: JobSpec, source: bytes | None, folder: Path, *, apart: bool
) -> Manifest:
    """The parking, if this run is to be the same job. Raises `NotPossible`."""
    try:
        manifest = read_manifest(folder)
    except NoParking as error:
        raise NotPossible(f"--resume {folder}: {error}", CANNOT_START) from error
    for wrong in (
        other_job(given, spec, source, manifest),
        other_software(manifest),
        gone_on(given, folder, manifest),
        not_whole(folder, manifest, apart=apart),
    ):
        if wrong:
            raise NotPossible(f"--resume {folder}: {wrong}", CANNOT_START)
    return manifest


def other_job(given: argparse.Namespace, spec: JobSpec, source: bytes | None, manifest: Manifest) -> str:
    """What is not as it was in what is to be run; empty if all is."""
    if (spec.world_size, spec.nproc_per_node) != (manifest.world_size, manifest.nproc_per_node):
        return (
            f"it is of {manifest.world_size} ranks, {manifest.nproc_per_node} a node, and this run has "
            f"{spec.world_size}, {spec.nproc_per_node} a node: give --nodes and --nproc-per-node as then"
        )
    script = given.script if given.module else os.path.abspath(given.script)
    if (script, given.module) != (manifest.script, manifest.module):
        return f"it is of {manifest.script}, and this run is of {script}: run that one, from the same place"
    if tuple(given.args) != manifest.args:
        return f"the script had other arguments then: {' '.join(manifest.args) or 'none'}. Give the same"
    if os.getcwd() != manifest.cwd:
        return f"it was started in {manifest.cwd}: start it there, as paths may be relative to it"
    if source is not None and digest_of(source) != manifest.code:
        return f"{script} is not what it was then (digest {digest_of(source)[:12]}, then {manifest.code[:12]})"
    return ""


def other_software(manifest: Manifest) -> str:
    """Bits may differ between versions; so does what torchrelay keeps."""
    for name, then in (("torch", manifest.torch), ("torchrelay", manifest.torchrelay)):
        try:
            now = version(name)
        except PackageNotFoundError:
            now = ""
        if now and then and now != then:
            return f"it was written with {name} {then}, and here is {name} {now}: go on with {then}"
    return ""


def gone_on(given: argparse.Namespace, folder: Path, manifest: Manifest) -> str:
    """Which run has gone on from there already; empty if none has, or if that is not to matter."""
    gone = read_gone(folder, manifest)
    if gone is None or given.resume_again:
        return ""
    return (
        f"the run in {gone.run} has gone on from there, or was about to ({gone.at}, {gone.who}). If it has ended, and "
        "what it has done since is to be done again, add --resume-again"
    )


def not_whole(folder: Path, manifest: Manifest, *, apart: bool) -> str:
    """What of it is missing or damaged. `apart`: what is not here may be with the nodes, which look for it."""
    missing, damaged = lacking(folder, manifest)
    if damaged:
        return f"damaged: {listed(damaged)}"
    if missing and not apart:
        return f"files are missing in {folder / manifest.name}: {listed(missing)}. Bring them there from their nodes"
    if sum(len(value) for _, some in manifest.once for _, value in some) > MOST_ONCE:
        return f"the results of once() are larger than {MOST_ONCE:,} bytes: it can be told of no more"
    return ""


def listed(some: list[str]) -> str:
    more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
    return f"{', '.join(some[:MOST_NAMED])}{more}"


def with_parking(spec: JobSpec, place: ParkPlace | None, grace_s: float) -> JobSpec:
    """What the orchestrator is told of it."""
    if place is None:
        return spec
    manifest, resume = place.manifest, place.resume
    resumes = None if manifest is None or resume is None else manifest.resumed(resume)
    return replace(
        spec, park_dir=str(place.folder), park_key=place.key, grace_ms=round(1000 * grace_s), resumes=resumes
    )
