"""Targets in ONNX Runtime, by its own quantisers; a mistake is an edit of the file that they wrote."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process

from tensorcap.workload import Workload
from tests.quantised_zoo import models
from tests.quantised_zoo.entry import Entry

Array = NDArray[Any]
Change = Callable[["Graph"], None]
QUERY: Final = "encoder.layer.1.attention.self.query"
VALUE: Final = "encoder.layer.1.attention.self.value"
OUT: Final = "encoder.layer.1.output.dense"
CONV: Final = "block1.conv2"


class Graph:
    """A model, and its constants by name."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getitem__(self, name: str) -> Array:
        value: Array = numpy_helper.to_array(self._tensor(name))
        return value

    def __setitem__(self, name: str, value: Array) -> None:
        self._tensor(name).CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), name))

    def _tensor(self, name: str) -> Any:
        return next(tensor for tensor in self.model.graph.initializer if tensor.name == name)

    def add(self, name: str, value: Array) -> None:
        self.model.graph.initializer.append(numpy_helper.from_array(value, name))

    def taking(self, name: str) -> Any:
        """The first node that takes a value."""
        return next(node for node in self.model.graph.node if name in node.input)

    def stored(self, weight: torch.Tensor) -> str:
        """The name of a weight, as it is or transposed."""
        wanted = weight.detach().numpy()
        for tensor in self.model.graph.initializer:
            if sorted(tensor.dims) == sorted(wanted.shape):
                found = numpy_helper.to_array(tensor)
                if any(found.shape == w.shape and (found == w).all() for w in (wanted, wanted.T)):
                    return str(tensor.name)
        raise KeyError("the weight is not in the graph")


@functools.cache
def _exported(make: Callable[[], Workload]) -> bytes:
    workload = make()
    model: Any = workload.model
    named = isinstance(workload.inputs, dict)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        given = {"args": (), "kwargs": dict(workload.inputs)} if named else {"args": tuple(workload.inputs)}
        torch.onnx.export(model, **given, f=path, dynamo=True, external_data=False, verbose=False)
        return path.read_bytes()


def exported(make: Callable[[], Workload]) -> Graph:
    """What torch's exporter writes of a reference."""
    return Graph(onnx.load_from_string(_exported(make)))


def name_of(site: str, make: Callable[[], Workload] = models.encoder) -> str:
    """The name that a layer's weight has in the exported graph."""
    model: Any = make().model
    return exported(make).stored(model.get_submodule(site).weight)


class Images(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
    """Inputs one by one."""

    def __init__(self, feeds: Iterator[dict[str, Array]]) -> None:
        self._feeds = feeds

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def _saved(graph: Graph, folder: Path, name: str = "exported.onnx") -> Path:
    onnx.save(graph.model, folder / name)
    return folder / name


def _changed(path: Path, change: Change | None) -> Path:
    if change is not None:
        graph = Graph(onnx.load(path))
        change(graph)
        onnx.save(graph.model, path)
    return path


def dynamic(folder: Path, change: Change | None = None, **options: Any) -> Path:
    """`quantize_dynamic` of the encoder."""
    target = folder / "target.onnx"
    settings = {"weight_type": QuantType.QInt8, "per_channel": True, **options}
    quantize_dynamic(_saved(exported(models.encoder), folder), target, **settings)
    return _changed(target, change)


def nbits(folder: Path, change: Change | None = None, *, symmetric: bool = False) -> Path:
    """`MatMulNBits` with blocks of 32 of the encoder."""
    quantiser = MatMulNBitsQuantizer(exported(models.encoder).model, block_size=32, is_symmetric=symmetric)
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / "target.onnx"))
    return _changed(folder / "target.onnx", change)


