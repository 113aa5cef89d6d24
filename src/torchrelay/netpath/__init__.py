"""The network part: messages over several paths at once, for NCCL as a plugin and for CPU tensors as a backend.

    library        finds and opens the shared object that the package's build made
    binding        its calls, typed
    environment    what switches the NCCL plugin on
    stats          the pages of figures that processes with a network keep
    mesh           the comms between the ranks of a group, connected when they are first used
    line           one collective of a group at a time
    rings, direct  how collectives travel: large ones and small ones
    reduction      what is done to two ranks' values
    messages       from one rank to another: send and recv
    work           what a collective gives back: to wait for, and a future
    backend        the torch.distributed backend "torchrelay" for CPU tensors

`backend` and what it stands on imports torch, all else does not. Nothing is imported here.
"""
