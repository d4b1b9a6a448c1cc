"""The module of the source model that each node lies in, and which call of it, by what exporters write.

torch.export keeps the path of modules of each node in its metadata; TorchScript makes names of it,
`/encoder/layer.0/dense/MatMul`, which optimisers leave on the values that a fused node makes. A node without
either lies in the module whose parameters it takes. A module that is called again has, with TorchScript, a
number behind its name, `/act_1/Relu`; with torch.export, nodes that repeat.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tensorcap.adapters.onnx.cut_ranges import CUT
from tensorcap.adapters.onnx.graph import GraphNode, OnnxGraph
from tensorcap.adapters.onnx.quantisation import (
    QuantisedWeight,
    find_weights,
    input_rounders,
    scaling_nodes,
)

_SCOPES: Final = "pkg.torch.onnx.name_scopes"
_CLASSES: Final = "pkg.torch.onnx.class_hierarchy"
_NAMESPACE: Final = "namespace"
_TRACE: Final = "pkg.torch.onnx.stack_trace"
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_FRAMEWORK: Final = re.compile(r"[/\\]torch[/\\](?:nn|_|export|fx|onnx|utils)")
_AGAIN: Final = re.compile(r"(.+)_([1-9]\d*)")
_PARAMETER: Final = re.compile(r"(.+)\.([A-Za-z_]\w*)")
_MOVES: Final = ("Reshape", "Unsqueeze", "Transpose", "Identity")
_ROUNDED: Final = ("QuantizeLinear", "DequantizeLinear")  # of what is made before
_KEPT: Final = re.compile(r"(?:_Transposed)?_(?:quantized|quant|[qQ]\d\w*)$")  # behind a name, in few bits
_BESIDE: Final = re.compile(r"(?:_Transposed)?_(?:quantized|quant|[qQ]\d\w*|scales?|zero_points?)$")
_FUSION: Final = re.compile(r"[A-Za-z]+Fusion(?:_.*)?")  # behind the name of a node that was fused
_PROJECTIONS: Final = ("query", "key", "value")
_FUSED_PROJECTIONS: Final = {  # places of weight and bias, in which those of the three follow each other
    "com.microsoft.Attention": (1, 2),
    "com.microsoft.QAttention": (1, 2),
}
_PARTS_OF_NORMS: Final = ("Add", "Cast", "Div", "Mul", "Pow", "ReduceMean", "Reciprocal", "Sqrt", "Sub")
_NO_NAME: Final = re.compile(r"[^0-9A-Za-z_]+")  # what no module's name has
_MATRIX: Final = 2  # axes that a weight of a product has at least
_RULE: Final = "pkg.onnxscript.rewriter.rule_name"
_NORM_FOLDED: Final = "FuseBatchNorm"
_FOLDED: Final = "pkg.onnxscript.optimizer.folded_from"


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module.

    Attributes:
        path: The module's path, as torch names it; "" for the model itself.
        number: Which call of it, from 0.
    """

    path: str
    number: int = 0


ROOT: Final = ModuleCall("")


