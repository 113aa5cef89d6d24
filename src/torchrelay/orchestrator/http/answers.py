"""Answers: what all of the API's calls have in common: bodies in, JSON out, errors in words, and who is asking."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.job import Job

SERVICE: web.AppKey[Orchestrator] = web.AppKey("service", Orchestrator)
WHO = "X-Torchrelay-Who"  # user@host; the holder of the token is believed
LONGEST_NAME = 100
T = TypeVar("T")


def answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def refusal(kind: type[web.HTTPException], text: str) -> web.HTTPException:
    """An error in the API's form."""
    return kind(text=msgspec.json.encode({"error": text}).decode(), content_type="application/json")


async def body_of(request: web.Request, kind: type[T]) -> T:
    """The body, decoded strictly; an empty one stands for the defaults."""
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise refusal(web.HTTPBadRequest, f"the body is not a valid {kind.__name__}: {error}") from error


def job_of(request: web.Request) -> Job:
    service = request.app[SERVICE]
    name = request.match_info["job"]
    job = service.cluster.jobs.get(JobId(name))
    if job is None:
        known = ", ".join(sorted(service.cluster.jobs)) or "none"
        raise refusal(web.HTTPNotFound, f"no job named {name!r}; known: {known}")
    return job


def who_of(request: web.Request) -> str:
    """Who is asking, as the client says it; else from where it came."""
    said = "".join(c for c in request.headers.get(WHO, "") if c.isprintable()).strip()[:LONGEST_NAME]
    return said or f"unknown@{request.remote}"
