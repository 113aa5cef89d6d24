"""Trains as faulty.py does, in processes whose network core is pretended: `pathed.py WISHES [words of faulty.py]`."""

import runpy
import sys
from pathlib import Path

from tests.support.fake_core import follow_beside

if __name__ == "__main__":
    follow_beside(Path(sys.argv.pop(1)))
    script = Path(__file__).with_name("faulty.py")
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