@dataclass(frozen=True, slots=True)
class NodeScope:
    """Where a node lies.

    Attributes:
        calls: The calls of modules around it, outermost first, without the model itself.
        name: Its name within the innermost module: that of the value that it makes, or its own.
        file: Source file, "" if it is not known.
        line: Line in it; None if it is not known.
        function: The function that the line is in; "" if it is not known.
    """

    calls: tuple[ModuleCall, ...]
    name: str
    file: str = ""
    line: int | None = None
    function: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of an initialiser that holds those of several modules, one behind the other along its last axis.

    Attributes:
        name: The initialiser.
        number: Which of the equal parts it is.
        count: How many there are.
    """

    name: str
    number: int
    count: int


class Scopes:
    """The modules of a graph.

    Attributes:
        nodes: Where each node lies, by its place.
        classes: The class of each module by its path, the model first; "" if it is not known.
        nodes_of: The nodes of each call of a module, those of modules within it too.
        unlocated: Places of nodes of which nothing says where they lie; they count as the model's own.
        parameters: Initialisers that each module takes, by its name for them.
        quantised: Weights in few bits that each module takes, likewise.
        shares: Parts of initialisers, likewise.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        """Find the modules.

        1. Paths of nodes: by metadata, by names, by parameters, by what takes and makes their values.
        2. Calls: by numbers in names; else by parameters that several alike runs of nodes take.
        3. Parameters: initialisers named within their module, or taken there in a usual place of a node.
        """
        self._graph = graph
        self._weights = find_weights(graph)
        rounders = input_rounders(graph)
        located = [_located(node) for node in graph.nodes]
        owners = _owners(graph)
        homes = _sources(graph) | owners
        for node in graph.nodes:
            if located[node.index] is None:
                located[node.index] = _by_parameters(node, graph, homes, located)
        _locate_norms(graph, located)
        lone = self._locate_layers(located, homes)
        homes |= lone
        for node in graph.nodes:
            if (product := located[node.index]) is not None:
                for part in scaling_nodes(graph, node):
                    located[part.index] = located[part.index] or (product[0], part.name or part.op)
        for node in graph.nodes:
            is_behind = node.op in _ROUNDED or CUT in node.metadata
            if located[node.index] is not None or not is_behind or not node.inputs:
                continue
            maker, takers = graph.makers.get(node.inputs[0]), graph.takers.get(node.inputs[0], ())
            path = None if maker is None else located[maker.index]
            if path is not None and (node.op != "DequantizeLinear" or len(takers) == 1):
                located[node.index] = path[0], node.name or node.op
        for node in reversed(graph.nodes):
            is_rounder = node.index in rounders
            if located[node.index] is None or is_rounder:
                path = _by_neighbours(node, graph, located, is_rounder=is_rounder)
                located[node.index] = path or located[node.index]
        for node in graph.nodes:
            if located[node.index] is None and node.op == "Add":
                located[node.index] = _of_sum(node, graph, located)
        of_own = {(path,) for path in lone.values()}
        self.unlocated = frozenset(i for i, path in enumerate(located) if path is None or path[0] in of_own)
        paths = [path or ((), node.name or node.op) for path, node in zip(located, graph.nodes, strict=True)]
        calls = _calls([path for path, _ in paths], homes, graph)
        self.nodes = tuple(
            NodeScope(calls[node.index], _op_name(node, paths[node.index][1]), *_source(node))
            for node in graph.nodes
        )
        self.nodes_of: dict[ModuleCall, list[GraphNode]] = {ROOT: list(graph.nodes)}
        for node in graph.nodes:
            for call in self.nodes[node.index].calls:
                self.nodes_of.setdefault(call, []).append(node)
        self.quantised = self._find_quantised(owners)
        self.parameters = self._find_parameters(owners)
        self.shares = self._find_shares(owners)
        self.classes = self._find_classes()

    def _locate_layers(
        self, located: list[tuple[tuple[str, ...], str] | None], homes: Mapping[str, str]
    ) -> dict[str, str]:
        """Locate products with weights of which nothing else says where they lie.

        1. What torch.export calls a batch norm that it folded into a product lies in the module of the
           weight.
        2. A product whose weight is dequantised before it lies in the module that the name of the numbers
           says.
        3. Any other lies in a module of its own, whose name is that of its result, with the bias if one is
           added behind it. Nodes that take one weight are calls of one module.

        Args:
            located: Where nodes lie; so do these then.
            homes: The modules of initialisers.

        Returns:
            The modules of their own, by the names of their weights.
        """
        graph = self._graph
        lone: dict[str, str] = {}
        for node in graph.nodes:
            is_folded = _NORM_FOLDED in node.metadata.get(_RULE, "")
            weight = self._weight_of(node) if located[node.index] is None or is_folded else ""
            if not weight:
                continue
            if weight in homes:
                located[node.index] = _around(homes[weight]), node.name or node.op
                continue
            last = [node, *scaling_nodes(graph, node)][-1]
            behind = [taker for name in last.outputs for taker in graph.takers.get(name, ())]
            bias = behind[0] if len(behind) == 1 and _adds_bias(behind[0], graph) else None
            result = (last if bias is None else bias).outputs[0]
            path = lone.setdefault(weight, _NO_NAME.sub("_", result))
            for part in (node, bias):
                if part is not None and located[part.index] is None:
                    located[part.index] = (path,), part.name or part.op
        return lone

    def _weight_of(self, node: GraphNode) -> str:
        """The name of the weight that a product takes, or of its numbers; "" if it takes none."""
        for place, name in enumerate(node.inputs[: node.own_inputs] if node.op != "Gather" else ()):
            kept = self._weights.get((node.index, place))
            weight = name if kept is None else kept.numbers
            rank = len(self._graph.shape_of(weight)) if kept or name in self._graph.weights else 0
            is_named = kept is not None and kept.name == "weight"
            if rank >= _MATRIX and (is_named or _role(node, place, rank) == "weight"):
                return weight
        return ""

    def _find_classes(self) -> dict[str, str]:
        classes = {"": ""}
        for node in self._graph.nodes:
            for path, name in _class_names(node):
                classes[path] = classes.get(path) or name
        known = {"": classes[""] or "onnx.Graph"}
        called = sorted(self.nodes_of, key=lambda call: self.nodes_of[call][0].index)
        for path in (*(call.path for call in called), *self.quantised, *self.parameters, *self.shares):
            for outer in _around(path) if path else ():
                known.setdefault(outer, classes.get(outer, ""))
        return known

    def _find_parameters(self, owners: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Initialisers by module and name there, see `_parameter`."""
        parameters: dict[str, dict[str, str]] = {}
        parts = {name for weight in self._weights.values() for name in weight.parts}
        for node in self._graph.nodes:
            path = self._path(node)
            for place, name in enumerate(node.inputs[: node.own_inputs]):
                if name in self._graph.weights and name not in parts:
                    module, own = self._parameter(node, place, path, owners)
                    if own:
                        parameters.setdefault(module, {}).setdefault(own, name)
        return parameters

    def _find_quantised(self, owners: Mapping[str, str]) -> dict[str, dict[str, QuantisedWeight]]:
        """Weights in few bits by module and name there: that of their numbers, or their role."""
        quantised: dict[str, dict[str, QuantisedWeight]] = {}
        for (index, place), weight in self._weights.items():
            node = self._graph.nodes[index]
            path, own = self._path(node), weight.name
            owner = owners.get(weight.numbers, "")
            role = own or _role(node, place, len(self._graph.shape_of(weight.numbers)))
            if owner and (owner == path or not path or not role):
                path, own = owner, _KEPT.sub("", weight.numbers[len(owner) + 1 :])
            own = own or role
            if not owner and place in _FUSED_PROJECTIONS.get(node.op, ()):
                for number, module in enumerate(_PROJECTIONS if path else ()):
                    part = replace(weight, part=(number, len(_PROJECTIONS)))
                    quantised.setdefault(f"{path}.{module}", {}).setdefault("weight", part)
            elif own:
                quantised.setdefault(path, {}).setdefault(own, weight)
        return quantised

    def _find_shares(self, owners: Mapping[str, str]) -> dict[str, dict[str, Share]]:
        """Parts of the weights and biases of a fused attention: those of its query, key and value."""
        shares: dict[str, dict[str, Share]] = {}
        for node in self._graph.nodes:
            path = self._path(node)
            places = _FUSED_PROJECTIONS.get(node.op, ()) if path else ()
            for place, own in zip(places, ("weight", "bias"), strict=False):
                name = node.inputs[place] if place < node.own_inputs else ""
                tensor = self._graph.weights.get(name)
                is_whole = tensor is None or not tensor.dtype.is_inexact or name in owners
                if tensor is None or is_whole or tensor.shape[-1] % len(_PROJECTIONS):
                    continue
                for number, module in enumerate(_PROJECTIONS):
                    share = Share(name, number, len(_PROJECTIONS))
                    shares.setdefault(f"{path}.{module}", {}).setdefault(own, share)
        return shares

    def _path(self, node: GraphNode) -> str:
        """The innermost module that a node lies in."""
        calls = self.nodes[node.index].calls
        return calls[-1].path if calls else ""

    def _parameter(
        self, node: GraphNode, place: int, path: str, owners: Mapping[str, str]
    ) -> tuple[str, str]:
        """The module that has an initialiser which a node takes, and its name there; "" if it is none.

        It is the module in the initialiser's name. A node takes what torch calls the weight or the bias of
        its own module as such, whatever else it is, as a weight that two modules share.
        """
        name = node.inputs[place]
        tensor, owner = self._graph.weights[name], owners.get(name, "")
        role = _role(node, place, len(tensor.shape))
        if owner and (owner == path or not path or not role):
            return owner, name[len(owner) + 1 :]
        if owner:
            return path, name.rpartition(".")[2]
        return path, role if tensor.dtype.is_inexact else ""


def _located(node: GraphNode) -> tuple[tuple[str, ...], str] | None:
    """The paths of the modules around a node, outermost first, and its name; None if nothing says them."""
    scopes = _scopes_of(node)
    if scopes is not None:
        return tuple(path for path in scopes[:-1] if path), ""
    for name in (node.name, *node.outputs):
        if name.startswith("/"):
            return _of_name(name)
    return None


def _scopes_of(node: GraphNode) -> list[str] | None:
    """The paths of modules that torch.export kept, and the node's own name behind them."""
    text = node.metadata.get(_SCOPES)
    if text is not None:
        names = _list_of(text)
        return names or None
    text = node.metadata.get(_NAMESPACE)
    return None if not text else [part.partition(": ")[0] for part in text.split("/")]


def _class_names(node: GraphNode) -> Iterator[tuple[str, str]]:
    scopes, classes = node.metadata.get(_SCOPES), node.metadata.get(_CLASSES)
    if scopes is not None and classes is not None:
        yield from zip(_list_of(scopes)[:-1], _list_of(classes), strict=False)
    elif node.metadata.get(_NAMESPACE):
        for part in node.metadata[_NAMESPACE].split("/")[:-1]:
            path, _, name = part.partition(": ")
            yield path, name


def _list_of(text: str) -> list[str]:
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(value) for value in values] if isinstance(values, list) else []


