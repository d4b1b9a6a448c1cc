"""The layers that stay in the reference's precision, as quantisers take them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final


def precision_list(layers: Sequence[str], form: str) -> str:
    """Write layers in the form that a quantiser takes.

    Args:
        layers: Paths of modules.
        form: One of `LISTS`.

    Example:
        >>> print(precision_list(["layers.0.q"], "torchao"))
        FqnToConfig({"layers.0.q": None, "_default": CONFIG})
    """
    return LISTS[form](layers)


def _torchao(layers: Sequence[str]) -> str:
    """What `torchao.quantization.quantize_` takes, for a configuration of the user's."""
    kept = "".join(f"{json.dumps(layer)}: None, " for layer in layers)
    return f'FqnToConfig({{{kept}"_default": CONFIG}})'


def _onnxruntime(layers: Sequence[str]) -> str:
    """Names of nodes as `torch.onnx.export` by TorchScript gives them; others in a list do no harm."""
    nodes = [f"{_scope(layer)}/{op}" for layer in layers for op in ("MatMul", "Gemm", "Conv")]
    return f"nodes_to_exclude={json.dumps(nodes)}"


def _tensorrt(layers: Sequence[str]) -> str:
    """Options of Polygraphy, with the names that the ONNX parser gives to layers."""
    nodes = [f"{_scope(layer)}/{op}:float32" for layer in layers for op in ("MatMul", "Gemm", "Conv")]
    return f"--precision-constraints obey --layer-precisions {' '.join(nodes)}" if nodes else ""


def _scope(layer: str) -> str:
    """The scope that an exporter names nodes of a module by: `/layers.0/q` of `layers.0.q`."""
    scope = ""
    for part in layer.split("."):
        scope += f".{part}" if part.isdigit() and scope else f"/{part}"
    return scope


LISTS: Final[Mapping[str, Callable[[Sequence[str]], str]]] = {
    "torchao": _torchao,
    "onnxruntime": _onnxruntime,
    "tensorrt": _tensorrt,
}
