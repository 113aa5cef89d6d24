"""The soak of mixed incidents: what is dealt, what is counted, and a short one of real processes."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.support import mixed
from tests.support.guarantee import excluded, line
from tests.support.jobs import Finished
from tests.support.mixed import KINDS, Chapter, Kind, by_kind, compare, deal, repeated
from torchrelay.api.shown import Exclusion
from torchrelay.client.runs import NotPossible
from torchrelay.goodput.ledger import Entry


class TestDeal:
    def test_a_hundred_are_as_the_shares_say(self) -> None:
        dealt = Counter(kind.name for kind, _ in islice(deal(3), 100))
        assert sum(kind.share for kind in KINDS) == 100
        assert dealt == {kind.name: kind.share for kind in KINDS}

    def test_the_seed_says_all(self) -> None:
        first, again, other = ([str(act) for _, act in islice(deal(seed), 150)] for seed in (3, 3, 4))
        assert first == again
        assert first != other

    def test_the_first_few_are_of_all_kinds(self) -> None:
        assert {kind.name for kind, _ in islice(deal(9), len(KINDS))} == {kind.name for kind in KINDS}

    def test_each_act_of_a_kind_comes_before_any_comes_again(self) -> None:
        kind = next(kind for kind in KINDS if kind.name == "SIGKILL of a rank")
        acts = [str(act) for _, act in islice(deal(1, [kind]), 3 * len(kind.acts))]
        assert set(Counter(acts).values()) == {3}
        assert set(acts[: len(kind.acts)]) == {str(act) for act in kind.acts}

    @pytest.mark.parametrize("phase", ["forward", "backward", "gate", "update"])
    def test_ranks_are_killed_and_stopped_in_each_phase_of_a_step(self, phase: str) -> None:
        acts = {str(act) for kind in KINDS for act in kind.acts}
        assert {f"kill in {phase}", f"stop in {phase}"} <= acts

    def test_who_needs_two_spares_is_given_time_for_them(self) -> None:
        two = {kind.name for kind in KINDS if kind.spares == 2}
        assert {"second fault in a recovery", "node lost", "drain", "planned move", "fault in a move"} == two


def chapter(*entries: Entry, layout: str = "ddp", **kinds: str) -> Chapter:
    found = Chapter(0, layout, Path("nowhere"))
    found.entries = list(entries)
    found.kinds = {name.replace("_", "-"): kind for name, kind in kinds.items()}
    return found


class TestChapter:
    """A job that goes wrong, by a live one that is only played."""

    def test_it_is_ended_also_if_its_ledger_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed: list[bool] = []

        class Played:
            wrong: tuple[str, ...] = ()

            @classmethod
            def begin(cls, *_: object, **__: object) -> Played:
                return cls()

            @property
            def client(self) -> object:
                raise AssertionError("it does not answer")

            def kill(self) -> None:
                killed.append(True)

        def torn(_: Chapter) -> list[Entry]:
            raise NotPossible("ledger:3 is no line of a ledger", 2)

        monkeypatch.setattr(mixed, "Soak", Played)
        monkeypatch.setattr(mixed, "entries_of", torn)
        with pytest.raises(NotPossible):
            mixed.run_chapter(tmp_path, 0, "ddp", deal(1), 3, lambda _: None)
        assert killed == [True]

    def test_one_that_does_not_begin_is_told_and_is_not_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Never:
            @classmethod
            def begin(cls, *_: object, **__: object) -> Never:
                raise AssertionError("training did not come")

        monkeypatch.setattr(mixed, "Soak", Never)
        found = mixed.run_chapter(tmp_path, 4, "hsdp", deal(1), 3, lambda _: None)
        assert (found.done, found.wrong) == (None, ["job 4 (hsdp) did not begin: training did not come"])


class TestCounting:
    def test_what_counts_is_told_by_what_was_dealt(self) -> None:
        lines = [line(1), line(2, "fell back"), excluded(3, Exclusion.CALLED_OFF, "x", "called off"), line(4)]
        found = chapter(*map(Entry, lines), I_1="hang", I_2="hang", I_3="taint")
        assert by_kind([found, chapter(Entry(line(1)), I_1="drain")]) == {
            "hang": [2, 1],
            "by itself": [1, 1],
            "drain": [1, 1],
        }

    def test_what_was_never_seen_to_end_counts_as_lost(self) -> None:
        assert by_kind([chapter(Entry(line(1, "open")), I_1="hang")]) == {"hang": [1, 0]}

    def test_a_job_without_an_end_is_a_difference(self) -> None:
        assert compare([chapter()], {}) == ["job 0 (ddp) did not come to its end"]

    def test_a_rank_that_stood_at_a_point_in_two_states_has_not_seen_its_samples_once(self) -> None:
        done = Finished(0, "", Path("nowhere"), {(0, "3"): {"a"}, (1, "3"): {"a", "b"}})
        assert repeated(done) == ["rank 1 at 3"]


def test_every_kind_has_something_to_do() -> None:
    assert [kind.name for kind in KINDS if not kind.acts] == []
    assert isinstance(KINDS[0], Kind)
