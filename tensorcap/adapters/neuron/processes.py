"""The process group of a port on CPUs: one gloo process for each rank."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

from torch import distributed

_OF_ONE_RANK: Final = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(slots=True)
class _Made:
    """What was made here, and is undone again.

    Attributes:
        variables: Names of variables of the environment.
        join: The function by which processes join, if there is a group that was made here.
    """

    variables: list[str] = field(default_factory=list)
    join: Callable[..., None] | None = None

    def set(self, name: str, value: str) -> None:
        """Set a variable that is not there."""
        if name not in os.environ:
            os.environ[name] = value
            self.variables.append(name)


_made: Final = _Made()


def join_ranks() -> None:
    """Join the other ranks that the environment names, as launchers do; alone, be the only rank.

    NxD asks for a process group even for one rank, and NxDI for a variable that says that a CPU runs. An
    application that joins by itself later, in `to_cpu`, finds that done. Models need the group for as long as
    they run, so that it lasts until the process ends, or `leave_ranks`.
    """
    _made.set("NXD_CPU_MODE", "1")
    if not distributed.is_available() or distributed.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        distributed.init_process_group("gloo")
    else:
        for name, value in _OF_ONE_RANK.items():
            _made.set(name, value)
        make_store: Any = distributed.TCPStore  # type: ignore[attr-defined] # torch does not export it by name
        store = make_store("127.0.0.1", 0, world_size=1, is_master=True)  # at a port that is free
        _made.set("MASTER_PORT", str(store.port))
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _join_once()


def leave_ranks() -> None:
    """Undo `join_ranks`: leave its group, and unset its variables; a group that was there before stays.

    A rank that ends without leaving may cut off others that still talk to it.
    """
    for name in _made.variables:
        os.environ.pop(name, None)
    _made.variables.clear()
    if _made.join is not None:
        distributed.init_process_group = _made.join
        if distributed.is_initialized():
            distributed.destroy_process_group()
    _made.join = None
    atexit.unregister(leave_ranks)


def _join_once() -> None:
    """Have calls that would join over gloo again return, as long as this process is in the group."""
    if _made.join is not None:
        return
    join = _made.join = distributed.init_process_group
    atexit.register(leave_ranks)

    @wraps(join)
    def join_unless_joined(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if not (distributed.is_initialized() and backend in (None, "gloo")):
            join(backend, *args, **kwargs)

    distributed.init_process_group = join_unless_joined
