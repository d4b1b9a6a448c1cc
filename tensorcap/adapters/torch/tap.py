"""Hooks on torch modules: each call's inputs before it, each call's outputs after it.

A hook returns nothing, unless a substitution replaces a value; it keeps nothing, and runs no torch function
that a mode of the user would see. The values are on their way to the disk before it returns, and before they
are replaced, so what is written in place later does not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.capture_gaps import (
    COMPILED,
    holds_compiled,
    run_while_compiling,
)
from tensorcap.adapters.torch.direct_calls import direct_calls
from tensorcap.adapters.torch.gradients import Gradients
from tensorcap.adapters.torch.module_tap import ModuleTap
from tensorcap.adapters.torch.modules import argument_names, tree
from tensorcap.adapters.torch.scripted import script_as_written
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.recording import Point, Recorder, Substitution
from tensorcap_formats.keys import escape, module_site

_OVERTAKEN: Final = "a hook that was added in the block came after ours and may have changed it"
_REPLACED: Final = "another module took its place in the block, without a hook"
_MAYBE_COMPILED: Final = "not seen to be called, or inside code that torch.compile made before"


@contextmanager
def tap(
    modules: Mapping[str, nn.Module],
    root: nn.Module,
    names: Collection[str],
    leaves: TensorLeaves,
    *,
    inputs: bool,
    gradients: Gradients | None = None,
    substitution: Substitution | None = None,
) -> Iterator[None]:
    """Hook the named modules, and the root, until the block ends, however it ends.

    Modules that are added to the model in the block, and hooks that are removed, are reported at its end.
    """
    recorder = leaves.recorder
    signatures: dict[Any, list[str]] = {}
    hooked: list[tuple[nn.Module, ModuleTap]] = []
    with ExitStack() as hooks:
        for name, module in modules.items():
            is_root = module is root
            if name not in names and not (is_root and recorder.points[name].is_capturable):
                continue
            slots = tuple(f"input.{escape(n)}" for n in argument_names(module, signatures))
            point, with_inputs = recorder.points[name], inputs or is_root
            module_tap = ModuleTap(
                point, recorder, leaves, slots, with_inputs, is_root, gradients, substitution
            )
            before = module.register_forward_pre_hook(_Before(module_tap), with_kwargs=True)
            after = module.register_forward_hook(_After(module_tap), with_kwargs=True)
            module_tap.before_id, module_tap.after_id = before.id, after.id
            hooks.callback(before.remove)
            hooks.callback(after.remove)
            hooked.append((module, module_tap))
        hooks.enter_context(direct_calls(hooked))
        hooks.enter_context(script_as_written())
        try:
            yield
        finally:
            _report_removed(hooked)
            _report_unhooked(modules, root, recorder)


def _report_removed(hooked: Iterable[tuple[nn.Module, ModuleTap]]) -> None:
    for module, tapped in hooked:
        if not (tapped.before_id in module._forward_pre_hooks and tapped.after_id in module._forward_hooks):
            tapped.recorder.lose(tapped.point, "output", "its hook was removed before the block ended")


def _report_unhooked(modules: Mapping[str, nn.Module], root: nn.Module, recorder: Recorder) -> None:
    """Report the modules that had no hook of ours, and those that may have run without calling it."""
    known = set(map(id, modules.values()))
    for name, module in tree(root)[0].items():
        if name not in modules:
            if id(module) not in known:
                recorder.add_point(name, module_site(name), "added in the block, so without a hook")
        elif module is not modules[name]:
            recorder.lose(recorder.points[name], "output", _REPLACED)
    answers: dict[type, bool] = {}
    for name, module in modules.items():
        if holds_compiled(module, answers):
            prefix = f"{name}." if name else ""
            for inner, point in recorder.points.items():
                is_silent = not (point.calls or point.lost or point.reason)
                if inner and inner.startswith(prefix) and is_silent:
                    recorder.lose(point, "output", _MAYBE_COMPILED)


class _Hook:
    """A hook of ours. A copy or a pickle of the model gets a hook in its place that does nothing."""

    def __init__(self, module_tap: ModuleTap) -> None:
        self._tap = module_tap

    def __reduce__(self) -> tuple[Any, ...]:
        # takes any arguments and returns None; a pickle that names nothing of ours can be read anywhere
        return getattr, (nullcontext(), "__exit__")


class _Before(_Hook):
    def __init__(self, module_tap: ModuleTap) -> None:
        super().__init__(module_tap)
        self._note_compiled = _compile_note(module_tap.recorder, module_tap.point)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            self._note_compiled()
            return None
        tapped = self._tap
        token = id(sys._getframe(1))
        call = tapped.begin(module, token)
        if call is None:
            tapped.follow_inputs(token, args, kwargs)
            return None
        hooks: Any = module._forward_hooks
        if next(reversed(hooks), None) != tapped.after_id and not _is_last(hooks, tapped.after_id):
            hooks[tapped.after_id] = hooks.pop(tapped.after_id)  # in time for this call
        if tapped.inputs or tapped.substitution is not None:
            hooks = module._forward_pre_hooks
            if next(reversed(hooks), None) != tapped.before_id and not _is_last(hooks, tapped.before_id):
                hooks[tapped.before_id] = hooks.pop(tapped.before_id)  # in time for the next call
                tapped.recorder.lose(tapped.point, "input", _OVERTAKEN, required=tapped.is_root)
            inputs = tapped.process_inputs(call, args, kwargs)
            return None if tapped.substitution is None else inputs
        return None


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        tapped = self._tap
        recorder, point = tapped.recorder, tapped.point
        token = id(sys._getframe(1))
        call = recorder.leave(point, token)
        if call is None:
            tapped.follow_output(token, output)
        elif recorder.is_recording:
            hooks: Any = module._forward_hooks
            if next(reversed(hooks), None) != tapped.after_id and not _is_last(hooks, tapped.after_id):
                recorder.lose(point, "output", _OVERTAKEN)
        result = tapped.end(call, output)
        return None if result is output else result


def _is_last(hooks: Any, own: int) -> bool:
    """Whether only hooks of ours come after this one, or it is not there."""
    if own not in hooks:
        return True
    for key in reversed(hooks):
        if key == own:
            return True
        if not isinstance(hooks[key], _Hook):
            return False
    return True


def _compile_note(recorder: Recorder, point: Point) -> Callable[[], None]:
    """Make a function that reports a module whose calls are compiled."""

    def note() -> None:
        recorder.lose(point, "output", COMPILED)

    return run_while_compiling(note)
