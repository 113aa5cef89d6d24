"""Keys: who may call what. A token is for roles, and where there is TLS the certificate must say the same role.

| role | may |
|---|---|
| viewer | look: every GET under /v1, and /metrics |
| operator | that, and every call that changes something |
| agent | attach, and read what is to be run; nothing else |

A run on one machine has one token for all of them: it listens on loopback, and its owner starts all of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from torchrelay.wire.messages.channel import AGENT_PATH, LAUNCH_PATH
from torchrelay.wire.messages.inheritance import HEIR_PATH
from torchrelay.wire.trust.passes import Role, pass_of, read_pass, role_in
from torchrelay.wire.trust.trust import bearer_matches

log = logging.getLogger("torchrelay.orchestrator")

OWNER = frozenset({Role.AGENT, Role.OPERATOR, Role.VIEWER})
MAY: dict[Role | None, frozenset[Role]] = {
    Role.AGENT: frozenset({Role.AGENT}),
    Role.OPERATOR: frozenset({Role.OPERATOR, Role.VIEWER}),
    Role.VIEWER: frozenset({Role.VIEWER}),
}
FOR_AGENTS = (AGENT_PATH, LAUNCH_PATH, HEIR_PATH)
COMPLAIN_S = 60.0  # between two lines in the log about the same
MOST_KINDS = 100  # of refusals that are remembered

WRONG = "wrong or missing token: it is in the file `token` of the run's folder"
WRONG_PASS = "wrong or missing token: use a pass from the folder `passes` of the run"


class Keys:
    """The tokens of one run, and what each of them opens."""

    def __init__(self, tokens: Mapping[str, Role | None], *, certified: bool = False) -> None:
        self._tokens = dict(tokens)
        self._certified = certified
        self._said: dict[str, float] = {}

    @classmethod
    def of_one(cls, token: str) -> Keys:
        """One token that opens everything."""
        return cls({token: None})

    @classmethod
    def of_passes(cls, run_dir: Path) -> Keys:
        """Those in a run's passes. Raises `TrustError`."""
        roles = (Role.AGENT, Role.OPERATOR, Role.VIEWER)
        return cls({read_pass(pass_of(run_dir, role)).token: role for role in roles}, certified=True)

    def held(self, request: web.Request) -> frozenset[Role]:
        """What whoever asks may do; nothing if the token is not ours, or not of the role that the certificate says."""
        header = request.headers.get("Authorization")
        found: frozenset[Role] = frozenset()
        wanted: Role | None = None
        for token, role in self._tokens.items():  # all of them, so that each takes the same time
            if bearer_matches(token, header):
                wanted, found = role, MAY.get(role, OWNER)
        transport = request.transport
        if not self._certified or transport is None or transport.get_extra_info("ssl_object") is None:
            return found  # through the unix socket, which its owner alone can reach
        return found if role_in(transport.get_extra_info("peercert")) is wanted else frozenset()

    def refusal(self, request: web.Request, held: frozenset[Role]) -> tuple[type[web.HTTPException], str] | None:
        """Why this call is not for whoever asks; None if it is."""
        wanted = role_for(request)
        if wanted in held:
            return None
        if not held:
            return web.HTTPUnauthorized, WRONG_PASS if self._certified else WRONG
        has = " and ".join(sorted(held))
        return web.HTTPForbidden, f"{request.method} {request.path} needs the {wanted}'s pass; this one is the {has}'s"

    def complain(self, request: web.Request, why: str) -> None:
        """Once in a while for each peer and reason: a stranger must not fill the log."""
        # Without the call: whoever varies it would be logged as often as it likes.
        kind, now_s = f"{request.remote}: {why.rpartition(' needs ')[2]}", time.monotonic()
        if now_s - self._said.get(kind, -COMPLAIN_S) < COMPLAIN_S:
            return
        self._said.pop(kind, None)
        if len(self._said) >= MOST_KINDS:
            del self._said[next(iter(self._said))]  # the one that was said longest ago
        self._said[kind] = now_s
        log.warning("refused %s", ascii(f"{request.remote}: {why}")[1:-1])


def role_for(request: web.Request) -> Role:
    """Which role may make this call."""
    if request.path in FOR_AGENTS:
        return Role.AGENT
    return Role.VIEWER if request.method in ("GET", "HEAD") else Role.OPERATOR
