"""Network paths through the orchestrator's port, on the command line, and as figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.api import Port, play
from tests.support.brain import NODE
from torchrelay.api.shown import NetworkView, NodeNetwork, TaintView
from torchrelay.cli.launch import net_flags
from torchrelay.cli.launch.run import parser, plan
from torchrelay.cli.main import carry_out
from torchrelay.cli.network import net
from torchrelay.cli.network.net import add_net_status, network_page, show_net_status
from torchrelay.client.runs import NotPossible
from torchrelay.netpath.native import library
from torchrelay.orchestrator.http import api
from torchrelay.protocol.messages.events import Effect, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import PathLimits, read_launch, write_launch
from torchrelay.wire.messages.channel import Attached, NetworkFrame
from torchrelay.wire.messages.netreport import NetPage, Row, RowState, encode_page
from torchrelay.wire.messages.pathnews import FindingNews, LinkNews, NetworkNews, PathNews

LINK = LinkNews(
    remote="10.0.1.2",
    state="down",
    state_s=41.0,
    reason="carrier",
    live=0,
    round_trip_us=180,
    flaps=3,
    sent_rate=12e6,
    received_rate=11e6,
    sent_bytes=4_000_000_000_000_000_001,
    received_bytes=2,
    sent_again=3,
    duplicates=4,
    corrupt=5,
)
WELL = LinkNews(remote="10.0.0.2", state="up", state_s=9.0)
FINDING = FindingNews(kind="down", where="here", evidence="path eth1 lost for 30 s", for_s=11.0, taint="network/eth1")
NEWS = NetworkNews(
    paths=(
        PathNews(path=0, interface="eth0", local="10.0.0.1", links=(WELL,)),
        PathNews(path=1, interface="eth1", local="10.0.1.1", links=(LINK,), finding=FINDING),
    ),
    processes=2,
    reports=7,
    malformed=1,
    strangers=2,
)
TAINT = TaintView(
    place="node-0",
    node=NODE,
    slot=None,
    key="network/eth1",
    value="down",
    effect="NoExecute",
    reason="lost",
    source="network",
    since="",
    age_s=1.0,
    left_s=None,
    planned=False,
)
VIEW = NetworkView(nodes=(NodeNetwork(node=NODE, alive=True, age_s=1.25, news=NEWS, taints=(TAINT,)),))


# ---------------------------------------------------------------- the port


async def attached(port: Port, news: NetworkNews = NEWS) -> None:
    """An agent attaches and tells; returns when that is heard."""
    async with port.agent() as agent:
        await agent.hear(Attached)
        await agent.say(NetworkFrame(news))
        async with asyncio.timeout(10):
            while NODE not in port.service.networks:
                await asyncio.sleep(0.01)


def test_what_agents_tell_is_shown_with_the_taints_of_their_paths(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        assert await port.get("/v1/network") == {"nodes": []}
        await attached(port)
        await port.service.put(TaintSet(node=NODE, key="network/eth1", value="down", source="network", yields=True))
        await port.service.put(TaintSet(node=NODE, key="ecc", effect=Effect.NO_SCHEDULE, source="ann"))
        view = msgspec.convert(await port.get("/v1/network"), NetworkView)
        (node,) = view.nodes
        assert (node.node, node.alive, node.news) == (NODE, True, NEWS)
        assert 0 <= node.age_s < 10
        assert [(taint.key, taint.value, taint.source) for taint in node.taints] == [
            ("network/eth1", "down", "network")
        ]

    play(tmp_path, story)


def test_an_agent_is_told_which_taints_of_its_paths_lie_on_its_node(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        await attached(port)
        put = port.service.put
        await put(TaintSet(node=NODE, key="network/eth1", value="down", source="network", yields=True))
        await put(TaintSet(node=NODE, slot=1, key="network/eth2", value="down", source="network", yields=True))
        await put(TaintSet(node=NODE, key="network/eth3", source="ann"))
        await put(TaintSet(node=NodeId("node-9"), key="network/eth1", source="network", yields=True))
        async with port.agent() as agent:
            welcome = await agent.hear(Attached)
            assert set(welcome.tainted) == {(None, "network/eth1"), (1, "network/eth2")}

    play(tmp_path, story)


def test_figures_need_the_token_like_all_that_is_read(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        for path in ("/metrics", "/v1/network"):
            async with port.session.get(port.url + path, headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status == 401
        async with port.session.get(port.url + "/metrics") as answer:
            assert (answer.status, await answer.text()) == (200, ""), "there is nothing to tell"
        await attached(port)
        async with port.session.get(port.url + "/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert 'torchrelay_network_link_flaps{node="node-0",path="1"' in await answer.text()

    play(tmp_path, story)


# ---------------------------------------------------------------- figures

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (-?[0-9.e+]+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """All samples by name and labels; fails for a line that is not as the format wants it."""
    found: dict[tuple[str, str], float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, "all samples of a metric stand together"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert list(kinds)[-1] == match[1], "under its own type"
            assert kinds[match[1]] == ("counter" if match[1].endswith("_total") else "gauge")
            assert (match[1], match[2]) not in found
            found[match[1], match[2]] = float(match[3])
    return found


def test_figures_are_in_prometheus_format() -> None:
    text = api.metrics(VIEW)
    assert text.endswith("\n")
    found = samples(text)
    link = 'node="node-0",path="1",interface="eth1",local="10.0.1.1",remote="10.0.1.2"'
    assert found["torchrelay_network_link_state", f'{link},state="down"'] == 1
    assert found["torchrelay_network_link_state", f'{link},state="up"'] == 0
    assert found["torchrelay_network_link_flaps", link] == 3
    assert found["torchrelay_network_link_round_trip_seconds", link] == pytest.approx(0.00018)
    assert f"torchrelay_network_link_sent_bytes_total{{{link}}} 4000000000000000001\n" in text, "to the byte"
    assert found["torchrelay_network_link_corrupt_chunks_total", link] == 5
    place = 'node="node-0",interface="eth1",local="10.0.1.1",kind="down",where="here"'
    assert found["torchrelay_network_path_at_fault", place] == 1
    assert found["torchrelay_network_reports_total", 'node="node-0",what="strangers"'] == 2
    assert found["torchrelay_network_news_age_seconds", 'node="node-0"'] == 1.25


def test_a_node_that_is_gone_raises_no_alarm_for_ever() -> None:
    gone = NetworkView(nodes=tuple(msgspec.structs.replace(one, alive=False) for one in VIEW.nodes))
    assert {name for name, _ in samples(api.metrics(gone))} == {"torchrelay_network_news_age_seconds"}


def test_labels_may_hold_anything() -> None:
    odd = 'eth"1\\\n'
    path = msgspec.structs.replace(NEWS.paths[1], interface=odd)
    node = msgspec.structs.replace(VIEW.nodes[0], news=msgspec.structs.replace(NEWS, paths=(path,)))
    assert 'interface="eth\\"1\\\\\\n"' in api.metrics(NetworkView(nodes=(node,)))
    samples(api.metrics(NetworkView(nodes=(node,))))


# ---------------------------------------------------------------- the verb


def words(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_net_status(parser)
    return parser.parse_args(given)


def test_the_page_shows_links_and_what_is_wrong() -> None:
    lines = network_page(VIEW).splitlines()
    assert re.split(r"  +", lines[0]) == [
        "node",
        "path",
        "local",
        "peer",
        "state",
        "for",
        "sent/s",
        "received/s",
        "round trip",
        "flaps",
        "again",
        "corrupt",
        "taint",
    ]
    assert lines[1].split()[:6] == ["node-0", "0", "eth0", "10.0.0.1", "10.0.0.2", "up"]
    assert re.split(r"  +", lines[2]) == [
        "node-0",
        "1 eth1",
        "10.0.1.1",
        "10.0.1.2",
        "down (carrier)",
        "41 s",
        "12.0 MB",
        "11.0 MB",
        "0.2 ms",
        "3",
        "3",
        "5",
        "network/eth1",
    ]
    assert lines[3:] == [
        "",
        "node-0: path eth1 lost for 30 s (found 11 s ago)",
        "node-0: node-0 network/eth1=down:NoExecute by network",
        "node-0: dropped 1 that were no reports, and 2 of strangers",
    ]


def test_a_fault_of_others_is_no_taint_here() -> None:
    finding = msgspec.structs.replace(FINDING, where="there", taint="")
    path = msgspec.structs.replace(NEWS.paths[1], finding=finding)
    node = NodeNetwork(node=NODE, alive=True, age_s=0.0, news=NetworkNews(paths=(path,), left_out=3))
    page = network_page(NetworkView(nodes=(node,)))
    assert "none (there)" in page
    assert "words on 3 links too many were dropped" in page


def test_before_anybody_uses_the_network_there_is_nothing_to_show() -> None:
    node = NodeNetwork(node=NODE, alive=True, age_s=0.0, news=NetworkNews())
    assert network_page(NetworkView(nodes=(node,))) == "no process has used the network core yet"


def run_with(folder: Path, monkeypatch: pytest.MonkeyPatch, view: NetworkView) -> Path:
    """A run's folder whose orchestrator answers with this."""

    class Fake:
        def view_network(self) -> NetworkView:
            return view

    (folder / "journal.db").touch()
    monkeypatch.setattr("torchrelay.cli.network.net.Client.of", lambda _: Fake())
    return folder


