"""The command `torchrelay`: finds the verb in the registry, imports its module, and puts in a line what goes wrong."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from torchrelay.cli.launch.unprepared import ends_at_once

if TYPE_CHECKING:
    from torchrelay.client.runs import Far

DESCRIPTION = "Keeps a distributed PyTorch run going through faults, at the same step, to the same bits."
ASKS = """
The plan is printed first. On a terminal it asks for confirmation (--yes skips this); without a terminal it acts at
once, as kubectl and scontrol do. --dry-run prints the plan only. Exit code 0: done, or nothing to do; 1: declined, or
the orchestrator does not answer; 2: invalid request; the message says why.
"""
CANNOT_BE_ASKED = (400, 404, 409)  # there is no such thing, or it is not the time for it; the answer says what there is


def carry_out(words: list[str]) -> int:
    """Carry out one command. Returns the exit code; raises what `main` puts in words."""
    with ends_at_once():
        from torchrelay.cli.registry import VERBS
    verb = VERBS.get(words[0]) if words else None
    if verb is not None and verb.flags is None:
        with ends_at_once():
            begin = verb.load()
        return begin(words[1:]) or 0
    if verb is not None and verb.negatives:
        from torchrelay.terminal.typed import joined

        words = joined(words)
    given = parser(words[0] if verb is not None else None).parse_args(words)
    with ends_at_once():
        begin = VERBS[given.verb].load()
        if getattr(given, "url", None) is not None or getattr(given, "ca", None) is not None:
            given.run_dir = far(given)
    return begin(given) or 0


def far(given: argparse.Namespace) -> Far:
    """The run that --url and --ca name. Raises `NotPossible`."""
    from torchrelay.client.runs import Far, NotPossible

    if given.url is None or given.ca is None or given.run_dir is not None:
        raise NotPossible("--url and --ca go together, and without --run-dir", 2)
    return Far(given.url, given.ca)


def parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The command line of all verbs; with the flags of the one that is asked for alone, if that is known."""
    from torchrelay.cli.registry import ROWS

    parser = argparse.ArgumentParser(prog="torchrelay", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=Version, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in ROWS:
        text = verb.help[0].upper() + verb.help[1:] + "." + (ASKS if verb.changes else "")
        made = verbs.add_parser(verb.name, help=verb.help, description=text, allow_abbrev=False)
        for add in verb.flags or () if asked in (None, verb.name) else ():
            add(made)
    return parser


class Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all else."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        parser.exit(message=f"torchrelay {version('torchrelay')}\n")


def main(words: list[str] | None = None) -> None:
    """The process. Whatever can be said in a line is said in a line, with its exit code."""
    open_streams()
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


def open_streams() -> None:
    """Standard streams that are closed lead nowhere: else the next file would be opened in their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def told(error: Exception, code: int) -> int:
    """Say it on stderr; returns the code."""
    print(f"torchrelay: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
