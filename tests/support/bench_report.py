"""What tests of bench report share."""

from __future__ import annotations

from compare_figures import Plain, figures
from compare_results import Outcome, Run
from compare_schedule import Fault, What
from tests.support.bench_compare import PLAIN, RANKS, World


def run_of(*outcomes: Outcome) -> Run:
    calm = World()
    calm.train(0, 40)
    again = Plain(jct_s=4.1, step_s=0.1, cpu_a_step_s=0.2, digest="same", early_digest="early")
    return Run(
        model="gpt",
        about="A model.",
        steps=40,
        ranks=RANKS,
        per_job=1.0,
        schedule=[Fault(20, What.KILL, 2)],
        plain=PLAIN,
        again=again,
        none=calm.seen(),
        every={"naive": 4, "tuned": 2},
        copy_s=0.01,
        write_s=0.02,
        outcomes=list(outcomes),
    )


def outcome_of(name: str, world: World, digest: str = "same") -> Outcome:
    seen = world.seen(digest)
    return Outcome(name=name, title=name, seen=seen, figures=figures(seen, PLAIN))
