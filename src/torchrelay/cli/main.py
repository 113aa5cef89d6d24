"""The command `torchrelay`: one module a verb, imported when it is asked for, so that each verb answers at once."""

from __future__ import annotations

import argparse
import sys

from torchrelay.cli.launch.unprepared import ends_at_once

CANNOT_BE_ASKED = (400, 404, 409)  # there is no such thing, or it is not the time for it; the answer says what there is


def carry_out(words: list[str]) -> int:
    """Carry out one command. Returns the exit code; raises what `main` puts in words."""
    if words[:1] == ["run"]:
        with ends_at_once():
            from torchrelay.cli.launch.run import run

        return run(words[1:])
    if words[:1] == ["chaos"]:
        from torchrelay.cli.diagnose.chaos import chaos

        return chaos(words[1:])
    if words[:1] == ["net"]:
        from torchrelay.cli.network.net import net

        return net(words[1:])
    if words[:1] == ["cost"]:
        from torchrelay.cli.forecasts.cost import cost

        return cost(words[1:])
    if words[:1] == ["simulate"]:
        from torchrelay.cli.forecasts.simulate import simulate

        return simulate(words[1:])
    from torchrelay.terminal.words import CHANGING, parser

    if words[:1] == ["report"]:
        from torchrelay.terminal.typed import joined

        words = joined(words)
    given = parser().parse_args(words)
    if given.verb in CHANGING:
        change(given)
    elif given.verb == "doctor":
        return consult(given)
    elif given.verb == "report" and given.guarantee:
        from torchrelay.cli.view.guarantee import show_guarantee

        return show_guarantee(given)
    else:
        look_at(given)
    return 0


def consult(given: argparse.Namespace) -> int:
    """The doctor: of this machine, of its network, or of a running job's layout."""
    from torchrelay.client.runs import NotPossible

    if given.module and not given.script:
        raise NotPossible("-m: no module is named", 2)
    if given.layout:
        from torchrelay.cli.view.layout import show_layout

        return show_layout(given)
    if given.script:
        raise NotPossible(f"{given.script[0]}: the doctor looks at a script with --layout only", 2)
    from torchrelay.cli.diagnose.doctor import all_checks, examine

    if given.net:
        from torchrelay.cli.diagnose.doctor_network import network_checks

        return examine(network_checks(), given.output)
    return examine(all_checks(), given.output)


def look_at(given: argparse.Namespace) -> None:
    """The verbs that only look."""
    match given.verb:
        case "status":
            from torchrelay.cli.view.status import show_status

            show_status(given.run_dir, given.job, given.output, watch=given.watch)
        case "ranks":
            from torchrelay.cli.view.ranks import show_ranks

            show_ranks(given.run_dir, given.job, given.rank, given.output, watch=given.watch)
        case "nodes":
            from torchrelay.cli.view.places import show_nodes

            show_nodes(given.run_dir, given.output, watch=given.watch)
        case "spares":
            from torchrelay.cli.view.places import show_spares

            show_spares(given.run_dir, given.job, given.output, watch=given.watch)
        case "moves":
            from torchrelay.cli.operate.moves import show_moves

            show_moves(given.run_dir, given.job, given.output, watch=given.watch)
        case "incidents":
            from torchrelay.cli.view.incidents import show_incidents

            show_incidents(given.run_dir, given.job, given.output, watch=given.watch)
        case "explain":
            from torchrelay.cli.view.explain import show_explanation

            show_explanation(given.about, given.run_dir, given.job, given.output)
        case "report":
            from torchrelay.cli.view.report import refuse_flags, show_report

            refuse_flags(given)
            show_report(given.run_dir, given.job, given.output, write=given.write)
        case "audit":
            from torchrelay.cli.view.audit import show_audit

            show_audit(given.run_dir, given.output)


def change(given: argparse.Namespace) -> None:
    """The verbs that change something."""
    match given.verb:
        case "migrate":
            from torchrelay.cli.operate.moves import migrate

            migrate(given)
        case "taint" | "untaint" | "drain" | "undrain" | "cordon" | "uncordon":
            from torchrelay.cli.operate import taints

            getattr(taints, given.verb)(given)
        case "freeze" | "unfreeze":
            from torchrelay.cli.operate.freeze import freeze, unfreeze

            (freeze if given.verb == "freeze" else unfreeze)(given)
        case "restart-services":
            from torchrelay.cli.operate.restart import restart

            restart(given)


def main(words: list[str] | None = None) -> None:
    """The process. Whatever can be said in a line is said in a line, with its exit code."""
    with ends_at_once():
        from torchrelay.client.client import Away, Denied
        from torchrelay.client.runs import NotPossible

    try:
        code = carry_out(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except NotPossible as error:
        code = told(error, error.code)
    except Denied as error:
        code = told(error, 2 if error.status in CANNOT_BE_ASKED else 1)
    except Away as error:
        code = told(error, 1)
    except ValueError as error:  # a damaged file, or a token that must not be used (TrustError)
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
