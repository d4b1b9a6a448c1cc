"""What the run metadata of an archive say, parsed (`specs/archive.md`, section 8).

Each entry may be absent. One that is damaged (a list for a mapping, a number for a text) counts as absent,
and so does a damaged part of an entry: nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tensorcap_formats.keys import module_site

_NUMBER: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a run says of a parameter or a buffer.

    Attributes:
        shape: Its shape; None if it is not known.
        dtype: Its dtype, "" if it is not known.
    """

    shape: tuple[int, ...] | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What a run says of a module.

    Attributes:
        path: Its path in the model, as the model spells it; "" for the model itself.
        class_name: Its class with the package, "" if unknown.
        is_training: Whether it was in training mode; None if unknown.
        parameters: Its own parameters, by name.
        buffers: Its own buffers, by name.
    """

    path: str
    class_name: str = ""
    is_training: bool | None = None
    parameters: Mapping[str, TensorInfo] = field(default_factory=dict)
    buffers: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def short_class(self) -> str:
        """Its class without the package, "" if unknown."""
        return self.class_name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class PointInfo:
    """What became of a site under capture (ARC-71).

    Attributes:
        site: The site, as keys spell it.
        status: `captured`, `never-called`, `excluded` or `not-capturable`.
        kind: `module`, `function` or `probe`.
        reason: What else there is to say, "" for nothing.
        calls: How often it was called; None if unknown.
        unfinished: How many calls did not return.
        slots: What could not be captured at a site that otherwise was; empty for an entry of the whole site.
    """

    site: str
    status: str = ""
    kind: str = "module"
    reason: str = ""
    calls: int | None = None
    unfinished: int = 0
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScopeInfo:
    """What a capture was asked to record (CAP-55).

    Attributes:
        include: Globs of what to keep, all if empty.
        exclude: Globs of what not to keep.
        inputs: Whether inputs of modules were recorded; those of the model always are.
        level: `op` or `export` if ops were recorded, else "".
        ops_in: Globs of the modules whose ops were recorded, all if empty.
        watch: Functions whose variables were recorded.
        slices: What parts of tensors were kept.
        steps: Which steps, "" for all.
        sample: How many calls of each site; None for all.
        max_bytes: Limit of the archive; None for none.
        grads: Whether gradients were recorded.
        params: Whether parameters and buffers were recorded.
        eager: Whether compiled code ran as plain code.
        inner: Whether what lies within subgraphs was recorded.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    inputs: bool = True
    level: str = ""
    ops_in: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    steps: str = ""
    sample: int | None = None
    max_bytes: int | None = None
    grads: bool = False
    params: bool = False
    eager: bool = False
    inner: bool = False


@dataclass(frozen=True, slots=True)
class StopInfo:
    """Where recording stopped at its limit of bytes (CAP-53).

    Attributes:
        at: Key of the first tensor that was not recorded, "" if unknown.
        max_bytes: The limit; None if unknown.
    """

    at: str = ""
    max_bytes: int | None = None

    @property
    def text(self) -> str:
        """What was reached and where.

        Example:
            >>> StopInfo("0/a/output", 900).text
            'its limit of 900 bytes, at 0/a/output'
        """
        limit = "of bytes" if self.max_bytes is None else f"of {self.max_bytes} bytes"
        return f"its limit {limit}, at {self.at or 'an unknown tensor'}"