def _of_name(name: str) -> tuple[tuple[str, ...], str]:
    """Paths of modules in a name of TorchScript.

    A component that begins with the one before it is a child in it: `/layer1/layer1.0/conv/Conv`. What was
    fused when the graph was optimised is called by one of its nodes: `/fc/MatMul/MatMulAddFusion`.

    Example:
        >>> _of_name("/net/net.0/act/Relu_1")
        (('net', 'net.0', 'net.0.act'), 'Relu_1')
    """
    *components, own = name.strip("/").split("/")
    if components and _FUSION.fullmatch(own):
        *components, own = components
    paths: list[str] = []
    before, outer = "", ""
    for component in components:
        if before and component.startswith(f"{before}."):
            paths.append(f"{outer}.{component}" if outer else component)
        else:
            outer = paths[-1] if paths else ""
            paths.append(f"{outer}.{component}" if outer else component)
        before = component
    return tuple(paths), own


def _op_name(node: GraphNode, own: str) -> str:
    """The name of a node within its module: of torch.export's, that of its value."""
    if own:
        return re.sub(r"_output_\d+$", "", own)
    first = next((name for name in node.outputs if name), node.name)
    return first.removeprefix("/")


def _source(node: GraphNode) -> tuple[str, int | None, str]:
    """File, line and function of the innermost frame outside of torch."""
    frames = _FRAME.findall(node.metadata.get(_TRACE, ""))
    own = [frame for frame in frames if not _FRAMEWORK.search(frame[0])]
    if not own:
        return "", None, ""
    file, line, function = own[-1]
    return file, int(line), function


