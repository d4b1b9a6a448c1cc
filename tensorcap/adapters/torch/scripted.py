"""Hide our hooks and replacements from torch.jit, which reads the hooks and the source of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.torch.direct_calls import restore_forwards
from tensorcap.workload import replace_attribute


@contextmanager
def script_as_written() -> Iterator[None]:
    """Have torch.jit.script see modules, in the block, without our hooks and replacements."""
    recursive: Any = getattr(torch.jit, "_recursive", None)
    if not hasattr(recursive, "create_script_module"):
        yield
        return

    def as_written(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def create_script_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with restore_forwards(), _without_hooks(module):
                return create(module, *args, **kwargs)

        return create_script_module

    with replace_attribute(recursive, "create_script_module", as_written):
        yield


@contextmanager
def _without_hooks(root: nn.Module) -> Iterator[None]:
    """Take our hooks off a module and its children until the block ends."""
    with ExitStack() as stack:
        for module in root.modules():
            hooks: Any
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                ours = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
                for key in ours:
                    del hooks[key]
                stack.callback(hooks.update, ours)  # last again, which is their place
        yield


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.partition(".")[0] == __name__.partition(".")[0]
