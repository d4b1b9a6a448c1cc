"""The module tree of a run, from what an archive or an adapter says of its modules."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import ROOT_SITE, module_site

Shape = tuple[int, ...] | None  # None of a parameter that has none yet

ROOT: Final = "model"  # what the root is called in the Equivalence method's files
_ACTIVATION_KEY: Final = re.compile(r"(?:^|_)(?:act|activation)(?:_|$)|^feed_forward_proj$")


@dataclass(frozen=True)
class Node:
    """A module.

    Attributes:
        name: The last component of its path; `model` of the root.
        path: Its path; empty of the root.
        type: Its class, without the package; empty where it is not known.
        shapes: Of its own parameters, by name; None where they are not known.
        children: The modules in it, in the order of the model.
        is_never_called: Whether the run had no call of it.
    """

    name: str
    path: str
    type: str
    shapes: Mapping[str, Shape] | None
    children: tuple[Node, ...] = ()
    is_never_called: bool = False

    @cached_property
    def signature(self) -> str:
        """Equal for modules of equal types, shapes and names of what is in them."""
        shapes = None if self.shapes is None else sorted(self.shapes.items())
        inner = [(child.name, child.signature) for child in self.children]
        return hashlib.sha1(repr((self.type, shapes, inner)).encode(), usedforsecurity=False).hexdigest()

    def walk(self) -> Iterator[Node]:
        """The module and all in it, each before what it has in it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Tree:
    """A module tree.

    Attributes:
        source: Where it is from.
        root: The model.
        has_modules: Whether modules were listed; if not, the tree is of the names of tensors.
        activations: Entries of the configuration that name an activation.
    """

    source: str
    root: Node
    has_modules: bool = True
    activations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, archive: Archive) -> Tree:
        """The tree of an archive; of its sites' names if it lists no modules.

        Raises:
            UsageError: It holds nothing.
        """
        found = cls.of_run(str(archive.path), archive.run)
        if found is not None:
            return found
        sites = dict.fromkeys(record.key.site.partition(":")[0] for record in archive.records)
        paths = {"" if site == ROOT_SITE else site.replace("/", "."): _Facts() for site in sites}
        if not paths:
            raise UsageError(f"{archive.path}: holds neither modules nor tensors")
        return cls(str(archive.path), _grown(paths), has_modules=False)

    @classmethod
    def of_run(cls, source: str, run: Mapping[str, Any]) -> Tree | None:
        """The tree that a run's metadata tells; None if it lists no modules.

        Raises:
            UsageError: The list makes no sense.
        """
        listed = run.get("modules")
        if not listed:
            return None
        if not isinstance(listed, list):
            raise UsageError(f"{source}: modules: found a {type(listed).__name__}, expected a list")
        points = run.get("points")
        never = {
            str(point.get("site"))
            for point in (points if isinstance(points, list) else ())
            if isinstance(point, dict) and point.get("status") == "never-called"
        }
        facts: dict[str, _Facts] = {}
        for i, module in enumerate(listed, 1):
            path = module.get("path") if isinstance(module, dict) else None
            if not isinstance(path, str):
                found = abbreviate(repr(module))
                raise UsageError(f"{source}: module {i}: found {found}, expected an object with a path")
            name = str(module.get("class") or "").rpartition(".")[2]
            is_never = module_site(path) in never
            facts[path] = _Facts(name, _shapes(source, path, module.get("parameters")), is_never)
        return cls(source, _grown(facts), activations=_activations(run))


@dataclass(frozen=True)
class _Facts:
    type: str = ""
    shapes: Mapping[str, Shape] | None = None
    is_never_called: bool = False


def _shapes(source: str, path: str, parameters: object) -> dict[str, Shape]:
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise UsageError(f"{source}: module {abbreviate(path)!r}: parameters are no object")
    found: dict[str, Shape] = {}
    for name, entry in parameters.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        found[name] = tuple(shape) if isinstance(shape, list) else None
    return found


def _activations(run: Mapping[str, Any]) -> dict[str, str]:
    model = run.get("model")
    found: dict[str, str] = {}

    def visit(config: object, prefix: str) -> None:
        for key, value in config.items() if isinstance(config, Mapping) else ():
            if isinstance(value, str) and _ACTIVATION_KEY.search(str(key)):
                found[f"{prefix}{key}"] = value
            visit(value, f"{prefix}{key}.")

    visit(model.get("config") if isinstance(model, Mapping) else None, "")
    return found


def _grown(facts: Mapping[str, _Facts]) -> Node:
    """The tree of modules by path; those that only others' paths name know nothing of themselves."""
    children: dict[str, dict[str, None]] = {"": {}}
    for path in facts:
        while path:
            parent = path.rpartition(".")[0]
            is_known = path in children.setdefault(parent, {})
            children[parent][path] = None
            children.setdefault(path, {})
            if is_known:
                break
            path = parent
    made: dict[str, Node] = {}
    for path in sorted(children, key=lambda path: -path.count(".") if path else 1):
        known = facts.get(path, _Facts())
        inner = tuple(made[child] for child in children[path])
        name = path.rpartition(".")[2] or ROOT
        made[path] = Node(name, path, known.type, known.shapes, inner, known.is_never_called)
    return made[""]


def grouped(nodes: tuple[Node, ...], *, numbers_only: bool) -> list[list[Node]]:
    """Modules of one parent, those together that are equal in all but their name.

    Args:
        nodes: Modules of one parent.
        numbers_only: Whether only members of lists, whose names are numbers, go together.
    """
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        is_alone = numbers_only and not node.name.isdigit()
        groups.setdefault(node.path if is_alone else (node.signature,), []).append(node)
    return list(groups.values())


def full(node: Node, depth: int | None = None) -> dict[str, Any]:
    """The full tree, to so many levels below the root, as the Equivalence method writes it."""
    inner = [full(child, below(depth)) for child in node.children] if depth != 0 else []
    return {"name": node.name, "type": node.type, "children": inner}


def compressed(node: Node, depth: int | None = None) -> dict[str, Any]:
    """The compressed tree, as the Equivalence method writes it; unlike there, unequal shapes part."""
    return _compressed([node], depth)


def _compressed(group: list[Node], depth: int | None) -> dict[str, Any]:
    inner = grouped(group[0].children, numbers_only=False) if depth != 0 else []
    return {
        "type": group[0].type,
        "names": [node.name for node in group],
        "children": [_compressed(child, below(depth)) for child in inner],
    }


def paths(node: Node, depth: int | None = None) -> list[str]:
    """The paths of all modules but the root, each before what it has in it."""
    found = (inner.path for inner in node.walk() if inner.path)
    return [path for path in found if depth is None or path.count(".") < depth]


def below(depth: int | None) -> int | None:
    """The depth that is left one level further down."""
    return None if depth is None else depth - 1
