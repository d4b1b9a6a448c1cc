"""Names that other runtimes give to results, as the sites of modules that they come from.

`/model/block/conv/Conv_output_0` of an ONNX graph and `model/block/conv/Relu:0` of TensorFlow are both
`block.conv`, if the other side has such a site.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tensorcap.alignment.mapping import SideName
from tensorcap.alignment.names.name_patterns import NamePattern
from tensorcap.alignment.names.rulesets import Expected, Rules
from tensorcap.alignment.names.site_templates import fold
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_OUTPUT_NUMBER: Final = re.compile(r":\d+$")  # of TensorFlow
_OP: Final = re.compile(r"[A-Z][A-Za-z0-9]*(?:_\d+)*(?:_output_\d+)?")  # as a whole component
_VARIABLE: Final = re.compile(r"\{\d+\}")  # of a template
_PARAMETER: Final = re.compile(
    r"(?:.*[./_])?(?:q?weight|bias|kernel|scales|qzeros|g_idx|inv_freq|gamma|beta|embeddings?|moving_mean"
    r"|moving_variance|running_mean|running_var|num_batches_tracked|vars/\d+)(?::\d+)?"
)
_OUTPUT: Final = re.compile(r"out|logit|pred|prob|score|result", re.IGNORECASE)  # what a graph calls them
_WEIGHTS: Final = ("gguf", "keras", "onnx")  # containers that hold no results
_LONGEST_PREFIX: Final = 4  # components
_NUMBERED: Final = re.compile(r"([A-Za-z]+)(?:_(\d+))?(?:_output_\d+)?$")
_LATE: Final = ("Mul", "Add")  # ops that end norms, activations and linear modules
_NEAR: Final = 0.02  # by which statistics differ, at most, if values are the same but for rounding


def names_results(archive: Archive) -> bool:
    """Whether an archive is a file from elsewhere whose names are not mostly those of parameters."""
    if archive.container in _WEIGHTS:
        return False
    names = [record.key.site for record in archive.records if record.key.is_bare]
    return bool(names) and 2 * sum(bool(_PARAMETER.fullmatch(name)) for name in names) < len(names)


def module_path(name: str) -> str:
    """The path of modules in a name of a graph's tensor.

    Example:
        >>> module_path("/block/conv/Conv_output_0"), module_path("block/conv/Relu:0"), module_path("conv")
        ('block.conv', 'block.conv', 'conv')
    """
    if "/" not in name:
        return name
    parts = _OUTPUT_NUMBER.sub("", name).strip("/").split("/")
    if len(parts) > 1 and _OP.fullmatch(parts[-1]):
        parts.pop()
    return ".".join(parts)


def graph_rules(dump: Archive, run: Archive, side: SideName, *, may_read: bool = True) -> Rules:
    """Make the rules that give names of a file from elsewhere as sites of a run.

    1. A name becomes a path of modules.
    2. Components that all paths begin with are removed, or some that sites begin with are put before, if more
       paths are sites then.
    3. A name without a path that is no site is the model's result, if it alone has its shape, and if it has
       its values or is called an output.
    4. Of several ops of one module one is its result, see `_Graph.ops_within`. The others keep their names;
       they are expected to have no counterpart, if what is computed of them would show an error.

    Args:
        dump: The file, with results under bare names.
        run: The run, with sites.
        side: Which of the two the file is.
        may_read: Whether tensors may be read, for their statistics.
    """
    graph = _Graph(dump, run, may_read=may_read)
    output = graph.output()
    kept, within = graph.ops_within(has_output=bool(output))

    def canonical(name: str) -> str:
        template = fold(name)[0]
        if output and template == fold(output)[0]:
            return ROOT_SITE
        is_kept = template in graph.sites or template in kept
        return name if is_kept else graph.path(name)

    return Rules(functions=(canonical,), expected=(_expected(within, side),) if within else ())


def exported_wrapper(graph: Archive, run: Archive) -> Rules | None:
    """The rule that a graph was exported with what wraps the model of the other run; None if it was not.

    The wrapper is the path that most of the graph's modules begin with, if at least half of the run's modules
    stand below it, more than elsewhere. Its results are then those of the run's model.
    """
    ours, theirs = (
        {_without_numbers(site) for site in archive.info.modules if site != ROOT_SITE}
        for archive in (run, graph)
    )
    parts = [site.split(".") for site in theirs]
    heads = {".".join(path[:count]) for path in parts for count in range(1, len(path))}
    counts = {head: sum(f"{head}.{site}" in theirs for site in ours) for head in heads}
    wrapper = max(sorted(counts), key=lambda head: counts[head], default="")
    if not wrapper or 2 * counts[wrapper] < len(ours) or counts[wrapper] <= len(ours & theirs):
        return None
    depth = wrapper.count(".") + 1

    def canonical(name: str) -> str:
        template = _without_numbers(name)
        if template == wrapper:
            return ROOT_SITE
        return ".".join(name.split(".")[depth:]) if template.startswith(f"{wrapper}.") else name

    return Rules(functions=(canonical,))


def _without_numbers(site: str) -> str:
    """A path with all numbers alike, however many come before them."""
    return _VARIABLE.sub("{}", fold(site)[0])


def _expected(templates: Collection[str], side: SideName) -> Expected:
    """The rule that ops within modules have no counterpart."""
    names = (r"\d+".join(map(re.escape, _VARIABLE.split(template))) for template in sorted(templates))
    pattern = NamePattern("", "whole", re.compile(f"(?:{'|'.join(names)})$"), "/", frozenset())
    return Expected("an op within a module, which is compared by its result", "", side, (pattern,))


class _Graph:
    """Tensors of a file from elsewhere, and the results of the modules of a run.

    Attributes:
        sites: Templates of the run's sites.
    """

    def __init__(self, dump: Archive, run: Archive, *, may_read: bool) -> None:
        self._archives = dump, run
        self._may_read = may_read
        self._tensors = {record.key.site: record for record in dump.records if record.key.is_bare}
        self._results: dict[str, Record] = {}
        for record in run.records:
            if not record.key.is_bare and record.key.slot.startswith("output"):
                self._results.setdefault(record.key.site, record)
        self.sites = {fold(record.key.site)[0] for record in run.records if not record.key.is_bare}
        self._prefix = _Prefix.between([module_path(name) for name in self._tensors], self.sites)
        self._names: dict[str, list[str]] = defaultdict(list)
        for name in self._tensors:
            self._names[self.path(name)].append(name)

    def path(self, name: str) -> str:
        """The site that a name stands for."""
        return self._prefix.exchange(module_path(name))

    def output(self) -> str:
        """The name of the model's result, if it has a name of its own; else empty."""
        root = self._results.get(ROOT_SITE)
        candidates = [
            name
            for name, tensor in self._tensors.items()
            if root is not None and tensor.shape == root.shape
            if not {"/", "."} & set(name) and fold(self.path(name))[0] not in self.sites
        ]
        if len(candidates) != 1:
            return ""
        is_output = _OUTPUT.search(candidates[0]) or self._is_near(candidates[0], ROOT_SITE)
        return candidates[0] if is_output else ""

    def ops_within(self, *, has_output: bool) -> tuple[set[str], set[str]]:
        """Templates of names of ops that are not the result of their module.

        1. Each name of a module that has several is held against the module's result, if it has its size.
        2. The result is the op that is near most often: in the modules of the template, else in all of these
           ops. Of equally many, also if none is near anywhere, it is the one that is likely the last.
        3. If the model's result has a name of its own, a module that gives it has no further name for it.

        Args:
            has_output: Whether the model's result has a name of its own.

        Returns:
            All such ops; and those of modules of which the result is known, and from whose result something
            else is computed: if one were the result in truth, that would differ.
        """
        root = self._results.get(ROOT_SITE)
        last = {
            site
            for site, result in self._results.items()
            if root is not None and (result.digest, result.shape) == (root.digest, root.shape)
        }
        modules, kept, within = {}, set[str](), set[str]()
        for path, names in self._names.items():
            if has_output and path in last:
                within |= {fold(name)[0] for name in names if "/" in name}
            elif len(names) > 1 and path in self._results:
                modules[path] = names
        near = self._count_near(modules)
        for path, names in modules.items():
            counts = near[fold(path)[0]] or near[_ops(names)]
            fitting = {_op(name) for name in names if self._fits(name, path)}
            result = max(sorted(counts or fitting, key=_lateness), key=lambda op: counts[op], default="")
            others = {fold(name)[0] for name in names if _op(name) != result}
            kept |= others
            if result and path not in last:
                within |= others
        return kept | within, within

    def _count_near(self, modules: Mapping[str, Sequence[str]]) -> Mapping[object, Counter[str]]:
        """How often each op has the values of its module's result, by template and by the ops it is among."""
        near = defaultdict[object, Counter[str]](Counter)
        for path, names in modules.items():
            for name in names:
                if self._fits(name, path) and self._is_near(name, path):
                    near[fold(path)[0]][_op(name)] += 1
                    near[_ops(names)][_op(name)] += 1
        return near

    def _fits(self, name: str, site: str) -> bool:
        return self._tensors[name].size == self._results[site].size

    def _is_near(self, name: str, site: str) -> bool:
        tensors = zip(self._archives, (self._tensors[name], self._results[site]), strict=True)
        return self._may_read and _are_near(*tensors)