def test_the_verb_asks_the_orchestrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = NodeNetwork(node=NodeId("node-1"), alive=False, age_s=90.0, news=NEWS)
    run_dir = run_with(tmp_path, monkeypatch, NetworkView(nodes=(*VIEW.nodes, old)))
    assert show_net_status(words("--run-dir", str(run_dir))) == 0
    said = capsys.readouterr()
    assert "network/eth1" in said.out
    assert "node-1: what is shown is 90 s old" in said.err
    assert show_net_status(words("--run-dir", str(run_dir), "-o", "json")) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["news"]["reports"] == 7


def test_the_verb_says_why_there_is_nothing_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal.db").touch()
    with pytest.raises(NotPossible, match=r"no orchestrator has been started.*--local FOLDER"):
        show_net_status(words("--run-dir", str(tmp_path)))
    run_with(tmp_path, monkeypatch, NetworkView(nodes=()))
    with pytest.raises(NotPossible, match="start the run with --net-failover"):
        show_net_status(words("--run-dir", str(tmp_path)))


# ---------------------------------------------------------------- the pages of this machine


def a_row(**fields: Any) -> Row:
    known: dict[str, Any] = dict.fromkeys(
        (
            "round_trip_us",
            "sent_bytes",
            "received_bytes",
            "sent_again",
            "duplicates",
            "downs",
            "ups",
            "corrupt",
            "down_since_us",
        ),
        0,
    )
    return Row(**(known | dict(interface="eth0", local="a", remote="b", path=0, live=1, state=RowState.UP) | fields))


