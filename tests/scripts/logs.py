"""Logs and warns as scripts do: logs.py [basic]."""

import logging
import os
import sys
import warnings

import torch  # noqa: F401  as any script does

if "basic" in sys.argv:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
os.environ.get("RANK")
logging.getLogger("mine").info("an info")
logging.getLogger("mine").warning("a warning")
logging.getLogger("another").error("another library")
logging.info("from the root")
warnings.warn("warned", stacklevel=1)
logging.captureWarnings(True)
warnings.warn("captured", stacklevel=1)
print(len(logging.getLogger().handlers), logging.getLogger().level)
