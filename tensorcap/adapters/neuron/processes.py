"""The process group of a port on CPUs: one gloo process for each rank."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, Final

from torch import distributed

_OF_ONE_RANK: Final = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def join_ranks() -> None:
    """Join the other ranks that the environment names, as launchers do; alone, be the only rank.

    NxD asks for a process group even for one rank, and NxDI for a variable that says that a CPU runs. An
    application that joins by itself later, in `to_cpu`, finds that done.
    """
    os.environ.setdefault("NXD_CPU_MODE", "1")
    if not distributed.is_available() or distributed.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        distributed.init_process_group("gloo")
        _join_once()
        return
    for name, value in _OF_ONE_RANK.items():
        os.environ.setdefault(name, value)
    make_store: Any = distributed.TCPStore  # type: ignore[attr-defined] # torch does not export it by name
    store = make_store("127.0.0.1", 0, world_size=1, is_master=True)  # at a port that is free
    os.environ.setdefault("MASTER_PORT", str(store.port))
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _join_once()


def _join_once() -> None:
    """Have calls that would join over gloo again return, as long as this process is in the group."""
    join = distributed.init_process_group

    @wraps(join)
    def join_unless_joined(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if not (distributed.is_initialized() and backend in (None, "gloo")):
            join(backend, *args, **kwargs)

    distributed.init_process_group = join_unless_joined
