"""Client: asks an orchestrator, by the standard library alone, so that a verb answers at once.

    client = Client.of(Path("torchrelay-runs/train"))
    client.status()["phase"]

Scripts use the methods that return plain values; the command line those that return structs (`job`, `view_...`).
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from torchrelay.api.endpoint import TOKEN, read_endpoint
from torchrelay.api.shown import (
    Audit,
    Change,
    Incidents,
    IncidentView,
    JobStatus,
    Moves,
    NetworkView,
    Nodes,
    Ranks,
    Spares,
    Status,
    WhyView,
)
from torchrelay.wire.trust.tokens import read_token

if TYPE_CHECKING:
    from torchrelay.protocol.messages.events import JobSpec

TIMEOUT_S = 5.0
OPERATOR = Path("passes") / "operator.pem"  # in the folder of a run over several machines
WHO = "X-Torchrelay-Who"
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

    def __init__(self, url: str, token: str, inside: str = "", held: Path | None = None) -> None:
        self.url = url
        self._token = token
        self._inside = inside  # a unix socket that leads to the same
        self._pass = held  # what is shown at an https URL

    @classmethod
    def of(cls, run_dir: Path) -> Client:
        """The client for a run's folder. Raises `Away` if no orchestrator was ever there, ValueError if damaged."""
        endpoint = read_endpoint(run_dir)
        if endpoint is None:
            raise Away(f"no orchestrator has been started in {run_dir}")
        if endpoint.url.startswith("https:"):
            return cls.at(endpoint.url, run_dir / OPERATOR, endpoint.socket)
        return cls(endpoint.url, read_token(run_dir / TOKEN), endpoint.socket)

    @classmethod
    def at(cls, url: str, held: Path, inside: str = "") -> Client:
        """The client for an orchestrator on another machine, with a copy of one of the run's passes.

        Raises `TrustError`.
        """
        from torchrelay.wire.trust.passes import read_pass  # imports ssl

        return cls(url.rstrip("/"), read_pass(held).token, inside, held)

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
        self._ask("POST", f"/v1/jobs/{quote(job)}/cancel", msgspec.json.encode({"reason": reason}))

    def signal(self, job: str, name: str, reason: str, grace_ms: int | None) -> None:
        """Pass a signal on to a job's ranks; with a grace time they are to end."""
        body = {"signal": name, "reason": reason, "grace_ms": grace_ms}
        self._ask("POST", f"/v1/jobs/{quote(job)}/signal", msgspec.json.encode(body))

    def park(self, job: str, name: str, reason: str, grace_ms: int) -> None:
        """Let a job park; what does not fit into the time ends by this signal."""
        body = {"signal": name, "reason": reason, "grace_ms": grace_ms}
        self._ask("POST", f"/v1/jobs/{quote(job)}/park", msgspec.json.encode(body))

    def note(self, call: str, what: str) -> None:
        """Write into the audit what was done without the orchestrator."""
        self._ask("POST", "/v1/audit", msgspec.json.encode({"call": call, "what": what}))

    def shutdown(self, reason: str, grace_s: float | None = None) -> None:
        """End all workers, agents, and the orchestrator. `grace_s`: of workers, between SIGTERM and SIGKILL."""
        body = {"reason": reason} if grace_s is None else {"reason": reason, "grace_s": grace_s}
        self._ask("POST", "/v1/shutdown", msgspec.json.encode(body))

    def change(self, path: str, body: dict[str, Any], *, dry_run: bool) -> Change:
        """Something that changes the cluster, or with `dry_run` the plan of it."""
        data = self._ask("POST", f"{path}?dry_run=1" if dry_run else path, msgspec.json.encode(body))
        return decoded(data, Change, f"{self.url}{path}")

    # ------------------------------------------------------------ as structs

    def view_status(self) -> Status:
        return self.fetch("/v1/status", Status)

    def job(self, job: str | None = None) -> JobStatus:
        """One job's status. Raises `Denied` if there is none."""
        return job_in(self.view_status(), job)

    def view_ranks(self, job: str | None = None) -> Ranks:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/ranks", Ranks)

    def view_nodes(self) -> Nodes:
        return self.fetch("/v1/nodes", Nodes)

    def view_spares(self, job: str | None = None) -> Spares:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/spares", Spares)

    def view_moves(self, job: str | None = None) -> Moves:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/moves", Moves)

    def view_why(self, about: str, job: str | None = None) -> WhyView:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/why?about={quote(about, safe='')}", WhyView)

    def view_network(self) -> NetworkView:
        return self.fetch("/v1/network", NetworkView)

    def view_audit(self) -> Audit:
        return self.fetch("/v1/audit", Audit)

    def view_incidents(self, job: str | None = None) -> Incidents:
        return self.fetch(f"/v1/jobs/{quote(self._name(job))}/incidents", Incidents)

    def view_incident(self, name: str, job: str | None = None) -> IncidentView:
        of = f"?job={quote(job)}" if job is not None else ""
        return self.fetch(f"/v1/incidents/{quote(name)}{of}", IncidentView)

    def fetch(self, path: str, kind: type[T]) -> T:
        """GET and decode."""
        return decoded(self._ask("GET", path), kind, f"{self.url}{path}")

    def name_of(self, job: str | None) -> str:
        """The name of a job: the one given, or the newest. Raises `Denied`."""
        return self._name(job)

    def _name(self, job: str | None) -> str:
        return job if job is not None else self.job().job

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        from torchrelay.client.asking import ask  # takes 13 ms, and not all that import a client ask

        headers = {"Authorization": f"Bearer {self._token}", WHO: who_am_i()}
        try:
            status, data = ask(self.url, method, path, headers, body or b"", TIMEOUT_S, self._inside, self._pass)
        except OSError as error:
            raise Away(f"no orchestrator answers at {self.url} ({error})") from error
        if status >= 400:
            raise Denied(status, reason_in(data))
        return data


def decoded(data: bytes, kind: type[T], where: str) -> T:
    """An answer. Raises `Denied` if it is another one than expected."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise Denied(500, f"{where} answered something else: {error}; is it of this version?") from error


def job_in(status: Status, job: str | None) -> JobStatus:
    """One job's status, or the newest's. Raises `Denied` if there is none."""
    for found in status.jobs if job is not None else status.jobs[-1:]:
        if job in (None, found.job):
            return found
    known = ", ".join(one.job for one in status.jobs)
    if job is None:
        raise Denied(503, "no job has been submitted")
    raise Denied(404, f"no job named {job!r}; known: {known or 'none'}")


def who_am_i() -> str:
    """The local user and machine, for the audit."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no name
        user = f"uid-{os.getuid()}"
    return f"{os.environ.get('SUDO_USER') or user}@{os.uname().nodename}"


def reason_in(data: bytes) -> str:
    """The reason in an error's body."""
    try:
        told = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode("utf-8", "replace")[:300]
    return str(told["error"]) if isinstance(told, dict) and "error" in told else str(told)