def _owners(graph: OnnxGraph) -> dict[str, str]:
    """The module in the name of each initialiser that has one."""
    matches = {name: _PARAMETER.fullmatch(name) for name in graph.weights if "::" not in name}
    return {name: match[1] for name, match in matches.items() if match and "/" not in name}


def _sources(graph: OnnxGraph) -> dict[str, str]:
    """The module of the one parameter that an initialiser was made of when the graph was exported, by name.

    torch's exporter writes that beside a weight which it stores transposed. Numbers in few bits, their steps
    and zero points have the name of the weight that they were made of, with something behind it.
    """
    folded = {}
    for value in graph.proto.graph.value_info:
        text = next((entry.value for entry in value.metadata_props if entry.key == _FOLDED), "")
        made_of = _list_of(text) if text else []
        match = _PARAMETER.fullmatch(made_of[0]) if len(made_of) == 1 else None
        if match is not None:
            folded[value.name] = match[1]
    names = {name: name if name in folded else _BESIDE.sub("", name) for name in graph.weights}
    return {name: folded[weight] for name, weight in names.items() if weight in folded}


def _by_parameters(
    node: GraphNode,
    graph: OnnxGraph,
    owners: Mapping[str, str],
    located: Sequence[tuple[tuple[str, ...], str] | None],
) -> tuple[tuple[str, ...], str] | None:
    """The module of most parameters that a node takes, or of the bias that is added behind it; None if none.

    A fused SkipLayerNormalization takes weight and bias of the norm, and the bias of the Linear before it.
    """
    modules = Counter(owners[name] for name in _stored(node, graph) if name in owners)
    if not modules and any(graph.is_constant(name) for name in node.inputs):
        result = [node, *scaling_nodes(graph, node)][-1]
        behind = [taker for name in result.outputs for taker in graph.takers.get(name, ())]
        if len(behind) == 1 and behind[0].op == "Add":
            modules = Counter(owners[name] for name in behind[0].inputs if name in owners)
    most = modules.most_common(2)
    if not most or (len(most) > 1 and most[0][1] == most[1][1]):
        return None
    return _around(most[0][0]), node.name or node.op


