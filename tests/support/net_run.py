"""`torchrelay run --net-failover` as if the network core were built: its part is pretended.

See `tests.support.fake_core`. `python -m tests.support.net_run <words>`. All else is real.
"""

from __future__ import annotations

import sys

from torchrelay.cli import main as command
from torchrelay.cli.launch import net_flags

if __name__ == "__main__":
    net_flags.core_variables = dict
    command.main(["run", *sys.argv[1:]])
