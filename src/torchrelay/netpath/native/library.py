"""The shared object of the network part: where it is, and how it is opened.

It is compiled from `native/netpath` when the package is installed. Where that was not possible all else works, and
whoever asks for this part is told what to do.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

PATH = Path(__file__).parents[1].joinpath("libnccl-net-torchrelay.so")
REMEDY = (
    "install a C compiler (or name one in CC), and install torchrelay again: pip install --force-reinstall --no-deps"
)


class NotBuilt(RuntimeError):
    """The network part is not there, or does not load; the text says why and what to do."""


def find() -> Path:
    """The shared object. Raises `NotBuilt`."""
    if not PATH.is_file():
        raise NotBuilt(f"torchrelay's network part is not built: there is no {PATH}; {REMEDY}")
    return PATH


class Library:
    """The calls of netpath.h. `free` lets other threads run Python during a call; `brief`, for short ones, does not."""

    def __init__(self, path: Path) -> None:
        try:
            self.free = ctypes.CDLL(str(path))
            self.brief = ctypes.PyDLL(str(path))
        except OSError as error:
            raise NotBuilt(f"torchrelay's network part does not load: {error}; {REMEDY}") from error
        for calls in (self.free, self.brief):
            _declare(calls)

    def error(self) -> str:
        """What this thread's last call that failed has said."""
        text: bytes = self.brief.np_error()
        return text.decode(errors="replace")

    def version(self) -> str:
        text: bytes = self.brief.np_version()
        return text.decode(errors="replace")


@cache
def load() -> Library:
    """The library, opened once in a process. Raises `NotBuilt`."""
    return Library(find())


def _declare(calls: ctypes.CDLL) -> None:
    """What each call takes and returns; as in native/netpath/netpath.h."""
    pointer, size, whole, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64
    to_pointer, to_whole, to_size = map(ctypes.POINTER, (pointer, whole, size))
    takes = {
        "np_start": (pointer,),
        "np_stop": (),
        "np_paths": (pointer, whole),
        "np_counts": (pointer, whole),
        "np_listen": (pointer, to_pointer),
        "np_connect": (pointer, number, to_pointer),
        "np_forget": (pointer,),
        "np_accept": (pointer, number, to_pointer),
        "np_isend": (pointer, pointer, size, to_pointer),
        "np_irecv": (pointer, pointer, size, to_pointer),
        "np_test": (pointer, to_whole, to_size),
        "np_wait": (pointer, whole, to_whole, to_size),
        "np_abort": (pointer,),
        "np_close": (pointer,),
        "np_close_listener": (pointer,),
        "np_inject": (ctypes.c_char_p,),
        "np_error": (),
        "np_version": (),
    }
    for name, arguments in takes.items():
        getattr(calls, name).argtypes = arguments
        getattr(calls, name).restype = whole
    calls.np_stop.restype = None
    calls.np_error.restype = calls.np_version.restype = ctypes.c_char_p
