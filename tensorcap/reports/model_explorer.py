"""Runs as graphs for Google's Model Explorer: nodes with their data flow, errors laid over them, and what
belongs together on two panes.

Three kinds of files, as its loader reads them (github.com/google-ai-edge/model-explorer): a graph collection
(`common/input_graph.ts`: GraphCollection, GraphNode), node data (GraphNodeData by graph id), and the mapping
of its synchronised navigation (`sync_navigation_service.ts`: mappingEntries of left and right node ids). JSON
has no infinity: what is not finite is a text. Nulls are left out, since the loader takes them for values.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tensorcap.alignment import MappingSource, sides
from tensorcap.comparison import Comparison, Pair, compare, error_of
from tensorcap.runs import Graph, enclosing_sites, is_result, ops_of, shape_text
from tensorcap.wording import three_digits
from tensorcap_formats.archive import Archive
from tensorcap_formats.content import write_errors
from tensorcap_formats.errors import UsageError, WriteError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import build_beside, put_in_place
from tensorcap_formats.records import Record

REFERENCE: Final = "reference.json"
TARGET: Final = "target.json"
SYNC: Final = "sync_navigation.json"
_STATUS_COLOURS: Final = {  # backgrounds, legible under black text
    "identical": "#a5d6a7",
    "match": "#a5d6a7",
    "within-rounding": "#c8e6c9",
    "suspect": "#ffe082",
    "unjudged": "#ffe082",
}
_RED: Final = "#ef9a9a"
_GREY: Final = "#e0e0e0"


def _psnr(pair: Pair) -> float | None:
    return None if pair.difference is None else pair.difference.psnr_db


def _status(pair: Pair) -> str:
    return str(pair.status)


_METRICS: Final[Mapping[str, Callable[[Pair], float | str | None]]] = {
    "status": _status,
    "relative error": error_of,
    "PSNR, dB": _psnr,
}


@dataclass(frozen=True, slots=True)
class ExplorerFiles:
    """What was written for Model Explorer.

    Attributes:
        folder: The folder.
        files: Names of the files in it, the graphs first.
        nodes: Count of nodes of each graph file.
        paired: Count of entries that belong together on both panes.
    """

    folder: Path
    files: tuple[str, ...]
    nodes: Mapping[str, int]
    paired: int

    @property
    def command(self) -> tuple[str, ...]:
        """What shows it, as the words of a command."""
        graphs = [str(self.folder / name) for name in self.nodes]
        data = [str(self.folder / name) for name in self.files if name not in (*self.nodes, SYNC)]
        return ("model-explorer", *graphs, *([f"--node_data_paths={','.join(data)}"] if data else []))


def export_model_explorer(
    reference: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
) -> ExplorerFiles:
    """Write a run as a graph into a new or empty folder, or two runs with their comparison.

    Nodes are ops if they were recorded, else results of modules; edges are the data flow that was recorded,
    or that equal contents show.

    Args:
        reference: Path of the archive.
        folder: The folder.
        target: Path of an archive under test.
        mapping: What belongs together, as for `compare`.

    Raises:
        UsageError: The archive has no ops and no modules, or the mapping does not fit.
        WriteError: The folder is not empty, or it cannot be written.
        ReadError: An archive cannot be read.
    """
    folder = Path(folder)
    documents: dict[str, Any] = {}
    paired = 0
    with ExitStack() as stack:
        trusted = stack.enter_context(open_archive(reference))
        graphs = {REFERENCE: _collection(trusted, "reference")}
        if target is not None:
            tested = stack.enter_context(open_archive(target))
            graphs[TARGET] = _collection(tested, "target")
            free = compare(*sides(trusted, tested, mapping), mapping="none")
            documents, paired = _compared(free, *(_places(graph) for graph in graphs.values()))
    documents = {**graphs, **documents}
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise WriteError(f"{folder}: is there and is not empty, expected a new folder")
    with build_beside(folder) as building, write_errors(folder):
        building.mkdir()
        for name, document in documents.items():
            text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)
            (building / name).write_text(f"{text}\n", encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        put_in_place(building, folder)
    counts = {name: len(_places(graph)) for name, graph in graphs.items()}
    return ExplorerFiles(folder, tuple(documents), counts, paired)


def _collection(archive: Archive, label: str) -> dict[str, Any]:
    """A graph for each step of a run."""
    nodes = list(_op_nodes(archive) if ops_of(archive) else _module_nodes(archive))
    if not nodes:
        raise UsageError(f"{archive.path}: has no ops and no results of modules, expected a captured run")
    steps = dict.fromkeys(node["id"].partition("/")[0] for node in nodes)
    graphs = []
    for step in steps:
        name = label if len(steps) == 1 else f"{label}, step {step}"
        of_step = [node for node in nodes if node["id"].partition("/")[0] == step]
        graphs.append({"id": name, "nodes": of_step})
    return {"label": f"{label}: {archive.path.name}", "graphs": graphs}


def _places(collection: Mapping[str, Any]) -> dict[str, str]:
    """The graph of each node, by node id."""
    return {node["id"]: graph["id"] for graph in collection["graphs"] for node in graph["nodes"]}


def _op_nodes(archive: Archive) -> Iterator[dict[str, Any]]:
    """Each op with the ops that computed its inputs, within the modules that ran it."""
    graph = Graph.of(archive)
    for node in graph.nodes:
        edges = [
            _edge(producer.where, _number(producer.outputs, value.key), str(at))
            for at, value in enumerate(node.inputs)
            if (producer := graph.producer(value)) is not None
        ]
        place = f"{node.file}:{node.line}" if node.file else ""
        facts = {
            "module": node.module or ROOT_SITE,
            "class": node.class_name,
            "source": place,
            **{name: repr(value) for name, value in node.arguments.items()},
            **{f"input {v.name}": f"parameter {v.parameter}" for v in node.inputs if v.parameter},
        }
        records = [archive.get(v.key) for v in node.outputs if v.key is not None and v.key in archive]
        yield _node(node.where, node.op, _namespace(node.module), facts, edges, records)


def _number(outputs: Sequence[Any], key: str | None) -> str:
    """Which output of a node a value is, as a text."""
    return str(next((at for at, output in enumerate(outputs) if output.key == key), 0))


def _module_nodes(archive: Archive) -> Iterator[dict[str, Any]]:
    """Results of modules, with edges by equal contents, and by order where the code of a module computes.

    1. A call of a module whose results are all results of what it called is no node: it passes them on.
    2. An edge leads to a call from the last one before it that returned what it was given.
    3. What no call returned, the code of the module around made: of results within it that nothing has taken.
       So are the results of a module that calls others.
    """
    flow = _ModuleFlow(archive)
    for where, (inputs, outputs) in sorted(_calls(archive).items(), key=lambda call: _end(call[1])):
        site = outputs[0].key.site
        is_composite = site in flow.composites
        edges = flow.edges(inputs, _around(where, site))
        if is_composite and all(record.digest and record.digest in flow.makers for record in outputs):
            flow.pass_on(where, site)
            continue
        if is_composite:
            edges += flow.untaken(_place(where), edges)
        module = archive.info.modules.get(site)
        facts = {"module": site, "class": module.class_name if module else ""}
        space = _namespace(site if is_composite else site.rpartition(".")[0])
        yield _node(where, site.rpartition(".")[2], space, facts, edges, outputs)
        flow.add(where, site, outputs)


class _ModuleFlow:
    """What calls of modules have returned so far, and which of it others took.

    Attributes:
        makers: Node and number of the output by digest, of the last call that returned it.
        composites: Sites of modules that call others.
    """

    def __init__(self, archive: Archive) -> None:
        self.makers: dict[str, tuple[str, str]] = {}
        sites = {r.key.site for r in archive.records if not r.key.is_bare and ":" not in r.key.site}
        self.composites = {around for site in sites for around in enclosing_sites(site)}
        self._taken: set[str] = set()
        self._within: dict[str, list[str]] = {}  # nodes by the call around them
        roots = [r for r in archive.records if not r.key.is_bare and r.key.site == ROOT_SITE]
        self._given = {r.digest for r in roots if not is_result(r.key)}

    def edges(self, inputs: Sequence[Record], around: str) -> list[dict[str, str]]:
        """Edges to a call from what returned its arguments, or from what they can be computed from."""
        known = {
            self.makers[record.digest]: str(at)
            for at, record in enumerate(inputs)
            if record.digest in self.makers
        }
        edges = [_edge(source, number, at) for (source, number), at in known.items()]
        self._taken.update(source for source, _ in known)
        is_computed = any(
            record.dtype.kind == "float" and record.digest not in (*self.makers, *self._given)
            for record in inputs
        )
        return edges + self.untaken(around, edges) if is_computed else edges

    def untaken(self, around: str, edges: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Edges from results within a call that nothing has taken, which are taken by that."""
        sources = {edge["sourceNodeId"] for edge in edges}
        nodes = [n for n in self._within.get(around, ()) if n not in self._taken and n not in sources]
        self._taken.update(nodes)
        return [_edge(node, "0", f"code of the module {at}") for at, node in enumerate(nodes)]

    def add(self, where: str, site: str, outputs: Sequence[Record]) -> None:
        """Note a node."""
        self.makers.update({r.digest: (where, str(at)) for at, r in enumerate(outputs) if r.digest})
        self._within.setdefault(_around(where, site), []).append(where)

    def pass_on(self, where: str, site: str) -> None:
        """Note that a call hands on what is within it."""
        nodes = self._within.pop(_place(where), [])
        self._within.setdefault(_around(where, site), []).extend(nodes)


