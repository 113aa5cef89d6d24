"""Tail: what a newcomer's script does between its last recorded call and the edge, all by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.errors import Undeclared


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass work
    """While it is entered, a collective raises `Undeclared`: its result would be wrong, as nobody else is there."""

    def begin(self) -> None:
        """From now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """No longer."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        function: Callable[..., Any] = func
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Undeclared(
                f"the script calls {func.__name__.split('.')[0].rstrip('_')} between two steps, in no section: "
                "a worker that takes over a rank cannot do that alone. Put it into run.section(function, ...)"
            )
        return function(*args, **(kwargs or {}))
