"""The process group of a port on CPUs: one gloo process for each rank."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from typing import Any, Final

from torch import distributed

_OF_ONE_RANK: Final = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(slots=True)
class _Made:
    """What was made here, and is undone again.

    Attributes:
        variables: Names of variables of the environment.
        is_group: Whether the process group.
    """

    variables: list[str] = field(default_factory=list)
    is_group: bool = False

    def set(self, name: str, value: str) -> None:
        """Set a variable that is not there."""
        if name not in os.environ:
            os.environ[name] = value
            self.variables.append(name)


_made: Final = _Made()


def join_ranks() -> None:
    """Join the other ranks that the environment names, as launchers do; alone, be the only rank.

    NxD asks for a process group even for one rank, and NxDI for a variable that says that a CPU runs. Models
    need the group for as long as they run, so that it lasts until the process ends, or `leave_ranks`.
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
    if not _made.is_group:
        atexit.register(leave_ranks)
    _made.is_group = True


def leave_ranks() -> None:
    """Undo `join_ranks`: leave its group, and unset its variables; a group that was there before stays.

    A rank that ends without leaving may cut off others that still talk to it.
    """
    for name in _made.variables:
        os.environ.pop(name, None)
    _made.variables.clear()
    if _made.is_group and distributed.is_initialized():
        distributed.destroy_process_group()
    _made.is_group = False
    atexit.unregister(leave_ranks)
