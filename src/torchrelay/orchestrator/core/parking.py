"""Parking: when all ranks are written down the orchestrator writes the manifest, and with that the job is parked.

It writes into the park folder of its own machine, with a write of the whole file under another name, so that it is
there or not. If it ends in between, the next one writes the same again. What could not be written is removed, before it
is said that there is none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchrelay.orchestrator.core.clock import wall_clock_ms
from torchrelay.orchestrator.core.heirs import safe
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.protocol.messages.events import Event, ParkingSealed, SealFailed
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.wire.files.launch import read_launch
from torchrelay.wire.parked.folder import InUse, clear_older, lock, make_folder, parts_of, sync_folder, user_of
from torchrelay.wire.parked.manifest import (
    MANIFEST,
    Manifest,
    NoParking,
    ParkedFile,
    read_manifest,
    write_manifest,
)

log = logging.getLogger("torchrelay.orchestrator")

TRIES, AGAIN_S, ANSWER_S = 5, 2.0, 30.0
CLAIM_S = 5.0  # between two tries to lock a folder
MAY_BE_THERE = "Look into {} before you go on from there: the job trains on"


def manifest_of(job: Job, run_dir: Path, wall_ms: int) -> Manifest:
    """What is written of a job whose ranks are all written down. Raises ValueError if it cannot be known."""
    spec, launch = job.spec, read_launch(run_dir)
    assert job.boundary is not None, "all stand after it"
    files, torch, code = [], set(), set()
    for rank, seat in sorted(job.seats.items()):
        parked = seat.parked
        assert parked is not None, "every rank is written down"
        files.append(
            ParkedFile(
                rank=rank,
                node=parked.node,
                size=parked.size,
                private=parked.private,
                digest=parked.digest,
                shard=seat.shard,
            )
        )
        torch.add(parked.torch)
        code.add(parked.code)
    if len(torch) > 1:
        raise ValueError(f"ranks have several versions of torch: {', '.join(sorted(torch))}")
    if len(code) > 1:
        raise ValueError(f"ranks run several scripts (digests {', '.join(sorted(code))})")
    return Manifest(
        job=spec.job,
        name=job.parking.name,
        at=datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="seconds"),
        reason=job.parking.reason,
        point=job.boundary,
        world_size=spec.world_size,
        nproc_per_node=spec.nproc_per_node,
        restarts=job.attempts.restarts,
        every=job.rollback.every,
        buddies=job.rollback.buddies,
        torch=torch.pop(),
        torchrelay=own_version(),
        script=launch.script if launch.module else os.path.abspath(os.path.join(launch.cwd, launch.script)),
        module=launch.module,
        args=launch.args,
        cwd=launch.cwd,
        code=code.pop(),
        files=tuple(files),
        once=tuple(sorted(job.once.items())),
    )


def own_version() -> str:
    try:
        return version("torchrelay")
    except PackageNotFoundError:
        return ""


def seal(job: Job, run_dir: Path, wall_ms: int) -> str:
    """Write the manifest; the former parking is of no use from then on. Returns why there is none; empty if there is.

    What cannot be undone is as if it was done. Raises `Unclear` if nobody can tell whether it is there.
    """
    folder = Path(job.spec.park_dir)
    try:
        make_folder(folder)
        manifest = manifest_of(job, run_dir, wall_ms)
        if other := in_the_way(folder, job):
            return other
        write_manifest(folder, manifest)
    except (OSError, ValueError) as error:
        why = f"the manifest in {folder} could not be written: {error}"
        if is_there(folder, job.parking.name, why) and not taken_back(folder):
            return ""
        return why
    clear_older(folder, job.parking.name, job.parking.name)
    return ""


def in_the_way(folder: Path, job: Job) -> str:
    """Why our manifest must not take the place of the one that is there; empty if it may.

    Who writes may be late, for a disk that did not answer: by then there may be a newer one, or another run's.
    """
    try:
        found = read_manifest(folder).name
    except NoParking:
        return ""  # none, or none that anybody could go on from
    former = None if job.spec.resumes is None else Path(job.spec.resumes.folder).name
    (key, number), (others_key, others) = parts_of(job.parking.name), parts_of(found)
    ours = found == former or (others_key == key and others <= number)
    return "" if ours else f"another parking is in {folder} ({found})"


class Unclear(Exception):
    """Whether the manifest is there cannot be told: another orchestrator may have written it."""


def is_there(folder: Path, name: str, why: str) -> bool:
    """Whether the manifest is that of this parking. Raises `Unclear`."""
    try:
        (folder / MANIFEST).read_bytes()
        return read_manifest(folder).name == name
    except FileNotFoundError:
        return False
    except NoParking:
        return False  # it is damaged, or of another version: no parking of ours
    except OSError as error:
        raise Unclear(f"{why}; nor can be told whether it is there ({error.strerror})") from error


def taken_back(folder: Path) -> bool:
    """Remove the manifest; False if it is there still."""
    with suppress(OSError):
        (folder / MANIFEST).unlink()
        sync_folder(folder)
        return True
    return False


class Claims:
    """The folders of jobs whose launcher is lost: with it ended the lock that kept other runs away."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self.refused: dict[JobId, str] = {}  # why a job must not be parked

    async def keep(self, service: Orchestrator) -> None:
        """Lock what can be locked, again and again. Never returns."""
        while True:
            for name, job in service.cluster.jobs.items():
                if job.spec.park_dir and job.phase is not JobPhase.ENDED:
                    self.refused[name] = await asyncio.to_thread(self.claim, Path(job.spec.park_dir), job.spec.park_key)
            await asyncio.sleep(CLAIM_S)

    def claim(self, folder: Path, key: str) -> str:
        """Lock a folder. Returns why it must not be used; empty if it may. Our own launcher may have it still."""
        if folder in self._held:
            return ""
        try:
            make_folder(folder)
            self._held[folder] = lock(folder, user_of(key))
        except InUse as error:
            return "" if key in str(error) else f"another run uses {folder} ({error})"
        except OSError as error:
            return f"{folder}: {error.strerror or error}"
        return ""


