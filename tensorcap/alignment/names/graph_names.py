"""Names that other runtimes give to results, as the sites of modules that they come from.

`/model/block/conv/Conv_output_0` of an ONNX graph and `model/block/conv/Relu:0` of TensorFlow are both
`block.conv`, if the other side has such a site.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tensorcap.alignment.names.site_templates import fold
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import ROOT_SITE, natural
from tensorcap_formats.records import Record

_OUTPUT_NUMBER: Final = re.compile(r":\d+$")  # of TensorFlow
_OP: Final = re.compile(r"[A-Z][A-Za-z0-9]*(?:_\d+)*(?:_output_\d+)?")  # as a whole component
_PARAMETER: Final = re.compile(
    r"(?:.*[./_])?(?:weight|bias|kernel|gamma|beta|embeddings?|moving_mean|moving_variance|running_mean"
    r"|running_var|num_batches_tracked|vars/\d+)(?::\d+)?"
)
_OUTPUT: Final = re.compile(
    r"out|logit|pred|prob|score|result", re.IGNORECASE
)  # in names of a graph's outputs
_LONGEST_PREFIX: Final = 4  # components
_NEAR: Final = 0.02  # by which statistics differ, at most, if values are the same but for rounding


def names_results(archive: Archive) -> bool:
    """Whether an archive is a file from elsewhere whose names are not mostly those of parameters."""
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


def graph_names(dump: Archive, run: Archive, *, may_read: bool = True) -> Callable[[str], str]:
    """Make the function that gives names of a file from elsewhere as sites of a run.

    1. A name becomes a path of modules.
    2. Components that all paths begin with are removed, or some that sites begin with are put before, if more
       paths are sites then.
    3. Of several ops of one module one is its result, see `_ops_within`. The others keep their names.
    4. A name without a path that is no site is the model's result, if it alone has its shape, and has its values
       or is called an output.

    Args:
        dump: The file, with results under bare names.
        run: The run, with sites.
        may_read: Whether tensors may be read, for their statistics.

    Returns:
        A function as `Rules.functions` has it: it takes names of both sides, whose numbers stand for others.
    """
    tensors = {record.key.site: record for record in dump.records if record.key.is_bare}
    results: dict[str, Record] = {}
    for record in run.records:
        if not record.key.is_bare and record.key.slot.startswith("output"):
            results.setdefault(record.key.site, record)
    sites = {fold(record.key.site)[0] for record in run.records if not record.key.is_bare}
    prefix = _Prefix.between([module_path(name) for name in tensors], sites)
    names_by_path: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        names_by_path[prefix.exchange(module_path(name))].append(name)

    def is_near(tensor: Record, result: Record) -> bool:
        return may_read and _are_near((dump, tensor), (run, result))

    others = _ops_within(names_by_path, tensors, results, is_near)

    outputs = [
        name
        for name, tensor in tensors.items()
        if ROOT_SITE in results
        and tensor.shape == results[ROOT_SITE].shape
        and not {"/", "."} & set(name)
        and fold(prefix.exchange(name))[0] not in sites
    ]
    is_output = len(outputs) == 1 and (
        bool(_OUTPUT.search(outputs[0])) or is_near(tensors[outputs[0]], results[ROOT_SITE])
    )

    def canonical(name: str) -> str:
        template = fold(name)[0]
        if is_output and template == fold(outputs[0])[0]:
            return ROOT_SITE
        is_kept = template in sites or template in others
        return name if is_kept else prefix.exchange(module_path(name))

    return canonical


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


def _ops_within(
    names_by_path: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Record],
    results: Mapping[str, Record],
    is_near: Callable[[Record, Record], bool],
) -> set[str]:
    """Templates of names of which another name is the result of the module.

    1. Each name of a module that has several is held against the module's result, if it has its size.
    2. The result is the op that is near most often: in the modules of the template, else in all of these ops.
    3. If none is near anywhere, it is the only op that has the size of the result, if there is one.

    Args:
        names_by_path: Names of ops by the path of modules.
        tensors: By name.
        results: Of modules, by site.
        is_near: Whether a tensor has the values of a result.
    """
    modules = [(path, names) for path, names in names_by_path.items() if len(names) > 1 and path in results]
    near, sized = defaultdict[object, Counter[str]](Counter), defaultdict[object, Counter[str]](Counter)
    for path, names in modules:
        for name in names:
            if tensors[name].size == results[path].size:
                op = _op(name)
                sized[fold(path)[0]][op] += 1
                if is_near(tensors[name], results[path]):
                    near[fold(path)[0]][op] += 1
                    near[_ops(names)][op] += 1
    others: set[str] = set()
    for path, names in modules:
        known = near[fold(path)[0]] or near[_ops(names)]
        fitting = sized[fold(path)[0]]
        op = max(sorted(known, key=natural, reverse=True), key=lambda op: known[op]) if known else ""
        if not known and len(fitting) == 1:
            op = next(iter(fitting))
        others |= {fold(name)[0] for name in names if _op(name) != op}
    return others


def _op(name: str) -> str:
    return name.rpartition("/")[2]


def _ops(names: Sequence[str]) -> frozenset[str]:
    return frozenset(map(_op, names))


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
