"""Heads that are lost, in the simulated world: another one acts that knows all that had an effect, and no two do.

Rules of the succession are broken on purpose, and some schedule notices each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from tests.support.crowned import contested, crowned, outvoted, woken
from torchrelay.orchestrator.core import heirs
from torchrelay.orchestrator.core.heirs import HeirPort, Heirs
from torchrelay.protocol.model.job import BEFORE_CUTOVER, RECOVERING, JobPhase
from torchrelay.protocol.succession import candidate, head, succession, voter
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession.candidate import Elected, Excluded, Verdict
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.offices import Office
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.plans import KEY, FaultKind, On, Plan, Strike
from torchrelay.simulation.world import run_plan, run_seed


def run_all(plans: Iterable[Plan]) -> Counter[str]:
    """Run them all; raises at the first violation."""
    reached: Counter[str] = Counter()
    for plan in plans:
        result = run_plan(plan)
        assert not result.violation, f"{result.violation}: seed {plan.seed}"
        reached.update(result.coverage)
    return reached


def test_schedules_with_heirs_hold_every_invariant() -> None:
    reached = run_all(crowned(range(400)))
    assert reached["succession: has heirs"] > 100
    assert reached["succession: acts"] > 10


def test_schedules_of_many_lost_heads_hold_every_invariant() -> None:
    reached = run_all(contested(range(400)))
    for what in ("stands", "elected", "acts", "gives way", "loses an heir"):
        assert reached[f"succession: {what}"], what


# ---------------------------------------------------------------- in each phase of a recovery and of a move

STIRS = {**dict.fromkeys(RECOVERING, FaultKind.KILL), **dict.fromkeys(BEFORE_CUTOVER, FaultKind.MOVE)}
STIRS[JobPhase.PARKING] = FaultKind.PARK
WISHED = [phase for phase in sorted(STIRS) if phase is not JobPhase.RELEASING]  # it lasts for milliseconds


def struck_in(phase: JobPhase, kind: FaultKind, plans: Iterable[Plan]) -> Iterable[Plan]:
    """Whether a rank is killed or moved, the head is struck when the job comes to this phase for it."""
    for plan in plans:
        skip = 1 if phase in (JobPhase.RECONFIGURING, JobPhase.RESUMING) else 0
        stir = Strike(STIRS[phase], On.JOB, JobPhase.RUNNING, 0, 200, plan.seed % plan.script.ranks)
        blow = Strike(kind, On.JOB, phase, skip, plan.seed % 7, 1, 40_000 if kind is FaultKind.HEAD else 6_000)
        spec = structs.replace(plan.spec, park_dir="/parked", park_key=KEY, park_ms=6_000)
        yield replace(plan, strikes=(stir, blow), spec=spec if phase is JobPhase.PARKING else plan.spec)


@pytest.mark.parametrize("phase", WISHED)
def test_a_head_is_lost_in_each_phase(phase: JobPhase) -> None:
    plans = [plan for plan in crowned(range(300)) if len(plan.slots) > 2][:24]
    for kind in (FaultKind.HEAD, FaultKind.FROZEN):
        reached = run_all(struck_in(phase, kind, plans))
        assert reached[f"fault: {kind} in {phase}"] > 10
        assert reached["succession: acts"] > 10


# ---------------------------------------------------------------- the checkers bite


def orders_that_leave_at_once(patch: pytest.MonkeyPatch) -> None:
    let_go(patch, lambda action: getattr(action, "__func__", None) is Connection.down)


def acknowledgements_that_leave_at_once(patch: pytest.MonkeyPatch) -> None:
    let_go(patch, lambda action: getattr(action, "__name__", "") == "<lambda>")


def let_go(patch: pytest.MonkeyPatch, which: Callable[[Any], bool]) -> None:
    """What is such an action waits for no heir."""
    real = Shell._leave

    def leave(self: Shell, action: Any, *given: Any) -> None:
        if which(action):
            action(*given)
        else:
            real(self, action, *given)

    patch.setattr(Shell, "_leave", leave)


def heirs_that_nobody_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heirs, "let_leave", lambda copied, _: structs.replace(copied, left=copied.written))


def a_head_that_goes_on_without_a_lost_heir(patch: pytest.MonkeyPatch) -> None:
    real = Heirs.leave

    def leave(self: Heirs, port: HeirPort) -> None:
        settled = self.head.settled
        others = tuple(place for place in settled.heirs if place.copy != port.place.copy)
        self.head = structs.replace(self.head, settled=structs.replace(settled, heirs=others))
        real(self, port)

    patch.setattr(Heirs, "leave", leave)


def heirs_that_count_no_more_when_it_is_proposed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Head, "needed", property(lambda self: self.newest.heirs))


def heirs_whose_copies_are_not_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heirs, "may_be_heirs", lambda *_: True)


def some(noted: Collection[VoterId], voters: Iterable[VoterId]) -> bool:
    among = frozenset(voters)
    return not among or any(each in noted for each in among)


def a_minority_that_settles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head, "is_majority", some)


def a_minority_that_elects(patch: pytest.MonkeyPatch) -> None:
    for module in (candidate, doors):
        patch.setattr(module, "is_majority", some)


def an_excluded_heir_that_wins(patch: pytest.MonkeyPatch) -> None:
    real = candidate.judge

    def judge(candidacy: candidate.Candidacy) -> Verdict:
        verdict = real(candidacy)
        return Elected(verdict.by) if isinstance(verdict, Excluded) else verdict

    patch.setattr(candidate, "judge", judge)


def a_head_that_acts_again_and_asks_nobody(patch: pytest.MonkeyPatch) -> None:
    real = Office.restart

    def restart(self: Office) -> None:
        self.known = structs.replace(self.known, base=None, voters=())
        real(self)

    patch.setattr(Office, "restart", restart)


def voters_that_forget_what_they_noted(patch: pytest.MonkeyPatch) -> None:
    real = voter.note

    def note(ballot: Ballot, noted: Succession) -> tuple[Ballot, bool]:
        after, granted = real(ballot, noted)
        return (after, granted) if ballot.noted is None else (ballot, granted)

    patch.setattr(voter, "note", note)


def without_promise(ballot: Ballot) -> Ballot:
    return structs.replace(ballot, promised=0, promised_to=None)


def voters_that_forget_what_they_promised(patch: pytest.MonkeyPatch) -> None:
    real = voter.promise
    patch.setattr(
        voter, "promise", lambda ballot, lease, copy: real(without_promise(ballot) if lease else ballot, lease, copy)
    )


def voters_that_break_their_promises(patch: pytest.MonkeyPatch) -> None:
    real = voter.note
    patch.setattr(voter, "note", lambda ballot, told: real(without_promise(ballot), told))


def an_heir_that_stands_and_copies_on(patch: pytest.MonkeyPatch) -> None:
    def follow_no_more(self: Office) -> None:
        if self.line is not None and (self.line.closed or not self.up):
            self.line.close()
            self.line = None

    patch.setattr(Office, "follow_no_more", follow_no_more)


def any_copy_that_counts(patch: pytest.MonkeyPatch) -> None:
    def has_copy(self: Succession, copy: CopyId) -> bool:
        del self, copy
        return True

    patch.setattr(succession.Succession, "has_copy", has_copy)


def time_that_goes_on_while_heirs_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heirs, "late", property(lambda _: False))


@pytest.mark.parametrize(
    ("broken", "told", "plans"),
    [
        (orders_that_leave_at_once, "", partial(crowned, range(400))),
        (acknowledgements_that_leave_at_once, "have had effects", partial(crowned, range(400))),
        (heirs_that_nobody_waits_for, "have had effects", partial(crowned, range(400))),
        (a_head_that_goes_on_without_a_lost_heir, "two successions are numbered", partial(crowned, range(600))),
        (heirs_that_count_no_more_when_it_is_proposed, "have had effects", partial(crowned, range(600))),
        (heirs_whose_copies_are_not_whole, "have had effects", partial(contested, range(3_000))),
        (a_minority_that_settles, "have had effects", partial(crowned, range(600))),
        (a_minority_that_elects, "", partial(crowned, range(400))),
        (an_excluded_heir_that_wins, "", partial(contested, range(3_000))),
        (a_head_that_acts_again_and_asks_nobody, "and so does", partial(crowned, range(600))),
        (voters_that_forget_what_they_noted, "", partial(crowned, range(800))),
        (voters_that_forget_what_they_promised, "are numbered", partial(woken, range(2_400, 2_700))),
        (voters_that_break_their_promises, "have had effects", partial(woken, range(1_700, 2_000))),
        (an_heir_that_stands_and_copies_on, "", partial(contested, range(3_000))),
        (any_copy_that_counts, "", partial(crowned, range(600))),
        (time_that_goes_on_while_heirs_are_waited_for, "although it is sound", partial(outvoted, range(600))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_succession_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None],
    told: str,
    plans: Callable[[], Iterable[Plan]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    violation = next((result.violation for result in map(run_plan, plans()) if result.violation), "")
    assert violation
    assert told in violation


def test_schedules_of_heads_that_wake_up_hold_every_invariant() -> None:
    run_all(woken(range(400)))


def test_time_stands_still_while_nothing_leaves_the_head() -> None:
    reached = run_all(outvoted(range(600)))
    assert reached["succession: loses an heir"] > 10


# ---------------------------------------------------------------- schedules that have shown something

SHOWN = {
    1125: "a voter had promised a higher lease to one that is lost, and the head waited for its vote for ever",
    1237: "two agents went round two doors, and were never at the same",
    144: "who waited at another door than that of the new head came back too late",
    6847: "too few voters were left: a head that nothing leaves kept its workers waiting",
    12124: "parked files lay where no rank was any more",
    103209: "an agent had noted too little to know where the others waited",
    958: "a candidate whose last words had no voters stood again and again",
    201575: "heirs knew of more voters than there were by what the others had noted",
    15623: "orders that had waited for heirs did not stand any more (the simulation's own)",
    24956: "a node that was cut off for long was given up (the simulation's own)",
    40704: "a worker that was coming up was not told of to the next head (the simulation's own)",
    69869: "the newest snapshots lay where no worker may be (the simulation's own)",
    102644: "a freeze was said again after it was to be over (the simulation's own)",
    207540: "an orchestrator that was stopped sealed a parking (the simulation's own)",
}


@pytest.mark.parametrize("seed", SHOWN)
def test_what_a_schedule_has_shown_stays_mended(seed: int) -> None:
    assert not run_seed(seed).violation, SHOWN[seed]