@dataclass(frozen=True, slots=True)
class InjectedSlot:
    """What became of a slot whose values were to be replaced (INJ-21).

    Attributes:
        site: The site.
        slot: The slot.
        status: `injected`, or why it was not.
        reason: What else there is to say, "" for nothing.
        calls: The steps in which values were replaced, as a text, by the call's number within its step.
    """

    site: str
    slot: str
    status: str = ""
    reason: str = ""
    calls: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InjectionInfo:
    """What was put in the place of a run's own tensors (INJ-20).

    Attributes:
        source: The archive whose values were taken, "" if unknown.
        root: Its root hash, "" if unknown.
        map_text: The map file through which they were taken, "" for none.
        slots: Each slot that was to be replaced.
    """

    source: str = ""
    root: str = ""
    map_text: str = ""
    slots: tuple[InjectedSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What a run ended by, if not as it should.

    Attributes:
        type: Class of the exception, "" if there was none.
        message: Its text.
    """

    type: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """Class and message, "" if neither is known."""
        return ": ".join(part for part in (self.type, self.message) if part)


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """How to repeat a run.

    Attributes:
        path: The model: `file.py:function`, or a folder or id; "" if unknown.
        options: Options of the command line by their Python names.
    """

    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What an archive says of its run.

    Attributes:
        framework: Name of the framework, "" if unknown.
        settings: Settings of the framework that change what its operators give.
        model_class: Class of the model with its package, "" if unknown.
        config: The model's configuration.
        attention_implementation: How the model says that it computes attention, "" if unknown.
        modules: The model's modules by site, in the order of its tree; empty if they are not listed.
        aliases: Sites of shared modules that have the records, by their other sites.
        dtype: Dtype of most of the model's parameters, "" if unknown.
        compute_dtype: Dtype that it computed in, "" if unknown.
        device: Where it ran, "" if unknown.
        packages: Versions of packages, by name.
        workload: How to repeat the run.
        inputs: SHA-256 of what the model was given, by key text; "" if an input has none.
        scope: What was to be recorded; None if the run does not say.
        points: What became of each site.
        steps: Count of steps; None if unknown.
        phases: Of each step `prefill`, `decode` or `forward`, "" if unknown.
        stopped: Where recording stopped at its limit of bytes; None if it did not.
        injected: What was put in the place of the run's own tensors; None for a run of its own values.
        error: What the run ended by; None if nothing is known.
        notes: What else a reader has to know, a sentence each.
        control: How far each output is from that of a graph without taps.
        duration_seconds: How long the run took; None if unknown.
    """

    framework: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_class: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    attention_implementation: str = ""
    modules: Mapping[str, ModuleInfo] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    compute_dtype: str = ""
    device: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    workload: WorkloadInfo = field(default_factory=WorkloadInfo)
    inputs: Mapping[str, str] = field(default_factory=dict)
    scope: ScopeInfo | None = None
    points: tuple[PointInfo, ...] = ()
    steps: int | None = None
    phases: tuple[str, ...] = ()
    stopped: StopInfo | None = None
    injected: InjectionInfo | None = None
    error: ErrorInfo | None = None
    notes: tuple[str, ...] = ()
    control: tuple[Mapping[str, Any], ...] = ()
    duration_seconds: float | None = None

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> RunInfo:
        """Parse run metadata.

        Example:
            >>> info = RunInfo.of({"dtype": "float32", "modules": [{"path": "", "class": "my.Net"}, 3]})
            >>> info.dtype, info.modules["@root"].short_class, info.config
            ('float32', 'Net', {})
        """
        framework, model, workload = (_mapping(run, name) for name in ("framework", "model", "workload"))
        modules = (_module(entry) for entry in _mappings(run, "modules"))
        points = (_point(entry) for entry in _mappings(run, "points"))
        return cls(
            framework=_text(framework, "name"),
            settings=_mapping(framework, "settings"),
            model_class=_text(model, "class"),
            config=_mapping(model, "config"),
            attention_implementation=_text(model, "attn_implementation"),
            modules={module_site(module.path): module for module in modules if module is not None},
            aliases=_texts_by_name(run, "aliases"),
            dtype=_text(run, "dtype"),
            compute_dtype=_text(run, "compute_dtype"),
            device=_text(run, "device"),
            packages=_texts_by_name(run, "packages"),
            workload=WorkloadInfo(_text(workload, "path"), _mapping(workload, "options")),
            inputs={
                name: _text(entry, "sha256") if isinstance(entry, Mapping) else ""
                for name, entry in _mapping(run, "inputs").items()
            },
            scope=_scope(_mapping(run, "scope")),
            points=tuple(point for point in points if point is not None),
            steps=_count(run, "steps"),
            phases=tuple(phase if isinstance(phase, str) else "" for phase in _list(run, "phases")),
            stopped=_stop(_mapping(run, "stopped")),
            injected=_injection(_mapping(run, "injected")),
            error=_error(run.get("error")),
            notes=_texts(run, "notes"),
            control=tuple(_mappings(run, "control")),
            duration_seconds=_number(run, "duration_seconds"),
        )


def _module(entry: Mapping[str, Any]) -> ModuleInfo | None:
    path, is_training = entry.get("path"), entry.get("training")
    if not isinstance(path, str):
        return None
    return ModuleInfo(
        path,
        _text(entry, "class"),
        is_training if isinstance(is_training, bool) else None,
        _tensors(entry, "parameters"),
        _tensors(entry, "buffers"),
    )


def _tensors(entry: Mapping[str, Any], name: str) -> dict[str, TensorInfo]:
    return {
        tensor: TensorInfo(_shape(about), _text(about, "dtype"))
        if isinstance(about, Mapping)
        else TensorInfo()
        for tensor, about in _mapping(entry, name).items()
    }


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = entry.get("shape")
    if not isinstance(sizes, list) or not all(_is_count(size) for size in sizes):
        return None
    return tuple(sizes)


def _point(entry: Mapping[str, Any]) -> PointInfo | None:
    site = entry.get("site")
    if not isinstance(site, str):
        return None
    return PointInfo(
        site,
        _text(entry, "status"),
        _text(entry, "kind") or "module",
        _text(entry, "reason"),
        _count(entry, "calls"),
        _count(entry, "unfinished") or 0,
        _texts(entry, "slots"),
    )


def _scope(entry: Mapping[str, Any]) -> ScopeInfo | None:
    if not entry:
        return None
    return ScopeInfo(
        include=_texts(entry, "include"),
        exclude=_texts(entry, "exclude"),
        inputs=entry.get("inputs") is not False,
        level=_text(entry, "level"),
        ops_in=_texts(entry, "ops_in"),
        watch=_texts(entry, "watch"),
        slices=_texts(entry, "slices"),
        steps=_text(entry, "steps"),
        sample=_count(entry, "sample"),
        max_bytes=_count(entry, "max_bytes"),
        grads=entry.get("grads") is True,
        params=entry.get("params") is True,
        eager=entry.get("eager") is True,
        inner=entry.get("inner") is True,
    )


def _stop(entry: Mapping[str, Any]) -> StopInfo | None:
    return StopInfo(_text(entry, "at"), _count(entry, "max_bytes")) if entry else None


def _injection(entry: Mapping[str, Any]) -> InjectionInfo | None:
    if not entry:
        return None
    slots = (_injected_slot(slot) for slot in _mappings(entry, "slots"))
    return InjectionInfo(
        _text(entry, "source"),
        _text(entry, "root"),
        _text(entry, "map"),
        tuple(slot for slot in slots if slot is not None),
    )


def _injected_slot(entry: Mapping[str, Any]) -> InjectedSlot | None:
    site, slot = entry.get("site"), entry.get("slot")
    if not isinstance(site, str) or not isinstance(slot, str):
        return None
    calls = _texts_by_name(entry, "calls").items()
    numbered = {int(call): steps for call, steps in calls if _NUMBER.fullmatch(call)}
    return InjectedSlot(site, slot, _text(entry, "status"), _text(entry, "reason"), numbered)


def _error(entry: object) -> ErrorInfo | None:
    if isinstance(entry, str):
        return ErrorInfo(entry) if entry else None
    if not isinstance(entry, Mapping):
        return None
    return ErrorInfo(_text(entry, "type"), _text(entry, "message"))


def _mapping(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(entry: Mapping[str, Any], name: str) -> list[Any]:
    value = entry.get(name)
    return value if isinstance(value, list) else []


def _mappings(entry: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    return (value for value in _list(entry, name) if isinstance(value, Mapping))


def _texts(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(value for value in _list(entry, name) if isinstance(value, str))


def _texts_by_name(entry: Mapping[str, Any], name: str) -> dict[str, str]:
    return {key: value for key, value in _mapping(entry, name).items() if isinstance(value, str)}


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


def _count(entry: Mapping[str, Any], name: str) -> int | None:
    value = entry.get(name)
    return value if _is_count(value) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
