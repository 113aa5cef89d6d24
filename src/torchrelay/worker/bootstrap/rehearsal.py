"""Rehearsal: a tiny training step, so that a spare has the costs of a first time behind itself.

First uses are slow: autograd's machinery, optimizers (they import a compiler), DDP's reducer. Afterwards everything is
as it was: no process group, and the random state put back.
"""

from __future__ import annotations

import gc
import warnings

import numpy.random  # noqa: F401  its generator is part of the random state from the start, seeded or not
import torch
from torch.nn.parallel import DistributedDataParallel

from torchrelay.worker.bootstrap.wiring import destroy_really
from torchrelay.worker.parallel import ddp
from torchrelay.worker.process_groups import groups
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state import random_state
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values


def rehearse() -> None:
    """Go through a step of everything once."""
    rng = random_state.capture()
    groups.method()  # loads the compiled extension, if there is one
    groups.init_replacement("gloo", rank=0, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train()
    finally:
        destroy_really()
        gc.collect()  # what was rehearsed with must not be taken for the script's
        random_state.restore(rng)


def _train() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = State(model, optimizer)
    redo = Redo(state)
    for _ in range(2):
        redo.mark()
        redo.probe_entry()
        optimizer.zero_grad()
        with model.no_sync():  # the pretended backend cannot reduce gradients
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
        redo.probe_gate()
        optimizer.step()
        values.decode(values.encode(loss, "loss"))
    for wrapper, layout in zip(state.ddps(), state.ddp_layouts(), strict=True):
        ddp.renew(wrapper, layout)
    state.receive(state.manifest()[0])
    state.digest()