def _calls(archive: Archive) -> dict[str, tuple[list[Record], list[Record]]]:
    """Arguments and results of the calls of modules that returned something."""
    calls: dict[str, tuple[list[Record], list[Record]]] = {}
    for record in archive.records:
        if not record.key.is_bare and ":" not in record.key.site:
            inputs, outputs = calls.setdefault(record.key.where, ([], []))
            if is_result(record.key):
                outputs.append(record)
            elif record.key.slot.startswith("input"):
                inputs.append(record)
    return {where: call for where, call in calls.items() if call[1]}


def _around(where: str, site: str) -> str:
    """Step and site of the module around a call."""
    return f"{where.partition('/')[0]}/{next(enclosing_sites(site), '')}"


def _place(where: str) -> str:
    """Step and site of a call, without its number."""
    return where.rpartition("@")[0] if not where.endswith(ROOT_SITE) and "@" in where else where


def _end(call: tuple[list[Record], list[Record]]) -> int:
    return max(record.order for record in call[1])


def _namespace(site: str) -> str:
    return "" if site in ("", ROOT_SITE) else site.replace("/", "_").replace(".", "/")


def _edge(source: str, output: str, argument: str) -> dict[str, str]:
    return {"sourceNodeId": source, "sourceNodeOutputId": output, "targetNodeInputId": argument}


