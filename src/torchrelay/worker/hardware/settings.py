"""Settings of a process that numbers are computed with: torch's, NumPy's, and those of Python's `decimal`.

A step may change one, as `torch.set_default_dtype` does: a replacement would compute otherwise. They are looked at as
values in a dict, which asks for each when it is read, and sets it when it is written to: some 5 µs for all of them.
What is for a while only, as `no_grad` and `autocast` are, is not among them: a step leaves it when it ends. One that
a step has set around its update only is told once more when the step has returned.
"""

from __future__ import annotations

import decimal
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_core: Any = torch._C
_DENORMAL = [5e-324]  # in a list: the product is not to be known when this is compiled
_Ask = Callable[[], Any]
_Set = Callable[[Any], object]


def _of_core(name: str) -> tuple[_Ask, _Set]:
    return getattr(_core, f"_get_{name}"), getattr(_core, f"_set_{name}")


# Operations inherit theirs from what comes before them, so they are set in this order; since torch 2.9.
_DEVICES = ("cuda", "mkldnn") if torch.backends.cuda.is_built() else ("mkldnn",)  # type: ignore[no-untyped-call]
_PRECISIONS = (
    ("generic", "all"),
    *((device, "all") for device in _DEVICES),
    *((device, kind) for device in _DEVICES for kind in ("matmul", "conv", "rnn")),
)
_cudnn: _Ask = _core._get_cudnn_allow_tf32
_MIXED = "mixed"  # torch refuses to say, as the script has set precisions in the new way too


def _or_mixed(ask: _Ask) -> str:
    try:
        return str(ask())
    except RuntimeError:
        return _MIXED


def _ask_precisions() -> str:
    """All in one: of products, and whether cuDNN may use TF32, as older scripts set them; then of each place."""
    found = [_or_mixed(_core._get_float32_matmul_precision), *([_or_mixed(_cudnn)] if "cuda" in _DEVICES else [])]
    return " ".join([*found, *itertools.starmap(_core._get_fp32_precision_getter, _PRECISIONS)])


def _set_precisions(told: str) -> None:
    """The older ways first: they set some of the places, too."""
    products, *rest = told.split()
    if products not in (_MIXED, _or_mixed(_core._get_float32_matmul_precision)):
        _core._set_float32_matmul_precision(products)
    if "cuda" in _DEVICES and rest.pop(0) != _or_mixed(_cudnn):
        # Mixed is what the flag says if it is not what the places say.
        uses = rest[_PRECISIONS.index(("cuda", "conv"))] == "tf32"
        _core._set_cudnn_allow_tf32(uses if told.split()[1] == str(uses) else not uses)
    for place, value in zip(_PRECISIONS, rest, strict=True):
        if _core._get_fp32_precision_getter(*place) != value:
            _core._set_fp32_precision_setter(*place, value)


def _ask_reduction(kind: str) -> str:
    found = getattr(_core, f"_get_cublas_allow_{kind}_reduced_precision_reduction")()
    return " ".join(str(int(one)) for one in (found if isinstance(found, tuple) else (found,)))


def _set_reduction(kind: str, told: str) -> None:
    getattr(_core, f"_set_cublas_allow_{kind}_reduced_precision_reduction")(*(one == "1" for one in told.split()))


def _ask_attention() -> int:
    """Which kernels scaled_dot_product_attention may use, on the CPU, too: a bit for each."""
    flash, efficient, plain, cudnn, reduced = [ask() for ask, _ in _ATTENTION]
    return int(flash | efficient << 1 | plain << 2 | cudnn << 3 | reduced << 4)


def _set_attention(told: int) -> None:
    for at, (_, put) in enumerate(_ATTENTION):
        put(bool(told >> at & 1))


_errors = getattr(getattr(np, "_core", None), "umath", None)
_of_errors: Any = getattr(_errors, "_extobj_contextvar", None)  # of NumPy 2: another object when it is set
_said: tuple[Any, str] = (None, "")


def _ask_errors() -> str:
    global _said
    here = None if _of_errors is None else _of_errors.get(_DENORMAL)
    if here is None or here is not _said[0]:
        _said = here, " ".join(map(str, np.geterr().values()))
    return _said[1]


def _set_errors(told: str) -> None:
    kinds: Any = dict(zip(np.geterr(), told.split(), strict=True))
    np.seterr(**kinds)


def _ask_decimal() -> str:
    context = decimal.getcontext()
    return f"{context.prec} {context.rounding}"


_of_dtypes: dict[torch.dtype, str] = {}


def _ask_dtype() -> str:
    here = torch.get_default_dtype()
    return _of_dtypes.get(here) or _of_dtypes.setdefault(here, str(here))


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _set_decimal(told: str) -> None:
    context, (digits, rounding) = decimal.getcontext(), told.split()
    context.prec, context.rounding = int(digits), rounding


_ATTENTION: tuple[tuple[_Ask, _Set], ...] = (
    (_core._get_flash_sdp_enabled, _core._set_sdp_use_flash),
    (_core._get_mem_efficient_sdp_enabled, _core._set_sdp_use_mem_efficient),
    (_core._get_math_sdp_enabled, _core._set_sdp_use_math),
    (_core._get_cudnn_sdp_enabled, _core._set_sdp_use_cudnn),
    _of_core("math_sdp_allow_fp16_bf16_reduction"),
)
_ON_CUDA: dict[str, tuple[_Ask, _Set]] = {
    "torch.backends.cudnn.enabled": _of_core("cudnn_enabled"),
    "torch.backends.cudnn.benchmark": _of_core("cudnn_benchmark"),
    "torch.backends.cudnn.deterministic": _of_core("cudnn_deterministic"),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": _of_core("cublas_allow_fp16_accumulation"),
    **{
        f"torch.backends.cuda.matmul.allow_{kind}_reduced_precision_reduction": (
            functools.partial(_ask_reduction, kind),
            functools.partial(_set_reduction, kind),
        )
        for kind in ("fp16", "bf16")
    },
}
_TABLE: dict[str, tuple[_Ask, _Set]] = {
    "torch.get_default_dtype()": (_ask_dtype, lambda value: torch.set_default_dtype(_dtype(value))),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.get_float32_matmul_precision()": (_ask_precisions, _set_precisions),
    "torch.nn.attention.sdpa_kernel()": (_ask_attention, _set_attention),
    "torch.get_deterministic_debug_mode()": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.set_flush_denormal()": (lambda: _DENORMAL[0] * 1.0 == 0.0, torch.set_flush_denormal),
    "torch.backends.mkldnn.enabled": _of_core("mkldnn_enabled"),
    "torch.backends.mkldnn.deterministic": _of_core("mkldnn_deterministic"),
    "torch.backends.nnpack.enabled": _of_core("nnpack_enabled"),
    "numpy.geterr()": (_ask_errors, _set_errors),
    "decimal.getcontext()": (_ask_decimal, _set_decimal),
    **(_ON_CUDA if torch.backends.cuda.is_built() else {}),  # type: ignore[no-untyped-call]
}


class Settings(dict[str, Any]):
    """By what a script asks for them; nothing is kept here. None: torch does not say; that is never set."""

    def get(self, name: str, default: Any = None) -> Any:
        """As it is now."""
        return self[name] if name in _TABLE else default

    def __getitem__(self, name: str) -> Any:
        try:
            return _TABLE[name][0]()
        except RuntimeError:
            return None

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not None and value != self[name]:
            _TABLE[name][1](value)

    def __contains__(self, name: object) -> bool:
        return name in _TABLE


SETTINGS = Settings()
NAMES = tuple(_TABLE)
