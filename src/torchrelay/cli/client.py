"""Client: asks an orchestrator. Standard library only, so that a verb answers at once.

    client = Client.of(Path("torchrelay-runs/train"))
    client.status()["phase"]

Scripts use the methods that return plain values; the command line those that return structs (`job`, `view_...`).
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from torchrelay.orchestrator.endpoint import TOKEN, read_endpoint
from torchrelay.orchestrator.views import Incidents, IncidentView, JobStatus, Ranks, Status
from torchrelay.protocol.events import JobSpec
from torchrelay.wire.trust import read_token

TIMEOUT_S = 5.0
T = TypeVar("T")


class Away(ConnectionError):
    """No orchestrator answers there."""


class Denied(ValueError):
    """The orchestrator answered, and said no. The message is its own."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Client:
    """One orchestrator's API. Every method raises `Away` or `Denied`."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    @classmethod
    def of(cls, run_dir: Path) -> Client:
        """The client for a run's folder. Raises `Away` if no orchestrator was ever there, ValueError if damaged."""
        endpoint = read_endpoint(run_dir)
        if endpoint is None:
            raise Away(f"no orchestrator has been started in {run_dir}")
        return cls(endpoint.url, read_token(run_dir / TOKEN))

    # ------------------------------------------------------------ as plain values

    def status(self, job: str | None = None) -> dict[str, Any]:
        """A job's status (`JobStatus`); the only or newest job if none is named."""
        found: dict[str, Any] = msgspec.to_builtins(self.job(job))
        return found

    def ranks(self, job: str | None = None) -> dict[str, Any]:
        """A job's roster (`Ranks`)."""
        found: dict[str, Any] = msgspec.to_builtins(self.view_ranks(job))
        return found

    def incidents(self, job: str | None = None) -> list[dict[str, Any]]:
        """A job's incidents (`IncidentView`), oldest first."""
        found: list[dict[str, Any]] = msgspec.to_builtins(self.view_incidents(job).incidents)
        return found

    def submit(self, spec: JobSpec) -> None:
        """Submit a job; the same one again changes nothing."""
        self._ask("POST", "/v1/jobs", msgspec.json.encode(spec))

    def cancel(self, job: str, reason: str) -> None:
        """End a job, with exit code 130."""
        self._ask("POST", f"/v1/jobs/{quote(job)}/cancel", json.dumps({"reason": reason}).encode())

    def shutdown(self, reason: str) -> None:
        """End all workers, agents, and the orchestrator."""
        self._ask("POST", "/v1/shutdown", json.dumps({"reason": reason}).encode())

    # ------------------------------------------------------------ as structs

    def view_status(self) -> Status:
        return self.fetch("/v1/status", Status)

    def job(self, job: str | None = None) -> JobStatus:
        """One job's status. Raises `Denied` if there is none."""
        jobs = self.view_status().jobs
        for found in jobs if job is not None else jobs[-1:]:
            if job in (None, found.job):
                return found
        raise Denied(404, "no job has been submitted" if job is None else f"no job named {job!r}")

    def view_ranks(self, job: str | None = None) -> Ranks:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/ranks", Ranks)

    def view_incidents(self, job: str | None = None) -> Incidents:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/incidents", Incidents)

    def view_incident(self, name: str, job: str | None = None) -> IncidentView:
        of = f"?job={quote(job)}" if job is not None else ""
        return self.fetch(f"/v1/incidents/{quote(name)}{of}", IncidentView)

    def fetch(self, path: str, kind: type[T]) -> T:
        """GET and decode."""
        try:
            return msgspec.json.decode(self._ask("GET", path), type=kind)
        except msgspec.DecodeError as error:
            raise Denied(500, f"{self.url}{path} answered something else: {error}; is it of this version?") from error

    def _name(self, job: str | None) -> str:
        return job if job is not None else self.job().job

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        where = urlsplit(self.url)
        if where.hostname is None:
            raise Away(f"{self.url!r} is no URL")
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Away(f"no orchestrator answers at {self.url} ({error})") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise Denied(response.status, reason_in(data))
        return data


def reason_in(data: bytes) -> str:
    """The reason in an error's body."""
    try:
        told = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")[:300]
    return str(told["error"]) if isinstance(told, dict) and "error" in told else str(told)