def _op(name: str) -> str:
    return name.rpartition("/")[2]


def _lateness(op: str) -> tuple[int, int, str]:
    """Sorts ops of a module by how likely they come late, the last first: `Add_1`, `Add`, `Mul`, `MatMul`."""
    match = _NUMBERED.match(op)
    kind, number = (match[1], int(match[2] or 0)) if match else ("", 0)
    return -number, -_LATE.index(kind) if kind in _LATE else 1, op


def _ops(names: Sequence[str]) -> frozenset[str]:
    return frozenset(map(_op, names))


class _Prefix:
    """What paths begin with, and sites begin with in its place."""

    def __init__(self, removed: int, added: str) -> None:
        self._removed = removed  # components
        self._added = added

    @classmethod
    def between(cls, paths: Sequence[str], sites: set[str]) -> _Prefix:
        """The prefixes with which most paths are sites; of equally many, the least change."""
        parts = [path.split(".") for path in paths]
        shared = 0
        while all(len(path) > shared + 1 and path[shared] == parts[0][shared] for path in parts):
            shared += 1
        heads = {".".join(site.split(".")[:n]) for site in sites for n in range(1, _LONGEST_PREFIX + 1)}
        changes = [
            cls(0, ""),
            *(cls(n, "") for n in range(1, shared + 1)),
            *(cls(0, h) for h in sorted(heads)),
        ]
        return max(changes, key=lambda change: sum(fold(change.exchange(path))[0] in sites for path in paths))

    def exchange(self, path: str) -> str:
        """A path with the other prefix."""
        parts = path.split(".")
        rest = parts[self._removed :] or parts
        return ".".join([self._added, *rest] if self._added else rest)


def _are_near(*tensors: tuple[Archive, Record]) -> bool:
    """Whether two tensors have nearly the same statistics."""
    try:
        one, other = (archive.statistics(record) for archive, record in tensors)
    except ReadError:
        return False
    pairs = ((one.minimum, other.minimum), (one.maximum, other.maximum), (one.l2, other.l2))
    if any(value is None for pair in pairs for value in pair):
        return False
    scale = max(abs(float(one.minimum or 0)), abs(float(one.maximum or 0)))
    scales = scale, scale, float(one.l2 or 0)
    return all(
        abs(float(a or 0) - float(b or 0)) <= _NEAR * s for (a, b), s in zip(pairs, scales, strict=True)
    )
