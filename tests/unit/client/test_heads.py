"""The orchestrator that acts is found wherever it is by now, and nobody else is believed, or told a token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.heads import Stand, standing
from torchrelay.api.endpoint import Endpoint, write_endpoint
from torchrelay.client import heads as module
from torchrelay.client.client import Denied
from torchrelay.client.heads import Heads, is_https, places_of
from torchrelay.client.runs import NotPossible
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.succession import CopyId, Succession
from torchrelay.protocol.succession.succession import Place as CopyPlace
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role, pass_of, read_pass


def played(passes: Path, count: int, story: Callable[..., Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            await story(*[await stack.enter_async_context(standing(passes)) for _ in range(count)])

    asyncio.run(all_of_it())


def looking(passes: Path, *urls: str, role: Role = Role.OPERATOR) -> Heads:
    held = pass_of(passes, role)
    return Heads(lambda: [Endpoint(url=url, pid=0) for url in urls], lambda: read_pass(held).token, held)


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes")
    make_passes(folder, "train")
    return folder


class TestLooking:
    def test_one_that_does_not_act_says_where_to_ask(self, passes: Path) -> None:
        async def story(heir: Stand, head: Stand) -> None:
            heads = looking(passes, heir.url)
            heir.point_to(head.url)
            head.act(2)
            assert await heads.look()
            assert heads.where().url == head.url
            assert heads.head is not None
            assert (heads.head.node, heads.head.lease) == ("m2", 2)

        played(passes, 2, story)

    def test_when_the_head_is_lost_its_heirs_are_asked(self, passes: Path) -> None:
        async def story(head: Stand, heir: Stand) -> None:
            heads = looking(passes, head.url)
            head.act(2, heir.url)
            heir.point_to(head.url)
            assert await heads.look()
            head.point_to("https://127.0.0.1:1")
            assert not await heads.look()
            assert "does not act" in heads.troubles
            assert heads.where().url == head.url, "as long as nobody else acts"
            heir.act(3, node="m7")
            assert await heads.look()
            assert heads.where().url == heir.url

        played(passes, 2, story)

    def test_of_two_that_say_they_act_the_one_with_the_higher_lease_does(self, passes: Path) -> None:
        async def story(old: Stand, new: Stand) -> None:
            old.act(2, new.url)
            new.act(3)
            heads = looking(passes, old.url)
            assert await heads.look()
            assert heads.where().url == new.url

        played(passes, 2, story)

    def test_only_so_many_are_asked_and_only_so_many_hops_are_made(self, passes: Path) -> None:
        async def story(*stands: Stand) -> None:
            for one, other in pairwise(stands):
                one.point_to(other.url)
            stands[-1].act(2)
            heads = looking(passes, stands[0].url)
            assert not await heads.look()
            assert [len(stand.tokens) for stand in stands] == [1] * module.HOPS + [0] * (len(stands) - module.HOPS)
            stands[0].point_to(stands[-1].url, *(f"https://127.0.0.1:{port}" for port in range(1, 50)))
            assert await heads.look()
            assert len(heads.trouble) <= module.MOST

        played(passes, module.HOPS + 2, story)

    def test_one_with_another_jobs_certificate_is_not_told_the_token(self, passes: Path, tmp_path: Path) -> None:
        make_passes(tmp_path, "train")

        async def story(heir: Stand) -> None:
            async with standing(tmp_path) as stranger:
                heir.point_to(stranger.url)
                stranger.act(9)
                heads = looking(passes, heir.url)
                assert not await heads.look()
                assert stranger.tokens == []
                assert heads.trouble[stranger.url] == "it has no certificate of this job"

        played(passes, 1, story)

    def test_a_pass_for_something_else_is_refused_in_words(self, passes: Path) -> None:
        async def story(head: Stand) -> None:
            head.answer, head.status = None, 403
            with pytest.raises(Denied):
                await looking(passes, head.url, role=Role.AGENT).look()

        played(passes, 1, story)

    def test_a_pass_is_shown_over_tls_only(self, passes: Path) -> None:
        async def story() -> None:
            heads = looking(passes, "http://127.0.0.1:9")
            assert not await heads.look()
            assert "over TLS only" in heads.troubles

        played(passes, 0, story)

    @pytest.mark.parametrize(
        ("url", "good"),
        [
            ("https://10.0.0.1:4100", True),
            ("https://[fd00::1]:4100", True),
            ("http://10.0.0.1:4100", False),
            ("https://10.0.0.1", False),
            ("https://10.0.0.1:4100/path", False),
            ("https://10.0.0.1:4100?x", False),
            ("https://[fd00::1:4100", False),
            ("https://10.0.0.1:99999", False),
            (f"https://{'a' * 400}:1", False),
            ("", False),
        ],
    )
    def test_an_answer_may_point_to_a_port_of_a_machine_and_to_nothing_else(self, url: str, good: bool) -> None:
        assert is_https(url) is good


class TestMinding:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LOOK_S", 0.02)

    def test_it_says_that_nobody_acts_and_who_does_then(self, passes: Path) -> None:
        async def story(head: Stand, heir: Stand) -> None:
            said: list[str] = []
            head.act(2, heir.url)
            heir.point_to(head.url)
            minding = asyncio.create_task(looking(passes, head.url).mind(said.append, 30))
            await asyncio.sleep(0.2)
            assert said == [], "whoever asks knows where"
            head.point_to("https://127.0.0.1:1")
            while not said:
                await asyncio.sleep(0.01)
            heir.act(3, node="m4")
            while len(said) < 2:
                await asyncio.sleep(0.01)
            minding.cancel()
            assert said[0].startswith("no orchestrator acts at the moment (")
            assert "waiting until one does, 30 s at most" in said[0]
            assert said[1:] == [f"the orchestrator on m4 acts now, at {heir.url}"]

        played(passes, 2, story)

    def test_it_waits_only_so_long(self, passes: Path) -> None:
        async def story(heir: Stand) -> None:
            heir.point_to("https://127.0.0.1:1")
            with pytest.raises(NotPossible, match=r"no orchestrator has acted for 0.1 s") as told:
                await looking(passes, heir.url).mind(lambda _: None, 0.1)
            assert told.value.code == 92

        played(passes, 1, story)

    def test_it_ends_when_the_run_is_over(self, passes: Path) -> None:
        async def story() -> None:
            said: list[str] = []
            await looking(passes, "https://127.0.0.1:1").mind(said.append, 30, is_over=lambda: True)
            assert said == []

        played(passes, 0, story)


def test_a_runs_folder_tells_where_its_orchestrator_was_and_where_else_it_may_be(tmp_path: Path) -> None:
    assert places_of(tmp_path) == []
    (tmp_path / "endpoint.json").write_text("damaged")
    assert places_of(tmp_path) == []
    write_endpoint(tmp_path, Endpoint(url="https://10.0.0.1:1", pid=7))
    with closing(Journal(tmp_path / "journal.db")) as journal:
        succession = Succession(
            lease=2,
            version=1,
            head=CopyPlace(NodeId("m1"), CopyId("a"), "https://10.0.0.1:1"),
            heirs=(CopyPlace(NodeId("m2"), CopyId("b"), "https://10.0.0.2:2"), CopyPlace(NodeId("m3"), CopyId("c"))),
        )
        journal.keep_succession(succession)
    assert [one.url for one in places_of(tmp_path)] == [
        "https://10.0.0.1:1",
        "https://10.0.0.1:1",
        "https://10.0.0.2:2",
    ]