def write_page(folder: Path, pid: int, *rows: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = NetPage(pid=pid, rank=None, updated_us=int(time.time() * 1e6), rows=rows)
    (folder / f"net-{pid}").write_bytes(encode_page(page))


@pytest.mark.parametrize("below", [".", "net", "node-0/net"])
def test_pages_are_found_below_the_folder_and_put_together(
    tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / below
    write_page(folder, 1, a_row(sent_bytes=1000, live=2), a_row(remote="c", live=0))
    write_page(folder, 2, a_row(sent_bytes=500), a_row(remote="d", live=0, state=RowState.DOWN, down_since_us=1))
    (folder / "net-3").write_bytes(b"x" * 100)

    looked = iter([1.0, 3.0])

    def look(where: Path) -> dict[int, NetPage]:
        now = next(looked)
        write_page(folder, 1, a_row(sent_bytes=round(1e6 * now), live=2), a_row(remote="c", live=0))
        return pages_of(where)

    pages_of = net.pages_of
    monkeypatch.setattr(net, "pages_of", look)
    monkeypatch.setattr(net, "LOOK_S", 0.5)
    assert show_net_status(words("--local", str(tmp_path), "-o", "json")) == 0
    said = capsys.readouterr()
    assert "not a page of the network core" in said.err
    (node,) = json.loads(said.out)["nodes"]
    links = {link["remote"]: link for link in node["news"]["paths"][0]["links"]}
    assert {remote: link["state"] for remote, link in links.items()} == {"b": "up", "c": "unused", "d": "down"}
    assert (links["b"]["live"], links["b"]["sent_bytes"]) == (3, 3_000_500)
    assert 2e6 < links["b"]["sent_rate"] <= 4e6, "2 MB in half a second, or a bit longer"
    assert links["d"]["state_s"] > 1e9, "since 1970"


def test_a_link_is_down_if_all_who_use_it_have_lost_it() -> None:
    down, unused = a_row(live=0, state=RowState.DOWN, down_since_us=5), a_row(live=0)
    for rows, state in (
        ([down, a_row()], "up"),
        ([down, unused], "down"),
        ([down, a_row(state=RowState.SUSPECT)], "suspect"),
        ([unused, unused], "unused"),
    ):
        assert net.link_of("b", rows, (0, 0), 10).state == state


def test_a_folder_without_pages_is_no_such_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotPossible, match="no pages of the network core"):
            show_net_status(words("--local", str(folder)))


# ---------------------------------------------------------------- the flags of a run


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the network core were built."""
    monkeypatch.setattr(net_flags, "core_variables", lambda: {"NCCL_NET": "torchrelay"})


def flags(*given: str) -> argparse.Namespace:
    return parser().parse_args([*given, __file__])


def test_without_the_flag_there_is_nothing() -> None:
    assert net_flags.path_limits(flags()) is None
    assert net_flags.network_environment(flags()) == {}
    for name in ("--net-down", "--net-flaps", "--net-giveup"):
        with pytest.raises(NotPossible, match=f"{name} means nothing without --net-failover"):
            net_flags.path_limits(flags(name, "8"))


def test_the_limits_are_those_of_the_flags() -> None:
    assert net_flags.path_limits(flags("--net-failover")) == PathLimits()
    given = ["--net-down", "2m", "--net-flaps", "3", "--net-window", "1d", "--net-share", "40%", "--net-slow", "90",
             "--net-heal", "5s", "--net-probe-port", "7"]  # fmt: skip
    assert net_flags.path_limits(flags("--net-failover", *given)) == PathLimits(
        down_s=120, flaps=3, window_s=86400, slow_share=0.4, slow_s=90, heal_s=5, probe_port=7
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("--net-down", "soon"), ("--net-down", "0"), ("--net-heal", "0s"), ("--net-flaps", "1"), ("--net-flaps", "x"),
        ("--net-flaps", "-3"), ("--net-share", "0"), ("--net-share", "100"), ("--net-probe-port", "65536"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(name: str, text: str) -> None:
    with pytest.raises(NotPossible) as refused:
        net_flags.path_limits(flags("--net-failover", f"{name}={text}"))
    assert refused.value.code == 2
    assert text in str(refused.value)


@pytest.mark.usefixtures("core")
def test_the_core_is_switched_on_and_gives_up_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_NET_GIVEUP_S", raising=False)
    assert net_flags.network_environment(flags("--net-failover")) == {
        "NCCL_NET": "torchrelay",
        "TORCHRELAY_NET_GIVEUP_S": "300",
    }
    monkeypatch.setenv("TORCHRELAY_NET_GIVEUP_S", "77")
    assert net_flags.network_environment(flags("--net-failover"))["TORCHRELAY_NET_GIVEUP_S"] == "77"
    given = flags("--net-failover", "--net-giveup", "2m")
    assert net_flags.network_environment(given)["TORCHRELAY_NET_GIVEUP_S"] == "120"


def test_without_the_core_the_flag_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "no-such.so")
    with pytest.raises(NotPossible, match=r"--net-failover: .*not built.*C compiler") as refused:
        carry_out(["run", "--run-dir", str(tmp_path / "run"), "--net-failover", __file__])
    assert refused.value.code == 2
    assert not (tmp_path / "run").exists()


def test_the_core_is_used_by_nccl_and_in_the_place_of_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "there.so")
    (tmp_path / "there.so").touch()
    monkeypatch.delenv("TORCHRELAY_CPU_BACKEND", raising=False)
    wanted = {"NCCL_NET_PLUGIN": str(tmp_path / "there.so"), "NCCL_NET": "torchrelay"}
    assert net_flags.core_variables() == wanted | {"TORCHRELAY_CPU_BACKEND": "torchrelay"}
    monkeypatch.setenv("TORCHRELAY_CPU_BACKEND", "gloo")
    assert net_flags.core_variables() == wanted | {"TORCHRELAY_CPU_BACKEND": "gloo"}


@pytest.mark.usefixtures("core")
def test_agents_find_the_limits_in_the_jobs_file(tmp_path: Path) -> None:
    checked = plan(["--run-dir", str(tmp_path / "run"), "--net-failover", "--net-heal", "5s", __file__])
    write_launch(tmp_path, checked.launch)
    launch = read_launch(tmp_path)
    assert launch.paths == PathLimits(heal_s=5)
    assert launch.env["NCCL_NET"] == "torchrelay"
