"""Plan a capture on a Neuron device: NxDI's tensor capture configuration for the points of a comparison.

Hooks do not fire in a compiled graph: what is captured is decided before it is compiled, as outputs of the
graph. So it pays to know before that which points can be had, under which module, and what each will hold.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.alignment import Alignment, read_mapping
from tensorcap.capture_plan.module_list import ModuleList, read_modules
from tensorcap.capture_plan.neuron_rules import Settings, obstacle, remarks, stand_in
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, UsageError, did_you_mean
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import ROOT_SITE, Key, unescape

PointStatus = Literal["captured", "replaced", "by-hand", "not-capturable"]
ModuleListSource = str | os.PathLike[str] | Archive

_MAX_CONFIG_BYTES: Final = 64 * 1024 * 1024
_SPAN: Final = re.compile(r"(.+)\.(\d{1,6})-(\d{1,6})(|\..*)")  # of numbers, in vllm-neuron's patterns
_PREFIX: Final = "model."  # which an NxDI model has not, and the reference has


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """What becomes of one point.

    Attributes:
        point: As it was asked for.
        status: `captured` under its own module, `replaced` by another one that gives the same, `by-hand` if a
            line in the code has to register it, or `not-capturable`.
        module: The module to capture, "" if there is none.
        is_input: Whether the module's first argument is captured, and not its result.
        reason: Why it is replaced, registered by hand or not capturable.
        remarks: What a reader of the tensor has to know.
    """

    point: str
    status: PointStatus
    module: str = ""
    is_input: bool = False
    reason: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A plan of a capture on a device.

    Attributes:
        source: Where the modules come from.
        points: What becomes of each point.
        notes: Remarks on the whole.
    """

    source: str
    points: tuple[PlannedPoint, ...]
    notes: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        """The modules to capture, each once."""
        return list(dict.fromkeys(point.module for point in self.points if point.module))

    @property
    def captures_inputs(self) -> bool:
        """Whether arguments are to be captured, which are then of every module."""
        return any(point.is_input for point in self.points)

    @property
    def by_hand(self) -> int:
        """How many tensors a line in the code has to register."""
        return sum(point.status == "by-hand" for point in self.points)

    @property
    def extra_outputs(self) -> int:
        """How many outputs the compiled graph gets in addition, placeholders included."""
        return len(self.modules) * (2 if self.captures_inputs else 1) + self.by_hand

    @property
    def exit_status(self) -> int:
        """1 if a point cannot be captured, or there is none, else 0."""
        lost = any(point.status == "not-capturable" for point in self.points)
        return int(lost or not self.points)

    def config(self) -> dict[str, Any]:
        """The part of a `neuron_config` that captures the points."""
        return {
            "tensor_capture_config": {
                "modules_to_capture": self.modules,
                "max_intermediate_tensors": self.by_hand or None,
                "capture_inputs": self.captures_inputs,
            },
            "output_logits": True,
        }

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "format": "tensorcap-plan",
            "version": 1,
            "source": self.source,
            "points": json_value(self.points),
            "extra_outputs": self.extra_outputs,
            "notes": list(self.notes),
            "neuron_config": self.config(),
        }


