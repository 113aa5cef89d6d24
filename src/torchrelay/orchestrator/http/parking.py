"""Parking by hand: POST /v1/jobs/{job}/park {"reason": "...", "grace_ms": 30000, "signal": "SIGTERM"}; `?dry_run=1`.

The job writes itself down at the next boundary and ends with 75. `grace_ms`: how long there is; `signal`: what is
passed on to the ranks, if it does not fit or fails, so that they end as they would have without us.
"""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from torchrelay.api.shown import LONGEST_MS
from torchrelay.orchestrator.http.answers import body_of, job_of, refusal
from torchrelay.orchestrator.http.changes import SIGNALS, because, carried_out
from torchrelay.orchestrator.views.parking import plan_park


class ParkAsk(Struct, frozen=True, kw_only=True):
    """The body of a call that parks."""

    reason: str = ""
    grace_ms: int | None = None
    signal: str = ""


async def post_park(request: web.Request) -> web.Response:
    job = job_of(request)
    ask = await body_of(request, ParkAsk)
    if ask.signal and ask.signal not in SIGNALS:
        raise refusal(web.HTTPBadRequest, f"signal {ask.signal!r} is not passed on; those are: {', '.join(SIGNALS)}")
    if ask.grace_ms is not None and not 0 <= ask.grace_ms <= LONGEST_MS:
        raise refusal(web.HTTPBadRequest, f"grace_ms is {ask.grace_ms}: give 0 to {LONGEST_MS}")
    number = SIGNALS.get(ask.signal, 0)
    what = f"{job.spec.job}{because(ask.reason)}"
    return await carried_out(
        request, lambda service, who: plan_park(service.scene(), job, ask.reason, ask.grace_ms, number, who), what
    )


ROUTES = (web.post("/v1/jobs/{job}/park", post_park),)
