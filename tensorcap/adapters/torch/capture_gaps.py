"""What hooks cannot see in a torch model, or would change: found, told, and put out of the way if asked for.

`nn.TransformerEncoderLayer` computes all of itself by one kernel (its *fast path*) where no gradient is
wanted, the mode is evaluation, and no module of it has a hook. So that it goes on doing so, such a layer and
what it holds are looked at by functions in the place of their `forward`, and torch decides as without them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.direct_calls import surroundings
from tensorcap.adapters.torch.tapped import Tapped
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Call, Recorder
from tensorcap_formats.errors import UsageError

_FUNCTIONS: Final = (FunctionType, MethodType)
_SCRIPTED: Final = "scripted or traced (torch.jit); capture the module that it was made from"
COMPILED: Final = "inside a compiled graph (torch.compile); --eager runs it as plain code"
_FUSED: Final = "inside the fast path of torch.nn.TransformerEncoderLayer; --eager runs it as plain code"
_ATTENTION: Final = "scaled_dot_product_attention"


def capture_gaps(modules: Mapping[str, nn.Module], *, eager: bool) -> dict[str, str]:
    """Why modules cannot be captured, by name; empty for those that can.

    Args:
        modules: By name, each behind the one that it is in.
        eager: Whether compiled parts will run as plain code.
    """
    found: dict[str, str] = {}
    inside: dict[str, str] = {}
    for name, module in modules.items():
        obstacle = inside.get(name.rpartition(".")[0], "") if name else ""
        below = obstacle
        if isinstance(module, torch.jit.ScriptModule):
            obstacle = below = obstacle or _SCRIPTED
        elif not eager and getattr(module, "_compiled_call_impl", None) is not None:
            obstacle = below = obstacle or COMPILED
        elif not eager and (_is_compiled_wrapper(module) or is_compiled(module.forward)):
            below = obstacle or COMPILED
        found[name], inside[name] = obstacle, below
    return found


def is_compiled(function: object) -> bool:
    """Whether torch.compile made this function, or method."""
    return (
        isinstance(function, _FUNCTIONS)
        and hasattr(function, "_torchdynamo_orig_callable")
        and not getattr(function, "_torchdynamo_disable", False)
    )


def holds_compiled(module: nn.Module, known: dict[type, bool]) -> bool:
    """Whether the module has a compiled method; compiled before, it calls no hooks that came later.

    Args:
        module: The module.
        known: The answer for each class that was asked for before, without what a module itself has.
    """
    cls = type(module)
    if cls not in known:
        bases = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
        known[cls] = any(is_compiled(value) for c in bases for value in vars(c).values())
    return known[cls] or any(type(v) in _FUNCTIONS and is_compiled(v) for v in vars(module).values())


def _is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether the module is what torch.compile made of another; its own arguments and result are seen."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and hasattr(module, "_orig_mod")


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled functions, and the fused layers of `torch.nn`, as plain code until the block ends.

    Raises:
        UsageError: This release of torch cannot do that.
    """
    if not hasattr(torch.compiler, "set_stance"):
        raise UsageError(
            f"eager: torch {torch.__version__} has no torch.compiler.set_stance, expected 2.6 or newer",
            hint="Capture the model before it is compiled.",
        )
    is_fast = torch.backends.mha.get_fastpath_enabled()
    with torch.compiler.set_stance("force_eager"):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)


def fused_layers(modules: Iterable[nn.Module]) -> dict[int, list[nn.Module]]:
    """The layers that torch may compute by one kernel: what each holds, itself too, by the layer's id.

    Those that somebody has hooked are not among them: torch computes them in parts.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    layers = [m for m in modules if isinstance(m, nn.TransformerEncoderLayer)]
    found = {id(layer): list(layer.modules()) for layer in layers}
    return {
        number: held
        for number, held in found.items()
        if not any(m._forward_hooks or m._forward_pre_hooks for m in held)
    }


@contextmanager
def around_forward(
    module: nn.Module, tapped: Tapped, inner: Iterable[Point], note_compiled: Callable[[], None]
) -> Iterator[None]:
    """Record the calls of a module without a hook, until the block ends.

    Args:
        module: The module.
        tapped: What records it.
        inner: Of a layer that torch may compute by one kernel: the points of what it holds.
        note_compiled: Called while the call is being compiled.
    """
    around = Around(module, tapped, tuple(inner), note_compiled)
    module.forward = around
    try:
        yield
    finally:
        if vars(module).get("forward") is around:
            around.lift()


class Around:
    """Stands in the place of a module's `forward`."""

    def __init__(
        self,
        module: nn.Module,
        tapped: Tapped,
        inner: tuple[Point, ...],
        note_compiled: Callable[[], None],
    ) -> None:
        """Prepare; see `around_forward`."""
        self._module = module
        self._is_own = "forward" in vars(module)
        self._original: Any = module.forward
        self._tapped = tapped
        self._inner = inner
        self._note_compiled = note_compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original `forward`, and record the call if it is not being compiled."""
        if torch.compiler.is_compiling():
            self._note_compiled()
            return self._original(*args, **kwargs)
        with surroundings(self._module):
            return self._record(args, kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tapped, token = self._tapped, id(sys._getframe())
        call = tapped.begin(self._module, token)
        if call is None:
            tapped.follow_inputs(token, args, kwargs)
        else:
            args, kwargs = tapped.given(call, args, kwargs)
        seen = sum(point.calls for point in self._inner)
        output = self._original(*args, **kwargs)
        if torch._C._get_tracing_state() is None:
            if call is None:
                tapped.follow_output(token, output)
            elif sum(point.calls for point in self._inner) == seen:
                _tell_fused(tapped.recorder, self._inner, call)
            output = tapped.end(tapped.recorder.leave(tapped.point, token), output)
        return output

    def lift(self) -> None:
        """Let the module have what stood here before."""
        if self._is_own:
            self._module.forward = self._original
        else:
            del self._module.forward

    def __reduce__(self) -> Any:
        return self._original.__reduce__()  # a copy of the model has what stood here before


def _tell_fused(recorder: Recorder, inner: Iterable[Point], call: Call) -> None:
    for point in inner:
        recorder.lose(point, "output", _FUSED, call=call._replace(point=point, number=0))


def attention_note(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """What to say of attention whose scores no module returns; empty where there is none."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(name, str):
        if "eager" in name:
            return ""
        return (
            f"attention is fused ({name}): its scores are in no module's output; --level op records what "
            "goes into it, attn_implementation=eager computes them openly"
        )
    codes: dict[Any, bool] = {}
    for module in modules:
        forward = getattr(type(module), "forward", None)
        function = getattr(inspect.unwrap(forward) if forward else None, "__code__", None)
        if function not in codes:
            codes[function] = isinstance(function, CodeType) and _names_attention(function)
        if codes[function] or isinstance(module, nn.MultiheadAttention):
            return (
                f"attention is fused ({type(module).__name__}): its scores are in no module's output; "
                "--level op records what goes into it"
            )
    return ""


def _names_attention(code: CodeType) -> bool:
    return _ATTENTION in code.co_names or any(
        _names_attention(c) for c in code.co_consts if isinstance(c, CodeType)
    )
