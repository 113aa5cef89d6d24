"""The command `torchrelay`: one module a verb, imported when it is asked for, so that each verb answers at once."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from torchrelay.cli.show import Output

DESCRIPTION = "Keeps a distributed PyTorch run going through faults, at the same step, to the same bits."
VERBS = {
    "run": "start a script as torchrun does, and keep it going through faults",
    "status": "how a job is doing: step, generation, phase and why, spares, incidents",
    "ranks": "which worker holds each rank, where, and what it does; and the spares",
    "incidents": "every interruption, and how it was resolved",
    "explain": "one incident: cause, evidence, every decision with its reason, the time of each phase",
    "report": "the ledger: one line per incident, the totals, the clean ratio with its confidence interval",
    "doctor": "check what a run needs from this machine (exit code 0: all well, 1: remarks, 2: it will not run)",
}


def parser() -> argparse.ArgumentParser:
    """The command line, but for `run`, whose words are torchrun's and the script's."""
    parser = argparse.ArgumentParser(prog="torchrelay", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchrelay {version('torchrelay')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made = {
        name: verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        for name, text in VERBS.items()
    }
    for name in ("status", "ranks", "incidents", "explain", "report"):
        made[name].add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
        made[name].add_argument("--job", help="the job (the newest of the run)")
    for name in ("status", "ranks", "incidents"):
        made[name].add_argument("-w", "--watch", action="store_true", help="again every second, until Ctrl-C")
    for name in ("status", "ranks", "incidents", "explain", "doctor"):
        add_output(made[name], Output.TABLE, Output.JSON)
    add_output(made["report"], *Output)
    made["ranks"].add_argument("--rank", type=int, help="this one only")
    made["explain"].add_argument("incident", help="its name: I-3, or 3")
    made["report"].add_argument("--write", action="store_true", help="also write the lines to RUN_DIR/ledger.jsonl")
    return parser


def add_output(verb: argparse.ArgumentParser, *kinds: Output) -> None:
    verb.add_argument("-o", "--output", type=Output, choices=kinds, default=Output.TABLE, help="how it is printed",
                      metavar="{" + ",".join(kinds) + "}")  # fmt: skip


def carry_out(words: list[str]) -> int:
    """Carry out one command. Returns the exit code; raises what `main` puts in words."""
    if words[:1] == ["run"]:
        from torchrelay.cli.run import run

        return run(words[1:])
    given = parser().parse_args(words)
    match given.verb:
        case "status":
            from torchrelay.cli.status import show_status

            show_status(given.run_dir, given.job, given.output, watch=given.watch)
        case "ranks":
            from torchrelay.cli.ranks import show_ranks

            show_ranks(given.run_dir, given.job, given.rank, given.output, watch=given.watch)
        case "incidents":
            from torchrelay.cli.incidents import show_incidents

            show_incidents(given.run_dir, given.job, given.output, watch=given.watch)
        case "explain":
            from torchrelay.cli.explain import show_incident

            show_incident(given.incident, given.run_dir, given.job, given.output)
        case "report":
            from torchrelay.cli.report import show_report

            show_report(given.run_dir, given.job, given.output, write=given.write)
        case "doctor":
            from torchrelay.cli.doctor import examine

            return examine(given.output)
    return 0


def main(words: list[str] | None = None) -> None:
    """The process. Whatever can be said in a line is said in a line, with its exit code."""
    from torchrelay.cli.client import Away, Denied
    from torchrelay.cli.runs import NotPossible
    from torchrelay.wire.trust import TrustError

    try:
        code = carry_out(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except NotPossible as error:
        code = told(error, error.code)
    except (Away, Denied) as error:
        code = told(error, 1)
    except (TrustError, ValueError) as error:
        code = told(error, 2)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Whoever read us has left; without this, Python would complain once more at its end.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        code = 141
    sys.exit(code)


def told(error: Exception, code: int) -> int:
    """Say it on stderr; returns the code."""
    print(f"torchrelay: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
