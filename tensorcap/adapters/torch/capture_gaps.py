"""Capture gaps: what hooks cannot see in a torch model, or would change; each with its reason or a way round.

`nn.TransformerEncoderLayer` computes all of itself by one kernel (its *fast path*) if no gradient is wanted,
the mode is evaluation, and no module of it has a hook. So that it goes on doing so, such a layer and the
modules in it are captured by functions in the place of their `forward`, and torch decides as without them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from tensorcap.adapters.torch.direct_calls import enter_contexts
from tensorcap.adapters.torch.module_tap import ModuleTap
from tensorcap.recording import Call, Point, Recorder
from tensorcap.wording import some
from tensorcap_formats.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., None])
_FUNCTIONS: Final = (FunctionType, MethodType)
COMPILED: Final = "inside a compiled graph (torch.compile); --eager runs it as plain code"
_FUSED: Final = "inside the fast path of torch.nn.TransformerEncoderLayer; --eager runs it as plain code"


def capture_gaps(modules: Mapping[str, nn.Module], *, eager: bool) -> dict[str, str]:
    """Find why modules cannot be captured: a reason by name, empty for those that can.

    Args:
        modules: The modules by name, each behind its parent.
        eager: Whether compiled parts will run as plain code.
    """
    reasons: dict[str, str] = {}
    inside: dict[str, str] = {}  # the reason for the children of a module
    for name, module in modules.items():
        gap = inside.get(name.rpartition(".")[0], "") if name else ""
        below = gap
        if isinstance(module, torch.jit.ScriptModule):
            gap = below = gap or "scripted or traced (torch.jit); capture the module that it was made from"
        elif not eager and getattr(module, "_compiled_call_impl", None) is not None:
            gap = below = gap or COMPILED
        elif not eager and (_is_compiled_wrapper(module) or is_compiled(module.forward)):
            below = gap or COMPILED
        reasons[name], inside[name] = gap, below
    return reasons


def run_while_compiling(function: _Function) -> _Function:
    """Have the compiler run a function while it builds a graph, and leave it out of the graph."""
    # What torch.compiler.assume_constant_result does, without importing the compiler
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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
        known: The answers by class, for the methods that classes have; filled by this function.
    """
    cls = type(module)
    if cls not in known:
        bases = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
        known[cls] = any(is_compiled(value) for c in bases for value in vars(c).values())
    return known[cls] or any(type(v) in _FUNCTIONS and is_compiled(v) for v in vars(module).values())


def _is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile made the module of another; hooks see its own arguments and result."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and hasattr(module, "_orig_mod")


@contextmanager
def eager_mode() -> Iterator[None]:
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
    """The layers that torch may compute by one kernel: by the layer's id, all modules in it, itself first.

    Layers with hooks are not among them: torch computes them in parts.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    layers = [m for m in modules if isinstance(m, nn.TransformerEncoderLayer)]
    parts_by_id = {id(layer): list(layer.modules()) for layer in layers}
    return {
        number: parts
        for number, parts in parts_by_id.items()
        if not any(m._forward_hooks or m._forward_pre_hooks for m in parts)
    }


class ForwardWrapper:
    """Stands in the place of a module's `forward`, and records its calls without a hook."""

    def __init__(
        self,
        module: nn.Module,
        module_tap: ModuleTap,
        inner: Sequence[Point],
        note_compiled: Callable[[], None],
    ) -> None:
        """Take the place of the original `forward`, until `unwrap`.

        Args:
            module: The module.
            module_tap: Records the calls.
            inner: If torch may compute the module by one kernel, the points of the modules in it.
            note_compiled: Called while the call is being compiled.
        """
        self._module = module
        self._is_own = "forward" in vars(module)
        self._original: Any = module.forward
        self._module_tap = module_tap
        self._inner = inner
        self._note_compiled = note_compiled
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original `forward`, and record the call if it is not being compiled."""
        if torch.compiler.is_compiling():
            self._note_compiled()
            return self._original(*args, **kwargs)
        with enter_contexts(self._module):
            return self._record(args, kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module_tap, token = self._module_tap, id(sys._getframe())
        call = module_tap.begin(self._module, token)
        if call is None:
            module_tap.follow_inputs(token, args, kwargs)
        else:
            args, kwargs = module_tap.process_inputs(call, args, kwargs)
        before = sum(point.calls for point in self._inner)
        output = self._original(*args, **kwargs)
        if torch._C._get_tracing_state() is None:
            if call is None:
                module_tap.follow_output(token, output)
            elif sum(point.calls for point in self._inner) == before:
                _lose_fused(module_tap.recorder, self._inner, call)
            output = module_tap.end(module_tap.recorder.leave(module_tap.point, token), output)
        return output

    def unwrap(self) -> None:
        """Give the module its own `forward` back, unless other code has replaced it meanwhile."""
        if vars(self._module).get("forward") is not self:
            return
        if self._is_own:
            self._module.forward = self._original
        else:
            del self._module.forward

    def __reduce__(self) -> Any:
        return self._original.__reduce__()  # a copy of the model has its own forward


def _lose_fused(recorder: Recorder, inner: Iterable[Point], call: Call) -> None:
    for point in inner:
        recorder.lose(point, "output", _FUSED, call=call._replace(point=point, number=0))


def graph_note(modules: Mapping[str, nn.Module]) -> str:
    """A note on modules of which only the parameters are left, since a graph computes them; empty if none is.

    Args:
        modules: The modules by name, each behind its parent.
    """
    fx: Any = sys.modules.get("torch.fx")  # not imported, there are no graphs
    graphs = [
        name for name, module in modules.items() if fx is not None and isinstance(module, fx.GraphModule)
    ]
    inlined = [
        name
        for name, module in modules.items()
        if type(module) is nn.Module
        and next(module.parameters(recurse=False), None) is not None
        and any(not graph or name.startswith(f"{graph}.") for graph in graphs)
    ]
    if not inlined:
        return ""
    return (
        f"an exported or traced graph computes {some(inlined)} itself: these modules are not called, and "
        "nothing of them is captured; capture the model that the graph was made from, or take --level op"
    )


def is_compiled_model(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile made the model, or a part of it."""
    answers: dict[type, bool] = {}
    return any(
        _is_compiled_wrapper(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or holds_compiled(module, answers)
        for module in modules
    )


def attention_note(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """A note on attention whose scores no module returns; empty if there is no such attention."""
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
    return "scaled_dot_product_attention" in code.co_names or any(
        _names_attention(c) for c in code.co_consts if isinstance(c, CodeType)
    )
