"""`python -m torchrelay`: the command, where its script is not on the PATH."""

from __future__ import annotations

from torchrelay.cli.main import main

if __name__ == "__main__":
    main()
