"""Capture gaps: what hooks cannot see in a torch model, or would change: the reason, or a way round."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from tensorcap.wording import some
from tensorcap_formats.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., None])
_FUNCTIONS: Final = (FunctionType, MethodType)
COMPILED: Final = "inside a compiled graph (torch.compile); --eager runs it as plain code"


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
    """Run compiled functions, and what kernels of `torch.nn` fuse, as plain code until the block ends.

    Raises:
        UsageError: This release of torch cannot do that.
    """
    if not hasattr(torch.compiler, "set_stance"):
        raise UsageError(
            f"eager: torch {torch.__version__} has no torch.compiler.set_stance, expected 2.6 or newer",
            hint="Capture the model before it is compiled.",
        )
    with torch.compiler.set_stance("force_eager"), _without_kernels():
        yield


@contextmanager
def _without_kernels() -> Iterator[None]:
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


@contextmanager
def layers_in_parts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have torch compute encoder layers in parts until the block ends, and not by one kernel (*fast path*).

    With hooks, `nn.TransformerEncoderLayer` is computed in parts anyway, but `nn.TransformerEncoder` would
    still give it nested tensors where there is a padding mask. Without such layers nothing is changed.

    Args:
        modules: All of the model.
    """
    is_affected = any(isinstance(module, nn.TransformerEncoderLayer) for module in modules)
    with _without_kernels() if is_affected else nullcontext():
        yield


def fused_note(modules: Iterable[nn.Module]) -> str:
    """A note on layers that torch might compute by one kernel without the capture, or nothing."""
    layers = (m for m in modules if isinstance(m, nn.TransformerEncoderLayer) and not m.training)
    layer = next(layers, None)
    if layer is None or not torch.backends.mha.get_fastpath_enabled():
        return ""
    return (
        f"{type(layer).__name__} is computed in parts, so that they are captured, and not by torch's fused "
        "kernel, whose values may be others by rounding, and at padded positions"
    )


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
