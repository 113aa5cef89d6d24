"""`torchrelay net`: the network part: where it is, what switches it on, and how its paths are."""

from __future__ import annotations

import argparse
import shlex

from torchrelay.cli.launch.net_flags import for_ports
from torchrelay.cli.network.net_status import add_net_status, show_net_status
from torchrelay.cli.registry import VERBS
from torchrelay.client.runs import NotPossible
from torchrelay.netpath.native import environment
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.terminal.show import Output, show_json
from torchrelay.terminal.words import add_output

EXAMPLES = """
eval "$(torchrelay net env)"          NCCL and RCCL take the plugin; torchrelay run --net-failover does it for its ranks
torchrelay net env --ib               NCCL's own failover between InfiniBand or RoCE ports; or run --ib-failover
torchrelay net status -w              the paths of all nodes, again every second
"""
_IB = "instead: NCCL's own failover between InfiniBand or RoCE ports (NCCL 2.29.7; recovery of ports: 2.30.3)"


def net(words: list[str]) -> int:
    """Carry out `torchrelay net WORDS`. Returns the exit code; raises `NotPossible`."""
    given = parser().parse_args(words)
    try:
        if given.what == "path":
            print(find())
        elif given.what == "env":
            show_environment(given)
        else:
            return show_net_status(given)
    except NotBuilt as error:
        raise NotPossible(str(error), 2) from error
    return 0


def parser() -> argparse.ArgumentParser:
    """The words after `torchrelay net`."""
    parser = argparse.ArgumentParser(
        prog="torchrelay net", description=f"{VERBS['net'].help.capitalize()}.", epilog=EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    env_help = 'variables that switch it on for NCCL and RCCL: eval "$(torchrelay net env)"'
    env = whats.add_parser("env", help=env_help, description=env_help, allow_abbrev=False)
    env.add_argument("--ib", action="store_true", help=_IB)
    env.add_argument(
        "--merge", metavar="DEVICES", help="with --ib: which ports back each other: mlx5_0,mlx5_1;mlx5_2,mlx5_3"
    )
    add_output(env, Output.TABLE, Output.JSON)
    path_help = "where the plugin is, for NCCL_NET_PLUGIN"
    whats.add_parser("path", help=path_help, description=path_help, allow_abbrev=False)
    status_help = "the paths of all nodes: peers, rates, losses"
    add_net_status(whats.add_parser("status", help=status_help, description=status_help, allow_abbrev=False))
    return parser


def show_environment(given: argparse.Namespace) -> None:
    """Print the variables as a shell takes them, or as JSON. Raises `NotPossible`, `NotBuilt`."""
    if given.ib:
        variables = for_ports(given.merge)
    elif given.merge is not None:
        raise NotPossible("--merge is for --ib: our plugin finds its paths itself (TORCHRELAY_NET_PATHS names them)", 2)
    else:
        variables = environment.plugin()
    if given.output is Output.JSON:
        print(show_json(variables))
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
