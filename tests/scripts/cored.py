"""Trains as faulty.py does, over two network paths of its node's own; `cored.py FAULTS [words of faulty.py]`.

The paths are addresses of the loopback interface. FAULTS is a JSON file: what is to be wrong with the paths of a node,
as the network core takes it ("path0:drop@0s+60s").
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path


def inject(faults, node):
    """Cause whatever is wished for this node, as soon as it is."""
    from torchrelay.netpath.native.library import load

    done = ""
    while True:
        wish = json.loads(faults.read_text()).get(node, "")
        wish = wish if isinstance(wish, str) else ""
        if wish != done and load().free.np_inject(wish.encode()) == 0:
            done = wish
        time.sleep(0.1)


if __name__ == "__main__":
    node = os.environ["TORCHRELAY_NODE"]
    number = int(node.removeprefix("node-")) + 1
    os.environ["TORCHRELAY_NET_PATHS"] = f"127.0.95.{number},127.0.96.{number}"
    threading.Thread(target=inject, args=(Path(sys.argv.pop(1)), node), daemon=True).start()
    script = Path(__file__).with_name("faulty.py")
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