def _around(path: str) -> tuple[str, ...]:
    """The paths of the modules around one, outermost first, and its own."""
    parts = path.split(".")
    return tuple(".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _locate_norms(graph: OnnxGraph, located: list[tuple[tuple[str, ...], str] | None]) -> None:
    """Locate the parts of norms of which only the factor, or what is added, says where it lies.

    They are what that is computed of and nothing else is, back to the one value that all comes of, if a mean
    is among them.
    """
    if None not in located:
        return
    for node in reversed(graph.nodes):
        path = located[node.index]
        if path is None or node.op not in _PARTS_OF_NORMS:
            continue
        parts = {node.index}
        while not _is_norm(graph, parts):
            makers = [graph.makers[name] for name in _entering(graph, parts) if name in graph.makers]
            new = {
                maker.index
                for maker in makers
                if maker.op in _PARTS_OF_NORMS
                and (located[maker.index] or path)[0] == path[0]
                and all(t.index in parts for name in maker.outputs for t in graph.takers.get(name, ()))
            }
            if not new:
                break
            parts |= new
        else:
            for index in parts:
                part = graph.nodes[index]
                located[index] = located[index] or (path[0], part.name or part.op)


def _is_norm(graph: OnnxGraph, parts: Collection[int]) -> bool:
    """Whether some nodes make of one value, and a mean of it, another."""
    return len(_entering(graph, parts)) == 1 and any(graph.nodes[i].op == "ReduceMean" for i in parts)


def _entering(graph: OnnxGraph, parts: Collection[int]) -> set[str]:
    """What some nodes take that none of them makes and that is no constant."""
    taken = {name for index in parts for name in graph.nodes[index].inputs if name}
    made = {name for index in parts for name in graph.nodes[index].outputs}
    return {name for name in taken - made if not graph.is_constant(name)}


def _adds_bias(node: GraphNode, graph: OnnxGraph) -> bool:
    """Whether a node adds a constant of one axis."""
    constants = [name for name in node.inputs if graph.is_constant(name)]
    return node.op == "Add" and len(constants) == 1 and len(graph.shape_of(constants[0])) == 1


def _stored(node: GraphNode, graph: OnnxGraph) -> Iterator[str]:
    """The names of what a node takes; of a weight in another shape its own, as of a convolution's bias."""
    for name in node.inputs:
        maker = graph.makers.get(name)
        is_moved = maker is not None and maker.op in _MOVES and all(map(graph.is_constant, maker.inputs))
        yield maker.inputs[0] if maker is not None and is_moved else name


def _by_neighbours(
    node: GraphNode,
    graph: OnnxGraph,
    located: Sequence[tuple[tuple[str, ...], str] | None],
    *,
    is_rounder: bool,
) -> tuple[tuple[str, ...], str] | None:
    """The innermost module around all that take what a node makes; None if they are not located.

    Unless it takes constants alone, or rounds what products take (`is_rounder`), what a node takes has to be
    made there too.
    """
    takers = {taker.index for name in node.outputs for taker in graph.takers.get(name, ())}
    around = [located[index] for index in takers]
    if (
        not around
        or any(each is None for each in around)
        or any(name in graph.outputs for name in node.outputs)
    ):
        return None
    paths = _common([each[0] for each in around if each is not None])
    if not is_rounder and not all(graph.is_constant(name) for name in node.inputs if name):
        makers = [graph.makers[name] for name in node.inputs if name in graph.makers]
        made_in = [located[maker.index] for maker in makers]
        if not made_in or any(each is None or each[0] != paths for each in made_in):
            return None
    return paths, node.name or node.op


def _of_sum(
    node: GraphNode, graph: OnnxGraph, located: Sequence[tuple[tuple[str, ...], str] | None]
) -> tuple[tuple[str, ...], str] | None:
    """The innermost module around what makes the first operand of a sum, and what makes or takes another end.

    The sum of a residual lies with the norm behind it in one block, and with the residual in another.
    """
    makers = [graph.makers[name] for name in node.inputs if name in graph.makers]
    takers = [taker for name in node.outputs for taker in graph.takers.get(name, ())]
    ends = [located[each.index] for each in (*makers, *takers)]
    first, *others = [path[0] for path in ends if path is not None] or [()]
    if len(makers) != len(node.inputs) or located[makers[0].index] is None or not others:
        return None
    return max((_common([first, other]) for other in others), key=len), node.name or node.op


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The modules that all of some paths have; those of parameters name lists of modules as well.

    Example:
        >>> _common([("net", "net.layer.2", "net.layer.2.fc"), ("net", "net.layer", "net.layer.2")])
        ('net', 'net.layer.2')
    """
    return tuple(name for name in paths[0] if all(name in path for path in paths)) if paths else ()


def _calls(
    paths: Sequence[tuple[str, ...]], owners: Mapping[str, str], graph: OnnxGraph
) -> list[tuple[ModuleCall, ...]]:
    """Each node's calls of modules, by the paths that names say."""
    raw = {path for each in paths for path in each}
    cleaned = {path: _without_numbers(path, raw, set(owners.values())) for path in raw}
    modules = {**cleaned, **_by_owners(paths, cleaned, owners, graph)}
    instances: dict[str, dict[str, int]] = defaultdict(dict)  # by module: the number of each path
    for each in paths:
        for path in each:
            numbers = instances[modules[path]]
            numbers.setdefault(path, len(numbers))
    repeats = _repeats([tuple(dict.fromkeys(modules[path] for path in each)) for each in paths], graph)
    return [
        tuple(
            ModuleCall(modules[path], instances[modules[path]][path] or repeats.get((modules[path], n), 0))
            for path in each
        )
        for n, each in enumerate(paths)
    ]


def _by_owners(
    paths: Sequence[tuple[str, ...]], cleaned: Mapping[str, str], owners: Mapping[str, str], graph: OnnxGraph
) -> dict[str, str]:
    """The modules of paths that leave out containers, by the names of most parameters that are taken there.

    TorchScript calls a module that lies in several containers by the innermost one's name for it alone:
    `/attn/q/MatMul` takes `layers.0.attn.q.weight`.
    """
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for node in graph.nodes:
        around = paths[node.index]
        for owner in {owners[name] for name in node.inputs if name in owners} if around else ():
            whole = owner.split(".")
            end = len(whole)
            places: list[int] = []
            for component in reversed(cleaned[around[-1]].split(".")):
                place = next((at for at in range(end - 1, -1, -1) if whole[at] == component), None)
                if place is None or (not places and place != len(whole) - 1):
                    break
                places.insert(0, place)
                end = place
            else:
                for path in around:
                    count = cleaned[path].count(".")
                    votes[path][".".join(whole[: places[count] + 1])] += 1
    return {path: counts.most_common(1)[0][0] for path, counts in votes.items() if _is_most(counts)}


def _is_most(counts: Counter[str]) -> bool:
    return 2 * counts.most_common(1)[0][1] > counts.total()


def _without_numbers(path: str, raw: set[str], owners: set[str]) -> str:
    """The module of a path in which `_1` behind a component may say that it is called again."""
    known: list[str] = []
    for component in path.split("."):
        match = _AGAIN.fullmatch(component)
        base = ".".join([*known, match[1]]) if match else ""
        full = ".".join([*known, component])
        is_again = base in raw and not any(own == full or own.startswith(f"{full}.") for own in owners)
        known.append(match[1] if match and is_again else component)
    return ".".join(known)


def _repeats(paths: Sequence[tuple[str, ...]], graph: OnnxGraph) -> dict[tuple[str, int], int]:
    """The call that a node is of, by module and the node's place, of modules that are called several times.

    1. The nodes of a module with parameters that is called k times take each of them k times, and are k runs
       of the same operators.
    2. Those of a module without are k parts of the same operators, of which none takes anything of another.
    """
    nodes_of: dict[str, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        for path in paths[node.index]:
            nodes_of[path].append(node)
    repeats: dict[tuple[str, int], int] = {}
    for path, nodes in nodes_of.items():
        taken = Counter(name for node in nodes for name in set(node.inputs) if _is_parameter(graph, name))
        if taken:
            size = len(nodes) // min(taken.values())
            parts = [nodes[start : start + size] for start in range(0, len(nodes), size)]
        else:
            parts = _separate_parts(nodes)
        if len({tuple(node.op for node in part) for part in parts}) == 1:
            repeats.update(((path, node.index), number) for number, part in enumerate(parts) for node in part)
    return repeats


def _separate_parts(nodes: Sequence[GraphNode]) -> list[list[GraphNode]]:
    """Nodes in parts of which none takes anything of another, in the order of their first nodes."""
    parts: list[list[GraphNode]] = []
    for node in nodes:
        touched = [
            part for part in parts if any(set(each.outputs) & set(node.inputs) - {""} for each in part)
        ]
        joined = sorted([*(each for part in touched for each in part), node], key=lambda each: each.index)
        parts = [part for part in parts if part not in touched]
        parts.append(joined)
    return sorted(parts, key=lambda part: part[0].index)


def _is_parameter(graph: OnnxGraph, name: str) -> bool:
    tensor = graph.weights.get(name)
    return tensor is not None and tensor.dtype.is_inexact and len(tensor.shape) > 0 and max(tensor.shape) > 1


_ROLES: Final[Mapping[str, Sequence[str]]] = {
    "Conv": ("", "weight", "bias"),
    "ConvTranspose": ("", "weight", "bias"),
    "Gemm": ("", "weight", "bias"),
    "MatMul": ("weight", "weight"),
    "Gather": ("weight",),
    "LayerNormalization": ("", "weight", "bias"),
    "BatchNormalization": ("", "weight", "bias", "running_mean", "running_var"),
    "InstanceNormalization": ("", "weight", "bias"),
    "GroupNormalization": ("", "weight", "bias"),
    "PRelu": ("", "weight"),
}


def _role(node: GraphNode, place: int, rank: int) -> str:
    """What modules of torch call what a node takes in a place; "" if that is no parameter of one."""
    if node.op == "MatMul" and rank < 2:
        return ""
    roles: Sequence[Any] = _ROLES.get(node.op, ())
    return roles[place] if place < len(roles) else ""
