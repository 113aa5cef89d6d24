"""Keys: each role may do what is its own, and the certificate must say the same as the token."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from torchrelay.orchestrator.core.agents import Sameness, refuse
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.channel import AGENT_PATH, LAUNCH_PATH, Attach, Facts
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role, read_pass

LOOK, CHANGE = ("GET", "/v1/status"), ("POST", "/v1/drain")
ATTACH, LAUNCH = ("GET", AGENT_PATH), ("GET", LAUNCH_PATH)
LINES, HEAD = ("GET", "/v1/lines"), ("GET", "/v1/head")


class Transport:
    """An end of a connection over TLS, or without."""

    def __init__(self, role: Role | None, *, tls: bool = True) -> None:
        names = () if role is None else (("DNS", role.server_name),)
        self._told: dict[str, Any] = {"ssl_object": object() if tls else None, "peercert": {"subjectAltName": names}}

    def get_extra_info(self, name: str) -> Any:
        return self._told.get(name)


def asked(call: tuple[str, str], token: str, role: Role | None, *, tls: bool = True) -> web.Request:
    header = {"Authorization": f"Bearer {token}"}
    return make_mocked_request(*call, headers=header, transport=Transport(role, tls=tls))


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.AGENT, {ATTACH, LAUNCH}),
        (Role.OPERATOR, {LOOK, LINES, HEAD, CHANGE}),
        (Role.VIEWER, {LOOK, LINES, HEAD}),
        (Role.ORCHESTRATOR, ()),
    ],
)
def test_each_role_may_do_what_is_its_own(tmp_path: Path, role: Role, may: Collection[tuple[str, str]]) -> None:
    passes = make_passes(tmp_path, "train")
    keys, token = Keys.of_passes(tmp_path), read_pass(passes[role]).token
    for call in (LOOK, LINES, HEAD, CHANGE, ATTACH, LAUNCH):
        request = asked(call, token, role)
        assert (keys.refusal(request, keys.held(request)) is None) == (call in may), call


@pytest.mark.parametrize("shown", [Role.VIEWER, Role.AGENT, Role.ORCHESTRATOR, None])
def test_the_token_of_another_role_than_the_certificates_opens_nothing(tmp_path: Path, shown: Role | None) -> None:
    passes = make_passes(tmp_path, "train")
    keys, token = Keys.of_passes(tmp_path), read_pass(passes[Role.OPERATOR]).token
    assert keys.held(asked(CHANGE, token, shown)) == frozenset()
    assert keys.held(asked(CHANGE, token, Role.OPERATOR))


def test_through_the_unix_socket_the_token_is_enough(tmp_path: Path) -> None:
    passes = make_passes(tmp_path, "train")
    keys, token = Keys.of_passes(tmp_path), read_pass(passes[Role.OPERATOR]).token
    assert Role.OPERATOR in keys.held(asked(CHANGE, token, None, tls=False))
    assert keys.held(asked(CHANGE, "trt_" + "x" * 43, None, tls=False)) == frozenset()


def test_on_one_machine_one_token_opens_everything() -> None:
    keys = Keys.of_one("trt_secret")
    for call in (LOOK, CHANGE, ATTACH, LAUNCH):
        request = asked(call, "trt_secret", None, tls=False)
        assert keys.refusal(request, keys.held(request)) is None


def test_the_same_refusal_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    passes = make_passes(tmp_path, "train")
    keys = Keys.of_passes(tmp_path)
    for number in range(500):
        request = asked(("POST", f"/v1/drain/{number}"), read_pass(passes[Role.VIEWER]).token, Role.VIEWER)
        refused = keys.refusal(request, keys.held(request))
        assert refused is not None
        keys.complain(request, refused[1])
    assert len(caplog.records) == 1


class TestSameness:
    def test_another_torch_is_refused_and_the_first_machine_is_what_counts(self) -> None:
        same, a, b = Sameness(), NodeId("a"), NodeId("b")
        assert same.compare(a, Facts(torch="2.13.0", python="3.11.7")) == ""
        assert same.compare(b, Facts(torch="2.12.0", python="3.11.7")) == (
            "torch is 2.12.0 on b and 2.13.0 on a: install the same on all machines"
        )
        assert same.compare(a, Facts(torch="2.12.0")) == "", "it is the first one still, started again"

    def test_what_may_differ_is_a_remark_until_it_does_not(self) -> None:
        same, a, b = Sameness(), NodeId("a"), NodeId("b")
        same.compare(a, Facts(torch="2.13.0", script="1"))
        assert same.compare(b, Facts(torch="2.13.0", script="2")) == ""
        assert list(same.remarks) == ["script is 2 on b and 1 on a"]
        assert same.compare(b, Facts(torch="2.13.0", script="1")) == ""
        assert not same.remarks

    def test_what_is_not_known_does_not_differ(self) -> None:
        same = Sameness()
        same.compare(NodeId("a"), Facts(torch="2.13.0", driver="570.1"))
        assert same.compare(NodeId("b"), Facts(torch="", driver="")) == ""
        assert same.compare(NodeId("c"), None) == ""
        assert not same.remarks

    def test_what_many_machines_say_of_themselves_fills_no_screen(self) -> None:
        same = Sameness()
        same.compare(NodeId("first"), Facts(python="3.11.0"))
        for number in range(100):
            same.compare(NodeId(f"m{number}"), Facts(python="3.12\x1b[2J"))
        assert len(same.remarks) == 17
        assert same.remarks[-1].startswith("further machines differ")
        assert "\x1b" not in "".join(same.remarks)


@pytest.mark.parametrize("node", ["../../etc/x", "", "a b", "a\n", "-x", "x" * 101, "\x1b[2J"])
def test_a_node_whose_name_leads_out_of_a_folder_is_refused(node: str) -> None:
    assert "is no name for a node" in refuse(Attach(node=NodeId(node), incarnation="1", slots=1))
