"""When ops are looked at: a dispatch mode that is on while a call of one of some modules is under way."""

from __future__ import annotations

import difflib
import fnmatch
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatching

from tensorcap.adapters.torch.capture_gaps import fused_layers
from tensorcap.adapters.torch.direct_calls import around_direct_calls
from tensorcap.adapters.torch.frames import TRACED, TRANSFORMED
from tensorcap.adapters.torch.ops import Ops
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.recording.point import Point
from tensorcap.workload.sources import class_name
from tensorcap_formats.errors import UsageError, abbreviate

_CALL: Final = nn.Module._call_impl.__code__
_WHOLE_BLOCK: Final = 0  # a token that no frame has
_set_eval_frame: Final = torch._C._dynamo.eval_frame.set_eval_frame


@contextmanager
def ops(
    root: nn.Module, modules: Mapping[str, nn.Module], ops_in: Sequence[str], leaves: TensorLeaves
) -> Iterator[None]:
    """Record the ops within calls of modules until the block ends.

    In the thread that begins the block, and without globs, ops outside of all calls are seen too, and what
    they write to is known.

    Args:
        root: The model.
        modules: All its modules, by name.
        ops_in: Globs of the modules whose ops, and those of what is below them, are recorded; all if empty.
        leaves: Take the tensors.

    Raises:
        UsageError: A glob matches no module.
    """
    recorded = Ops(modules, leaves)
    points = {name: leaves.recorder.points[name] for name in modules}
    names = below(class_name(root), ops_in, points) if ops_in else list(modules)
    view = _View(recorded)
    unhooked = {id(module) for held in fused_layers(modules.values()).values() for module in held}
    with ExitStack() as stack:
        stack.callback(recorded.finish)
        stack.callback(view.shut)
        for name in names:
            if points[name].is_capturable and id(modules[name]) not in unhooked:
                stack.callback(modules[name].register_forward_pre_hook(_Opening(view)).remove)
                closing = modules[name].register_forward_hook(_Closing(view), always_call=True)
                stack.callback(closing.remove)
        around = view.around({id(modules[name]) for name in names})
        stack.enter_context(around_direct_calls(around))
        if not ops_in:
            view.open(_WHOLE_BLOCK)
        yield


def below(model: str, globs: Sequence[str], points: Mapping[str, Point]) -> list[str]:
    """The names of the modules that match, and of all below them."""
    found: set[str] = set()
    known = [site for point in points.values() for site in (point.site, *point.aliases)]
    for glob in globs:
        tops = [
            name
            for name, point in points.items()
            if any(fnmatch.fnmatchcase(site, glob) for site in (point.site, *point.aliases))
        ]
        if not tops:
            close = difflib.get_close_matches(glob, known, n=3)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else None
            raise UsageError(
                f"{model}: no module matches {abbreviate(glob)!r}, whose ops are wanted, among {len(known)}",
                hint=hint,
            )
        found.update(tops)
    return [name for name in points if "" in found or any(f"{name}.".startswith(f"{top}.") for top in found)]


class _Call(NamedTuple):
    """A call that the mode is on for.

    Attributes:
        token: Tells it from the others under way in its thread.
        obstacle: Why its ops are not recorded, which they do not show; empty if they are.
    """

    token: int
    obstacle: str


class _UnderWay(threading.local):
    """Such calls in each thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class _Mode(dispatching.TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's code
    """Hands ops over."""

    supports_higher_order_operators = True

    def __init__(self, recorded: Ops, under_way: _UnderWay) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's code
        self._recorded = recorded
        self._under_way = under_way

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper would do it, which costs time and loads the compiler; see below

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = _set_eval_frame(None)  # nothing of ours is compiled
        try:
            calls = self._under_way.calls
            obstacle = calls[-1].obstacle if calls else ""
            return self._recorded.run(func, args, kwargs or {}, obstacle=obstacle)
        finally:
            _set_eval_frame(before)


class _View:
    """Switches a mode on and off, in each thread by itself."""

    def __init__(self, recorded: Ops) -> None:
        self._recorded = recorded
        self._under_way = _UnderWay()
        self._mode = _Mode(recorded, self._under_way)

    def open(self, token: int) -> None:
        """A call begins."""
        calls = self._under_way.calls
        if not calls:
            self._recorded.look_again()
            self._mode.__enter__()  # type: ignore[no-untyped-call] # torch's code
        calls.append(_Call(token, _obstacle()))

    def close(self, token: int) -> None:
        """The call of the token is over, if it had begun, and those inside it."""
        calls = self._under_way.calls
        for i, call in enumerate(calls):
            if call.token == token:
                del calls[i:]
                if not calls:
                    self._switch_off()
                break

    def shut(self) -> None:
        """All is over in this thread."""
        if self._under_way.calls:
            self._under_way.calls.clear()
            self._switch_off()

    def around(self, modules: set[int]) -> Callable[[nn.Module], AbstractContextManager[None]]:
        """Opens and closes the view around direct calls of the `forward` of modules with these ids."""

        @contextmanager
        def opened() -> Iterator[None]:
            token = id(sys._getframe())
            self.open(token)
            try:
                yield
            finally:
                self.close(token)

        return lambda module: opened() if id(module) in modules else nullcontext()

    def _switch_off(self) -> None:
        """Take our mode off the stack, wherever it is: a hook may have put another one on it."""
        above = []
        while dispatching._get_current_dispatch_mode() not in (self._mode, None):
            above.append(dispatching._pop_mode())
        if dispatching._get_current_dispatch_mode() is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch's code
        for mode in reversed(above):
            dispatching._push_mode(mode)


class _Hook:
    """A hook of ours. A copy of the model, and a pickle, get one in its place that does nothing."""

    def __init__(self, view: _View) -> None:
        self._view = view

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None


class _Opening(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._view.open(_token())


class _Closing(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._view.close(_token())


def _obstacle() -> str:
    """Why the ops of a call that begins now are not those that the user wrote; empty if they are."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return TRANSFORMED
    return "" if torch._C._get_tracing_state() is None else TRACED


def _token() -> int:
    """The id of the frame of the module's call that runs a hook, also of one that runs after an error."""
    frame = sys._getframe(2)
    while frame.f_code is not _CALL and frame.f_back is not None:
        frame = frame.f_back
    return id(frame)
