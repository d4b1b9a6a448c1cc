"""Names that other runtimes give to results, as the sites of modules that they come from.

`/model/block/conv/Conv_output_0` of an ONNX graph and `model/block/conv/Relu:0` of TensorFlow are both
`block.conv`, if the other side has such a site.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from tensorcap_formats.archive import Archive

_OUTPUT_NUMBER: Final = re.compile(r":\d+$")  # of TensorFlow
_OP: Final = re.compile(r"[A-Z][A-Za-z0-9]*(?:_\d+)*(?:_output_\d+)?")  # as a whole component
_DIGITS: Final = re.compile(r"\d+")
_PARAMETER: Final = re.compile(
    r"(?:.*[./_])?(?:weight|bias|kernel|gamma|beta|embeddings?|moving_mean|moving_variance|running_mean"
    r"|running_var|num_batches_tracked|vars/\d+)(?::\d+)?"
)
_LONGEST_PREFIX: Final = 4  # components


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


def graph_names(names: Collection[str], sites: Collection[str]) -> Callable[[str], str]:
    """Make the function that gives names of one side as sites of the other.

    1. A name becomes a path of modules.
    2. Components that all paths begin with are removed, or some that sites begin with are put before, if more
       paths are sites then.

    Args:
        names: Of results, on the one side.
        sites: Of modules, on the other.

    Returns:
        A function as `Rules.functions` has it: names of both sides, whose numbers stand for others.
    """
    known = {_DIGITS.sub("#", site) for site in sites}
    paths = [module_path(name).split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    heads = {".".join(site.split(".")[:n]) for site in sites for n in range(1, _LONGEST_PREFIX + 1)}

    def renamed(path: list[str], removed: int, head: str) -> str:
        rest = ".".join(path[removed:])
        return f"{head}.{rest}" if head else rest

    def hits(removed: int, head: str) -> int:
        return sum(_DIGITS.sub("#", renamed(path, removed, head)) in known for path in paths)

    changes = [(0, ""), *((n, "") for n in range(1, shared + 1)), *((0, head) for head in sorted(heads))]
    removed, head = max(changes, key=lambda change: hits(*change))  # of equally many, the first

    def canonical(name: str) -> str:
        if _DIGITS.sub("#", name) in known:
            return name
        path = module_path(name).split(".")
        return renamed(path, removed if len(path) > removed else 0, head)

    return canonical