async def watch_parking(service: Orchestrator, run_dir: Path, claims: Claims | None = None) -> None:
    """Seal what is to be sealed, as long as the service serves. What is decided is said until it is heard."""
    done: dict[JobId, Event] = {}
    while True:
        news = service.news
        for name, job in service.cluster.jobs.items():
            if job.phase is not JobPhase.SEALING or service.degraded or service.superseded:
                continue
            known = done.get(name)
            if known is None or getattr(known, "name", "") != job.parking.name:
                # Whoever may take our place is to know: no job trains on while a manifest says that all have ended.
                if not await safe(service):
                    return
                if service.superseded or service.cluster.jobs.get(name) is not job:
                    break  # look anew
                refused = "" if claims is None else claims.refused.get(name, "")
                write = partial(str, refused) if refused else partial(seal, job, run_dir, wall_clock_ms())
                known = done[name] = await sealed(job, write)
            service.take(known, note)
        else:
            await news.wait()


async def sealed(job: Job, write: Callable[[], str]) -> Event:
    """What has become of it. All stand still meanwhile: a disk that does not answer is not waited for without end."""
    for turn in range(TRIES):
        try:
            async with asyncio.timeout(ANSWER_S):
                why = await asyncio.to_thread(write)
            break
        except (Unclear, TimeoutError) as error:
            why = f"{error or 'the disk does not answer'}. {MAY_BE_THERE.format(job.spec.park_dir)}"
            log.warning("%s: %s", job.spec.job, why)
            await asyncio.sleep(AGAIN_S if turn + 1 < TRIES else 0)
    if why:
        log.error("%s could not be parked: %s", job.spec.job, why)
        return SealFailed(job=job.spec.job, name=job.parking.name, reason=why)
    log.info("%s is parked: %s in %s", job.spec.job, job.parking.name, job.spec.park_dir)
    return ParkingSealed(job=job.spec.job, name=job.parking.name)


def note(told: int | Exception) -> None:
    if isinstance(told, Exception):
        log.warning("what became of a parking could not be noted: %s", told)
