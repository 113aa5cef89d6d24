"""Settings of a process that numbers are computed with: torch's, NumPy's, and those of Python's `decimal`.

A step may change one, as `torch.set_default_dtype` does: a replacement would compute otherwise. They are looked at as
values in a dict, which asks for each when it is read, and sets it when it is written to: some 5 µs for all of them.
What is for a while only, as `no_grad` and `autocast` are, is not among them: a step leaves it when it ends.
"""

from __future__ import annotations

import decimal
import functools
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


def _precisions(*places: tuple[str, str]) -> dict[str, tuple[_Ask, _Set]]:
    """Of devices and kinds of operations that have one of their own, since torch 2.9."""
    return {
        f"the precision of {device} {what}": (
            functools.partial(_core._get_fp32_precision_getter, device, what),
            functools.partial(_core._set_fp32_precision_setter, device, what),
        )
        for device, what in places
    }


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _set_decimal(told: str) -> None:
    context, (digits, rounding) = decimal.getcontext(), told.split()
    context.prec, context.rounding = int(digits), rounding


_ON_CUDA: dict[str, tuple[_Ask, _Set]] = {
    "torch.backends.cudnn.enabled": _of_core("cudnn_enabled"),
    "torch.backends.cudnn.benchmark": _of_core("cudnn_benchmark"),
    "torch.backends.cudnn.deterministic": _of_core("cudnn_deterministic"),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": _of_core("cublas_allow_fp16_accumulation"),
    "torch.backends.cuda.flash_sdp_enabled()": (_core._get_flash_sdp_enabled, _core._set_sdp_use_flash),
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        _core._get_mem_efficient_sdp_enabled,
        _core._set_sdp_use_mem_efficient,
    ),
    "torch.backends.cuda.math_sdp_enabled()": (_core._get_math_sdp_enabled, _core._set_sdp_use_math),
    "torch.backends.cuda.cudnn_sdp_enabled()": (_core._get_cudnn_sdp_enabled, _core._set_sdp_use_cudnn),
    **_precisions(("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
}
_TABLE: dict[str, tuple[_Ask, _Set]] = {
    "torch.get_default_dtype()": (
        lambda: str(torch.get_default_dtype()),
        lambda value: torch.set_default_dtype(_dtype(value)),
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.get_deterministic_debug_mode()": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.set_flush_denormal()": (lambda: _DENORMAL[0] * 1.0 == 0.0, torch.set_flush_denormal),
    "torch.backends.mkldnn.enabled": _of_core("mkldnn_enabled"),
    "torch.backends.mkldnn.deterministic": _of_core("mkldnn_deterministic"),
    # After that of all products, by which torch sets some of these.
    **_precisions(("generic", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    "numpy.geterr()": (
        lambda: " ".join(map(str, np.geterr().values())),
        lambda told: np.seterr(**dict(zip(np.geterr(), told.split(), strict=True))),
    ),
    "decimal.getcontext()": (lambda: f"{decimal.getcontext().prec} {decimal.getcontext().rounding}", _set_decimal),
    **(_ON_CUDA if torch.backends.cuda.is_built() else {}),  # type: ignore[no-untyped-call]
}


class Settings(dict[str, Any]):
    """By what a script asks for them; nothing is kept here."""

    def get(self, name: str, default: Any = None) -> Any:
        """As it is now."""
        return _TABLE[name][0]() if name in _TABLE else default

    def __getitem__(self, name: str) -> Any:
        return _TABLE[name][0]()

    def __setitem__(self, name: str, value: Any) -> None:
        if value != _TABLE[name][0]():
            _TABLE[name][1](value)

    def __contains__(self, name: object) -> bool:
        return name in _TABLE


SETTINGS = Settings()
NAMES = tuple(_TABLE)
