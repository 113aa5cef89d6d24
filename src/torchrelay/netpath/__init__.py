"""The network part: messages over several paths at once, for NCCL as a plugin and for CPU tensors as a backend.

    library        finds and opens the shared object that the package's build made
    binding        its calls, typed
    environment    what switches the NCCL plugin on
    mesh           the comms between the ranks of a group, connected when they are first used
    line           one collective of a group at a time
    collectives    how they travel: `rings`, large ones, and `direct`, small ones
    tensors        as collectives want them
    reduction      what is done to two ranks' values
    messages       from one rank to another: send and recv
    work           what a collective gives back: to wait for, and a future
    connections    all of these of one group, replaced when it is connected anew
    group          the process group: its life, and what is the same for all collectives
    backend        the torch.distributed backend "torchrelay" for CPU tensors

`backend` and what it stands on imports torch, all else does not. Nothing is imported here.
"""