def plan(
    modules: ModuleListSource,
    *,
    points: Iterable[str] = (),
    mapping: Alignment | str | os.PathLike[str] | None = None,
    neuron_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> CapturePlan:
    """Plan which modules of an NxDI port are to be captured on the device. Not tried on a device.

    Args:
        modules: An archive of the port's run on a CPU, or a list of its modules; see `read_modules`.
        points: Module paths, keys or globs over module paths; with none, and without a mapping, those that
            the `neuron_config` names, or else all modules that can be captured whole.
        mapping: The target's places of a mapping are points, too.
        neuron_config: Settings of the run, or their JSON file, for kernels and ranks.

    Raises:
        UsageError: A glob matches no module, or the mapping makes no sense.
        ReadError: A file cannot be read.
    """
    listed = read_modules(modules)
    settings = _settings(neuron_config)
    wanted = [*_of_mapping(mapping), *points]
    if wanted:
        planned = [_planned(listed, point, settings) for point in _expanded(listed, wanted)]
    else:
        if names := list(_configured(listed, settings)):
            planned = [_planned(listed, name, settings) for name in names]
        else:
            planned = [_planned(listed, path, settings) for path in listed.classes]
            planned = [point for point in planned if point.status == "captured" and _is_whole(point)]
    return CapturePlan(listed.source, tuple(planned), tuple(_notes(listed, settings, planned)))


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a `neuron_config` from JSON: the object itself, or one that has it under that name.

    Raises:
        ReadError: It cannot be read, or is no JSON object.
    """
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_MAX_CONFIG_BYTES))
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{path}: is no JSON: {error}") from None
    inner = content.get("neuron_config", content) if isinstance(content, dict) else None
    if not isinstance(inner, dict):
        raise ReadError(f"{path}: is no JSON object, expected settings of NxDI's NeuronConfig")
    return inner


def read_points(path: str | os.PathLike[str]) -> list[str]:
    """Read points from a file: a module path, a key or a glob in each line, remarks behind `#`.

    Raises:
        ReadError: It cannot be read, or is no text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: is no text in UTF-8: {error}") from None
    return [line for line in lines if line]


def _settings(neuron_config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Settings:
    if neuron_config is None:
        return Settings({})
    if isinstance(neuron_config, Mapping):
        return Settings(neuron_config)
    return Settings(read_settings(neuron_config))


def _configured(modules: ModuleList, settings: Settings) -> Iterator[str]:
    """The modules that the settings name: NxDI's by path, vllm-neuron's by range or pattern, too."""
    nxdi, vllm = (settings.values.get(name) for name in ("tensor_capture_config", "tensor_capture"))
    if isinstance(nxdi, Mapping):
        yield from map(str, nxdi.get("modules_to_capture") or ())
    for pattern in (vllm.get("modules") or ()) if isinstance(vllm, Mapping) else ():
        span = _SPAN.fullmatch(str(pattern))
        numbers = range(int(span[2]), int(span[3]) + 1) if span else ()
        patterns = [f"{span[1]}.{number}{span[4]}" for number in numbers] if span else [str(pattern)]
        matched = [path for path in modules.classes if any(_fits(path, each) for each in patterns)]
        yield from matched or [str(pattern)]


def _fits(path: str, pattern: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:
        return path == pattern


def _of_mapping(mapping: Alignment | str | os.PathLike[str] | None) -> Iterator[str]:
    if mapping is None:
        return
    alignment = mapping if isinstance(mapping, Alignment) else read_mapping(mapping)
    for entry in alignment.entries:
        for _, places in entry.expanded():
            yield from places


def _expanded(modules: ModuleList, points: Sequence[str]) -> list[str]:
    """The points, each once; globs as the modules that they match."""
    expanded: dict[str, None] = {}
    for point in points:
        if not any(mark in point for mark in "*?["):
            expanded[point] = None
            continue
        matched = fnmatch.filter(modules.classes, point)
        if not matched:
            raise UsageError(f"{point}: matches none of {len(modules.classes)} modules of {modules.source}")
        expanded.update(dict.fromkeys(matched))
    return list(expanded)


def _planned(modules: ModuleList, point: str, settings: Settings) -> PlannedPoint:
    """Decide one point.

    1. Its module and slot; a point within a module's code has to be registered by hand.
    2. What is no result and no first argument cannot be had.
    3. An attention is replaced by its output projection.
    4. A module that is not called cannot be captured.
    """
    site, slot = _site_and_slot(point)
    path, colon, code = site.partition(":")
    path = unescape(path)
    if path == ROOT_SITE or not path:
        return _lost(point, "the whole model is no module of itself; its logits are an output of the graph")
    if path not in modules.classes and path.startswith(_PREFIX) and path[len(_PREFIX) :] in modules.classes:
        path = path[len(_PREFIX) :]
    if path not in modules.classes:
        hint = did_you_mean(path, modules.classes)
        return _lost(point, f"there is no such module, and NxDI stops at it{f'. {hint}' if hint else ''}")
    if colon:
        return PlannedPoint(
            point,
            "by-hand",
            reason=f"it lies within the code of {path}: register_tensor({code!r}, …) there; names are lost, "
            "the order of the calls counts",
        )
    if lost := _lost_slot(modules, path, slot):
        return _lost(point, lost)
    is_input = slot.partition(".")[0] == "input"
    other = None if is_input else stand_in(modules, path)
    module, reason = other or (path, "")
    if why := ("" if is_input and path not in modules.never_called else obstacle(modules, module, settings)):
        return _lost(point, why)
    status: PointStatus = "replaced" if other else "captured"
    return PlannedPoint(point, status, module, is_input, reason, tuple(remarks(modules, module, settings)))


def _site_and_slot(point: str) -> tuple[str, str]:
    """Site and slot of a point: of a full key, of `SITE/SLOT`, or of a module path."""
    try:
        key = Key.parse(point)
    except UsageError:
        return point, "output"
    if not key.is_bare:
        return key.site, key.slot
    site, slash, slot = point.removeprefix("rank*/").partition("/")
    return site.partition("@")[0] or site, slot if slash else "output"


def _lost_slot(modules: ModuleList, path: str, slot: str) -> str:
    """Why a slot cannot be captured, "" if it can."""
    kind = slot.partition(".")[0]
    if kind not in ("input", "output"):
        return f"{slot} is neither a result nor an argument of the module"
    known = (modules.results if kind == "output" else modules.arguments).get(path, ())
    first = known[:1] or (f"{kind}.0", f"{kind}.hidden_states")
    if slot == kind or slot in first:
        return ""
    return f"NxDI hands out the first {'result' if kind == 'output' else 'argument'} of a module only"


def _lost(point: str, reason: str) -> PlannedPoint:
    return PlannedPoint(point, "not-capturable", reason=reason)


def _is_whole(point: PlannedPoint) -> bool:
    """Whether every rank has the whole of a tensor, which no module within gives as well."""
    path = point.module
    twice = path.endswith(".o_proj.o_proj")
    return not twice and not any(
        "rank 0's" in remark or "several tensors" in remark for remark in point.remarks
    )


def _notes(modules: ModuleList, settings: Settings, planned: Sequence[PlannedPoint]) -> Iterator[str]:
    yield "not run on a device: read in NxDI's sources of July 2026"
    if settings.values.get("on_device_sampling_config") is None:
        yield "on_device_sampling_config has to be set, or NxDI refuses to capture"
    if not settings.values:
        yield "without --neuron-config it is not known which kernels are used, nor how many ranks there are"
    if not any(modules.classes.values()):
        yield f"{modules.source} has no classes: attentions, containers and shards are told by names alone"
    if any(point.is_input for point in planned):
        yield "capture_inputs takes the first argument of every module, not only of those asked for"
    yield "another set of points is another graph, which has to be compiled; keep the logits of a run without"