def products(folder: Path, change: Change | None = None, before: Change | None = None) -> Path:
    """QDQ of the encoder's products with weights."""
    graph = exported(models.encoder)
    weights = {tensor.name for tensor in graph.model.graph.initializer}
    chosen = [n.name for n in graph.model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    if before is not None:
        before(graph)
    ready = folder / "ready.onnx"
    quant_pre_process(_saved(graph, folder), ready, skip_symbolic_shape=True, skip_optimization=True)
    inputs: Any = models.encoder().inputs
    feeds = iter([{name: value.numpy() for name, value in inputs.items()}])
    quantize_static(
        ready,
        folder / "target.onnx",
        Images(feeds),
        per_channel=True,
        nodes_to_quantize=chosen,
        weight_type=QuantType.QInt8,
    )
    return _changed(folder / "target.onnx", change)


def static(
    folder: Path,
    change: Change | None = None,
    *,
    form: QuantFormat = QuantFormat.QDQ,
    contrast: float = 1.0,
    **options: Any,
) -> Path:
    """`quantize_static` of the network, calibrated on eight batches."""
    feeds = ({"x": models.images(seed).numpy() * np.float32(contrast)} for seed in range(8))
    settings = {"per_channel": True, "weight_type": QuantType.QInt8, **options}
    quantize_static(
        _saved(exported(models.network), folder),
        folder / "target.onnx",
        Images(feeds),
        quant_format=form,
        **settings,
    )
    return _changed(folder / "target.onnx", change)


def rounded_weights(folder: Path, *, wired: bool = True) -> Path:
    """Weights of the encoder are rounded by `DynamicQuantizeLinear` when it runs, as its inputs are."""
    graph = exported(models.encoder)
    weights = {tensor.name for tensor in graph.model.graph.initializer}
    own = name_of(QUERY)
    nodes: list[Any] = []
    for node in graph.model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            nodes.append(node)
            continue
        x, weight = node.input
        at = node.name
        for value in (x, weight):
            parts = [f"{at}/{value}_{part}" for part in ("numbers", "scale", "zero")]
            nodes.append(helper.make_node("DynamicQuantizeLinear", [value], parts, f"{at}/round_{value}"))
        zeros = [f"{at}/{x}_zero", f"{at}/{weight}_zero"][: 1 if weight == own and not wired else 2]
        numbers = [f"{at}/{x}_numbers", f"{at}/{weight}_numbers"]
        nodes += [
            helper.make_node("MatMulInteger", [*numbers, *zeros], [f"{at}/sum"], f"{at}/MatMulInteger"),
            helper.make_node("Cast", [f"{at}/sum"], [f"{at}/float"], f"{at}/Cast", to=onnx.TensorProto.FLOAT),
            helper.make_node(
                "Mul", [f"{at}/{x}_scale", f"{at}/{weight}_scale"], [f"{at}/scale"], f"{at}/Scales"
            ),
            helper.make_node("Mul", [f"{at}/float", f"{at}/scale"], [node.output[0]], f"{at}/Mul"),
        ]
    del graph.model.graph.node[:]
    graph.model.graph.node.extend(nodes)
    return _saved(graph, folder, "target.onnx")


def pretrained() -> Workload:
    """The torch twin of a pretrained BERT of three layers."""
    from tests.onnx import bert

    inputs = {name: torch.from_numpy(value) for name, value in bert.inputs().items()}
    return Workload(bert.twin(), inputs)


def attention(folder: Path, change: Change | None = None) -> Path:
    """The pretrained BERT, its attention fused by onnxruntime's optimiser and in int8: `QAttention`."""
    from onnxruntime.transformers import optimizer

    from tests.onnx import bert

    logging.disable(logging.WARNING)
    fused = optimizer.optimize_model(str(bert.MODEL), model_type="bert", num_heads=12, hidden_size=384)
    fused.save_model_to_file(str(folder / "fused.onnx"))
    quantize_dynamic(
        folder / "fused.onnx",
        folder / "target.onnx",
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    return _changed(folder / "target.onnx", change)


# --- mistakes


def _add_to(suffix: str, amount: int, site: str = QUERY) -> Change:
    def change(graph: Graph) -> None:
        name = name_of(site) + suffix
        graph[name] = graph[name] + np.array(amount, graph[name].dtype)

    return change


def _roll(suffix: str, site: str = QUERY, axis: int = 0) -> Change:
    def change(graph: Graph) -> None:
        graph[name_of(site) + suffix] = np.roll(graph[name_of(site) + suffix], 1, axis)

    return change


def _take(other: str, *suffixes: str, site: str = QUERY) -> Change:
    def change(graph: Graph) -> None:
        for suffix in suffixes:
            graph[name_of(site) + suffix] = graph[name_of(other) + suffix]

    return change


def _as_signed(graph: Graph) -> None:
    """Bytes of uint8, and their zero point, in a graph that takes them for int8."""
    name = name_of(QUERY)
    graph[f"{name}_quantized"] = graph[f"{name}_quantized"].view(np.int8)
    graph[f"{name}_zero_point"] = (graph[f"{name}_zero_point"].astype(int) - 128).astype(np.int8)


def _swap_nibbles(suffix: str) -> Change:
    def change(graph: Graph) -> None:
        name = name_of(QUERY) + suffix
        graph[name] = graph[name] << 4 | graph[name] >> 4

    return change


def _set(name: str, make: Callable[[Graph], Array]) -> Change:
    def change(graph: Graph) -> None:
        graph[name] = make(graph).astype(graph[name].dtype)

    return change


def _third_of_the_range(graph: Graph) -> None:
    """What the second convolution is given is rounded to a third of its range."""
    name = "relu_1_scale"
    graph[name] = graph[name] / np.float32(3)


def _transpose(graph: Graph) -> None:
    name = name_of(QUERY) + "_quantized"
    graph[name] = graph[name].T


def _no_factors(graph: Graph) -> None:
    """The product with the factors of SmoothQuant is taken out."""
    node = graph.taking("smoothing")
    for other in graph.model.graph.node:
        for at, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[at] = node.input[0]
    graph.model.graph.node.remove(node)


def smooth(graph: Graph) -> None:
    """Inputs of the query times factors, its weight over them."""
    weight = name_of(QUERY)
    factors = (np.abs(graph[weight]).max(1) ** 0.5).astype(np.float32)
    node = graph.taking(weight)
    graph[weight] = graph[weight] / factors[:, None]
    graph.add("smoothing", factors)
    product = helper.make_node("Mul", [node.input[0], "smoothing"], ["smoothed"], "node_smoothing")
    at = list(graph.model.graph.node).index(node)
    node.input[0] = "smoothed"
    graph.model.graph.node.insert(at, product)


def _qattention(graph: Graph) -> Any:
    return next(node for node in graph.model.graph.node if node.name == "Attention_1_quant")


def _other_heads(graph: Graph) -> None:
    next(a for a in _qattention(graph).attribute if a.name == "num_heads").i = 6


def _no_mask(graph: Graph) -> None:
    _qattention(graph).input[5] = ""


def _bias_of_another(graph: Graph) -> None:
    graph["Attention_1_qkv_bias"] = graph["Attention_2_qkv_bias"]


def _scales_of_values_rolled(graph: Graph) -> None:
    name = "Attention_1_qkv_weight_scale"
    q, k, v = np.split(graph[name], 3)
    graph[name] = np.concatenate([q, k, np.roll(v, 1)])


_of_encoder = partial(Entry, reference=models.encoder)
_of_network = partial(Entry, reference=models.network)
_of_pretrained = partial(Entry, reference=pretrained)
OPERATORS: Final = partial(static, form=QuantFormat.QOperator)
BERT_SELF: Final = "encoder.layer.1.attention.self"
PARTS: Final = (BERT_SELF, *(f"{BERT_SELF}.{part}" for part in ("query", "key", "value")))

RIGHT: Final = (
    _of_encoder(name="onnx-dynamic/rows", in_words="quantize_dynamic by channel", target=dynamic),
    _of_encoder(
        name="onnx-dynamic/unsigned",
        in_words="quantize_dynamic, uint8 weights with one scale",
        target=partial(dynamic, weight_type=QuantType.QUInt8, per_channel=False),
    ),
    _of_encoder(
        name="onnx-dynamic/weights-too", in_words="DynamicQuantizeLinear of weights", target=rounded_weights
    ),
    _of_encoder(name="onnx-int4/blocks", in_words="MatMulNBits", target=nbits),
    _of_encoder(
        name="onnx-int4/symmetric",
        in_words="MatMulNBits without zero points",
        target=partial(nbits, symmetric=True),
    ),
    _of_encoder(name="onnx-qdq/products", in_words="QDQ around products", target=products),
    _of_encoder(
        name="onnx-qdq/smooth", in_words="SmoothQuant of a layer", target=partial(products, before=smooth)
    ),
    _of_network(name="onnx-qdq/network", in_words="QDQ of a network", target=static),
    _of_network(name="onnx-qoperator/network", in_words="QLinearConv", target=OPERATORS),
    _of_network(
        name="onnx-qoperator/tensor",
        in_words="one scale for each weight",
        target=partial(OPERATORS, per_channel=False),
    ),
    _of_pretrained(name="onnx-fused/attention", in_words="QAttention", target=attention),
)


def _encoder_mistake(
    name: str, in_words: str, target: Any, words: tuple[str, ...], site: str = QUERY
) -> Entry:
    return Entry(name, in_words, models.encoder, target, (site,), words)


def _network_mistake(name: str, in_words: str, target: Any, words: tuple[str, ...], *sites: str) -> Entry:
    return Entry(name, in_words, models.network, target, sites or (CONV,), words)


def _pretrained_mistake(name: str, in_words: str, change: Change, words: tuple[str, ...]) -> Entry:
    return Entry(name, in_words, pretrained, partial(attention, change=change), PARTS, words)


UNSIGNED: Final = partial(dynamic, weight_type=QuantType.QUInt8, per_channel=False)
MISTAKES: Final = (
    _encoder_mistake(
        "onnx-dynamic/zero-point",
        "the weight's zero point is 3, not 0",
        partial(dynamic, change=_add_to("_zero_point", 3)),
        ("zero point",),
    ),
    _encoder_mistake(
        "onnx-dynamic/scales-rolled",
        "scales of the channel before",
        partial(dynamic, change=_roll("_scale")),
        ("rolled", "shifted", "behind", "before"),
    ),
    _encoder_mistake(
        "onnx-dynamic/scales-of-another",
        "scales of the value's weight",
        partial(dynamic, change=_take(VALUE, "_scale")),
        ("value", "another layer", "other layer"),
    ),
    _encoder_mistake(
        "onnx-dynamic/weight-of-another",
        "the weight of the next layer",
        partial(dynamic, change=_take(QUERY.replace("1", "2"), "_scale", "_quantized")),
        ("layer.2", "another layer", "other layer"),
    ),
    _encoder_mistake(
        "onnx-dynamic/transposed",
        "a square weight is transposed",
        partial(dynamic, change=_transpose),
        ("transpos",),
    ),
    _encoder_mistake(
        "onnx-dynamic/unsigned-as-signed",
        "bytes of uint8 are taken for int8",
        partial(UNSIGNED, change=_as_signed),
        ("sign",),
    ),
    _encoder_mistake(
        "onnx-dynamic/weights-too-zero-point",
        "the zero point of a weight that is rounded as it runs is not wired",
        partial(rounded_weights, wired=False),
        ("zero point",),
    ),
    _encoder_mistake(
        "onnx-int4/scales-of-another",
        "scales of the value's weight",
        partial(nbits, change=_take(VALUE, "_scales")),
        ("value", "another layer", "other layer"),
    ),
    _encoder_mistake(
        "onnx-int4/zero-points-swapped",
        "zero points of pairs of blocks exchanged",
        partial(nbits, change=_swap_nibbles("_zero_points")),
        ("zero point",),
    ),
    _encoder_mistake(
        "onnx-int4/nibbles-swapped",
        "numbers of pairs exchanged",
        partial(nbits, change=_swap_nibbles("_Q4")),
        ("packed", "nibble", "order", "pairs", "exchanged"),
    ),
    _encoder_mistake(
        "onnx-int4/blocks-rolled",
        "scales of the block before, in a layer of eight blocks",
        partial(nbits, change=_roll("_scales", OUT, -1)),
        ("block", "rolled", "shifted", "group"),
        OUT,
    ),
    _encoder_mistake(
        "onnx-qdq/not-smoothed",
        "inputs are not multiplied by the factors of SmoothQuant",
        partial(products, before=smooth, change=_no_factors),
        ("factor", "column", "smooth", "channel"),
    ),
    _network_mistake(
        "onnx-qdq/range-too-small",
        "a third of the range of what the convolution is given",
        partial(static, change=_third_of_the_range),
        ("range", "clip", "cut"),
        "block1.relu1",
        "block1.conv1",
    ),
    _network_mistake(
        "onnx-qdq/axes-exchanged",
        "inputs and outputs of a square kernel exchanged",
        partial(
            static,
            change=_set(f"{CONV}.weight_quantized", lambda g: g[f"{CONV}.weight_quantized"].swapaxes(0, 1)),
        ),
        ("axis", "axes", "transpos"),
    ),
    _network_mistake(
        "onnx-qdq/bias-of-another",
        "numbers of the bias of the convolution before",
        partial(
            static,
            change=_set(f"{CONV}.bias_quantized", lambda g: g[f"{CONV}.bias_quantized".replace("2", "1")]),
        ),
        ("bias",),
    ),
    _network_mistake(
        "onnx-qdq/calibrated-on-less",
        "calibrated on images of an eighth of the contrast",
        partial(static, contrast=0.125),
        ("range", "clip", "cut"),
        "@root",
        "stem",
        "relu",
    ),
    _network_mistake(
        "onnx-qoperator/bias-scale",
        "the bias was divided by the scale of the weight alone",
        partial(
            OPERATORS,
            change=_set(
                f"{CONV}.bias_quantized", lambda g: g[f"{CONV}.bias_quantized"] * g["conv2d_1_scale"]
            ),
        ),
        ("bias",),
    ),
    _network_mistake(
        "onnx-qoperator/scales-rolled",
        "scales of the channel before",
        partial(
            OPERATORS, change=_set(f"{CONV}.weight_scale", lambda g: np.roll(g[f"{CONV}.weight_scale"], 1))
        ),
        ("rolled", "shifted", "behind", "before"),
    ),
    _network_mistake(
        "onnx-qoperator/kernel-flipped",
        "the kernel is turned by half a turn",
        partial(
            OPERATORS,
            change=_set(f"{CONV}.weight_quantized", lambda g: g[f"{CONV}.weight_quantized"][..., ::-1, ::-1]),
        ),
        ("flip", "revers", "turned", "order"),
    ),
    _pretrained_mistake("onnx-fused/other-heads", "six heads, not twelve", _other_heads, ("head",)),
    _pretrained_mistake("onnx-fused/no-mask", "the mask is not given", _no_mask, ("mask",)),
    _pretrained_mistake(
        "onnx-fused/bias-of-another", "the bias of the next layer", _bias_of_another, ("bias",)
    ),
    _pretrained_mistake(
        "onnx-fused/scales-rolled",
        "scales of the channel before, of values",
        _scales_of_values_rolled,
        ("rolled", "shifted", "behind", "before"),
    ),
)
ONNX_ENTRIES: Final = (*RIGHT, *MISTAKES)