def _node(
    node_id: str,
    label: str,
    namespace: str,
    facts: Mapping[str, str],
    edges: Sequence[Mapping[str, str]],
    outputs: Sequence[Record],
) -> dict[str, Any]:
    return {
        "id": node_id,
        "label": label,
        "namespace": namespace,
        "attrs": [{"key": key, "value": value} for key, value in facts.items() if value],
        "incomingEdges": list(edges),
        "outputsMetadata": [
            {
                "id": str(at),
                "attrs": [
                    {"key": "tensor_name", "value": record.key.text},
                    {"key": "tensor_shape", "value": f"{record.dtype.name} {shape_text(record.shape)}"},
                ],
            }
            for at, record in enumerate(outputs)
        ],
    }


def _compared(
    free: Comparison, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[dict[str, Any], int]:
    """Node data for both graphs, the worst pair of each node, and what belongs together on both panes."""
    worst: tuple[dict[str, Pair], dict[str, Pair]] = ({}, {})
    entries: dict[tuple[tuple[str, ...], tuple[str, ...]], None] = {}
    for pair in free.pairs:
        if pair.reference is None or pair.status == "excluded":
            continue
        keys = pair.origin.target if pair.origin else (pair.key,) if pair.target is not None else ()
        left = (pair.reference.key.where,) if pair.reference.key.where in ours else ()
        right = tuple(dict.fromkeys(w for key in keys if (w := Key.parse(key).where) in theirs))
        if left and right:
            entries[left, right] = None
        if pair.reference.key.slot.startswith("input"):
            continue  # of another node's result
        for places, nodes in zip(worst, (left, right), strict=True):
            for node in nodes:
                places[node] = max(places.get(node, pair), pair, key=_weight)
    documents: dict[str, Any] = {}
    for name, metric in _METRICS.items():
        data: dict[str, Any] = {}
        for places, graphs in zip(worst, (ours, theirs), strict=True):
            for node, pair in places.items():
                value = metric(pair)
                if value is not None:
                    colour = _STATUS_COLOURS.get(pair.status, _GREY if pair.is_green else _RED)
                    of_graph = data.setdefault(graphs[node], {"name": name, "results": {}})
                    of_graph["results"][node] = {"value": _json_number(value), "bgColor": colour}
        documents[f"{name.partition(',')[0].replace(' ', '_').lower()}.json"] = data
    sync = {
        "type": "sync_navigation",
        "mappingEntries": [{"leftNodeIds": [*left], "rightNodeIds": [*right]} for left, right in entries],
        "disableMappingFallback": True,
    }
    return {**documents, SYNC: sync}, len(entries)


def _weight(pair: Pair) -> tuple[bool, float]:
    error = error_of(pair)
    return not pair.is_green, math.inf if error is None or math.isnan(error) else error


def _json_number(value: float | str) -> float | str:
    return value if isinstance(value, str) or math.isfinite(value) else three_digits(value)
