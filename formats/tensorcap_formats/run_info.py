"""The run metadata of an archive, parsed (`specs/archive.md`, section 8).

Each entry may be absent. One that is damaged (a list for a mapping, a number for a text) counts as absent,
and so does a damaged part of an entry: nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tensorcap_formats.keys import module_site
from tensorcap_formats.statistics import Statistics

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Info = TypeVar("_Info", bound="DataclassInstance")
_NUMBER: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter or a buffer.

    Attributes:
        shape: Its shape; None if it is not known.
        dtype: Its dtype, "" if it is not known.
        class_name: Class of a tensor that stands for other values than it holds, as a quantised one; "" of
            a plain one.
        digest: Algorithm and digest of its bytes, `xxh3_128:…`; "" if they were not read.
        statistics: Statistics of its values; None if they were not read.
    """

    shape: tuple[int, ...] | None = None
    dtype: str = ""
    class_name: str = ""
    digest: str = ""
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module of the model.

    Attributes:
        path: Its path in the model, as the model spells it; "" for the model itself.
        class_name: Its class with the package, "" if unknown.
        is_training: Whether it was in training mode; None if unknown.
        parameters: Its own parameters, by name.
        buffers: Its own buffers, by name.
        settings: Its attributes that are plain values, and what its printed form says, by name.
    """

    path: str
    class_name: str = ""
    is_training: bool | None = None
    parameters: Mapping[str, TensorInfo] = field(default_factory=dict)
    buffers: Mapping[str, TensorInfo] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short_class(self) -> str:
        """Its class without the package, "" if unknown."""
        return self.class_name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class PointInfo:
    """Whether a site was captured (ARC-71).

    Attributes:
        site: The site, as keys spell it.
        status: `captured`, `never-called`, `excluded` or `not-capturable`.
        kind: `module`, `function` or `probe`.
        reason: Why, or a remark; "" for none.
        calls: How often it was called; None if unknown.
        unfinished: How many calls did not return.
        slots: Slots that could not be captured of a site that was; empty for an entry of the whole site.
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
        decompositions: The converter whose table an exported graph was decomposed by, "" for none.
        ops_in: Globs of the modules whose ops were recorded, all if empty.
        watch: Functions whose variables were recorded.
        slices: Which parts of tensors were kept.
        steps: Which steps, "" for all.
        sample: How many calls of each site; None for all.
        max_bytes: Limit of the archive; None for none.
        grads: Whether gradients were recorded.
        params: Whether parameters and buffers were recorded.
        eager: Whether compiled code ran as plain code.
        inner: Whether the inside of subgraphs was recorded.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    inputs: bool = True
    level: str = ""
    decompositions: str = ""
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
class MappedOperation:
    """Which operation of a compiled program holds the value of an output of a node of its graph (CAI-13).

    Attributes:
        node: The node.
        module: Path of the innermost module that it lies in, "" if unknown.
        output: Which of its outputs.
        op: Name of the operation that holds the value, as the compiler has it.
        op_id: Its number.
        op_ids: All operations that are mapped to the output.
        op_output: Which output of the operation.
        file: Source file of the node, "" if unknown.
        line: Line in it; None if unknown.
    """

    node: str = ""
    module: str = ""
    output: int = 0
    op: str = ""
    op_id: int | None = None
    op_ids: tuple[int, ...] = ()
    op_output: int = 0
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class ExportedNode:
    """An operation of a graph that a model was exported to (CAP-270).

    Attributes:
        node: Its name.
        op: What it runs, as `aten.mm.default`.
        module: Path of the innermost module that it lies in, "" for the model itself.
        inputs: Names of the nodes, or of the model's inputs, that it takes, by argument.
        weights: Names of the parameters and buffers that it takes, by argument.
        arguments: Its other arguments.
        shapes: Shape of each tensor that it returns.
        outputs: Which outputs of the model it is, counted from 0.
        file: Source file, "" if unknown.
        line: Line in it; None if unknown.
    """

    node: str = ""
    op: str = ""
    module: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    file: str = ""
    line: int | None = None

    @property
    def base(self) -> str:
        """Name of the operation between its namespace and its overload.

        Example:
            >>> ExportedNode(op="aten.mul.Tensor").base
            'mul'
        """
        parts = self.op.split(".")
        return parts[min(1, len(parts) - 1)]


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
        """The limit, and where it was reached.

        Example:
            >>> StopInfo("0/a/output", 900).text
            'its limit of 900 bytes, at 0/a/output'
        """
        limit = "of bytes" if self.max_bytes is None else f"of {self.max_bytes} bytes"
        return f"its limit {limit}, at {self.at or 'an unknown tensor'}"


@dataclass(frozen=True, slots=True)
class InjectedSlot:
    """Whether the values of a slot were replaced (INJ-21).

    Attributes:
        site: The site.
        slot: The slot.
        status: `injected`, or why it was not.
        reason: Why, or a remark; "" for none.
        calls: The steps in which values were replaced, as a text, by the call's number within its step.
    """

    site: str
    slot: str
    status: str = ""
    reason: str = ""
    calls: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InjectionInfo:
    """The injection of a run: values of an archive that replaced its own (INJ-20).

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
    """The error that a run ended with.

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
class TensorRule:
    """How tensors are put together from what ranks hold of them, or were (RNK-3).

    Attributes:
        rule: The rule, as `ranks.rule` reads it.
        keys: Key texts, or globs for them.
        known: How it is known: what recorded it, or what showed it.
        mesh: Sizes of the mesh by the names of its axes, and its ranks; None for one axis of all ranks.
        shape: Shape of the whole tensor; None if it is not known.
        sizes: Of merged tensors, by number of the axis the sizes that the ranks of the mesh have of it.
    """

    rule: str
    keys: tuple[str, ...] = ()
    known: str = ""
    mesh: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankProblem:
    """What is wrong with a tensor of several ranks (RNK-5).

    Attributes:
        key: Its key text.
        kind: `unequal` if ranks that should hold the same do not, `shape` if the rule does not give the shape
            that is known, `unmerged` if it was left as it is.
        text: The problem, in one line.
        ranks: The ranks that it lies with, if that is known.
    """

    key: str
    kind: str
    text: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RanksInfo:
    """The ranks of a run of several processes (RNK-1, RNK-4).

    Attributes:
        count: How many there are; None if unknown.
        rank: The rank that the archive is of; None for all of them, merged.
        archives: Names of the archives of all ranks, in order, if they were merged.
        tensors: How tensors are put together.
        problems: What is wrong with some.
    """

    count: int | None = None
    rank: int | None = None
    archives: tuple[str, ...] = ()
    tensors: tuple[TensorRule, ...] = ()
    problems: tuple[RankProblem, ...] = ()

    @property
    def is_merged(self) -> bool:
        """Whether the archive holds all ranks."""
        return self.rank is None and bool(self.archives)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run metadata of an archive.

    Attributes:
        framework: Name of the framework, "" if unknown.
        settings: Settings of the framework that change the results of its operators.
        model_class: Class of the model with its package, "" if unknown.
        model_file: File that the class stands in, "" if unknown.
        config: The model's configuration.
        attention_implementation: As the model names it, "" if unknown.
        left_out_weights: Names of weights of its checkpoint that the model's own code leaves out.
        modules: The model's modules by site, in the order of its tree; empty if they are not listed.
        aliases: Sites of shared modules that have the records, by their other sites.
        dtype: Dtype of most of the model's parameters, "" if unknown.
        compute_dtype: Dtype that it computed in, "" if unknown.
        device: Where it ran, "" if unknown.
        packages: Versions of packages, by name.
        workload: How to repeat the run.
        inputs: SHA-256 of each input of the model, by key text; "" if it has none.
        scope: What was to be recorded; None if unknown.
        dump: `files`, `log` or `abbreviated log`, if debug prints wrote the tensors (ARC-70); else "".
        points: Whether each site was captured.
        steps: Count of steps; None if unknown.
        phases: Of each step `prefill`, `decode` or `forward`, "" if unknown.
        threads: Of each step the thread that began it, if there were several; -1 if unknown.
        threaded_sites: Sites that several threads called in one step.
        ranks: The ranks of a run of several processes; None for a run of one.
        stopped: Where recording stopped at its limit of bytes; None if it did not.
        injected: The injection; None for a run of its own values.
        error: The error that the run ended with; None if nothing is known.
        notes: Remarks for a reader, a sentence each.
        control: How far each output is from that of a graph without taps.
        duration_seconds: How long the run took; None if unknown.
        operation_map: Which operation of a compiled program holds the value of which node of its graph, a row
            each (CAI-13).
        exported_nodes: The operations of the exported graph that was run, or that a compiled program was
            converted from (CAP-270); empty if there is none, or it is unknown.
        mappings: Which operator of a compiled program is which node of its graph, as Core AI has it (AIM-6).
    """

    framework: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_class: str = ""
    model_file: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    attention_implementation: str = ""
    left_out_weights: tuple[str, ...] = ()
    modules: Mapping[str, ModuleInfo] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    compute_dtype: str = ""
    device: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    workload: WorkloadInfo = field(default_factory=WorkloadInfo)
    inputs: Mapping[str, str] = field(default_factory=dict)
    scope: ScopeInfo | None = None
    dump: str = ""
    points: tuple[PointInfo, ...] = ()
    steps: int | None = None
    phases: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    threaded_sites: tuple[str, ...] = ()
    ranks: RanksInfo | None = None
    stopped: StopInfo | None = None
    injected: InjectionInfo | None = None
    error: ErrorInfo | None = None
    notes: tuple[str, ...] = ()
    control: tuple[Mapping[str, Any], ...] = ()
    duration_seconds: float | None = None
    operation_map: tuple[MappedOperation, ...] = ()
    exported_nodes: tuple[ExportedNode, ...] = ()
    mappings: Mapping[str, Any] = field(default_factory=dict)

    def leaves_out(self, weight: str) -> bool:
        """Whether the model's own code leaves out a weight of its checkpoint, by the end of its name."""
        return any(f".{name}".endswith(f".{weight}") for name in self.left_out_weights)

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> RunInfo:
        """Parse run metadata.

        Example:
            >>> info = RunInfo.of({"dtype": "float32", "modules": [{"path": "", "class": "my.Net"}, 3]})
            >>> info.dtype, info.modules["@root"].short_class, info.config
            ('float32', 'Net', {})
        """
        framework, model = _mapping(run.get("framework")), _mapping(run.get("model"))
        return _parse(
            cls,
            run,
            framework=_text(framework.get("name")) or "",
            settings=_mapping(framework.get("settings")),
            model_class=_text(model.get("class")) or "",
            model_file=_text(model.get("file")) or "",
            config=_mapping(model.get("config")),
            attention_implementation=_text(model.get("attn_implementation")) or "",
            left_out_weights=tuple(n for n in _list(model.get("left_out_weights")) if isinstance(n, str)),
            modules={
                module_site(entry["path"]): _parse(ModuleInfo, entry, path=entry["path"])
                for entry in _mappings(run.get("modules"), "path")
            },
            inputs={
                name: _text(_mapping(entry).get("sha256")) or ""
                for name, entry in _mapping(run.get("inputs")).items()
            },
            points=tuple(
                _parse(PointInfo, entry, site=entry["site"]) for entry in _mappings(run.get("points"), "site")
            ),
            phases=tuple(_text(phase) or "" for phase in _list(run.get("phases"))),
            threads=tuple(n if type(n) is int else -1 for n in _list(run.get("threads"))),
            threaded_sites=tuple(s for s in _list(run.get("threaded_sites")) if isinstance(s, str)),
        )


def _parse(cls: type[_Info], entry: Mapping[str, Any], **parsed: Any) -> _Info:
    """Make a dataclass of an entry of the metadata.

    Each field is read from the member of its name (`_MEMBERS` has the exceptions) by the reader of its
    annotation, and has its default if the reader gives None.

    Args:
        cls: The dataclass.
        entry: The entry.
        parsed: Fields that are not read so.
    """
    for spec in fields(cls):
        if spec.name not in parsed:
            value = _READERS[str(spec.type)](entry.get(_MEMBERS.get(spec.name, spec.name)))
            if value is not None:
                parsed[spec.name] = value
    return cls(**parsed)


def _injected_slots(value: object) -> tuple[InjectedSlot, ...]:
    slots = []
    for entry in _mappings(value, "site", "slot"):
        calls = _texts_by_name(entry.get("calls")).items()
        numbered = {int(call): steps for call, steps in calls if _NUMBER.fullmatch(call)}
        slots.append(_parse(InjectedSlot, entry, site=entry["site"], slot=entry["slot"], calls=numbered))
    return tuple(slots)


def _operation_map(value: object) -> tuple[MappedOperation, ...]:
    return tuple(_parse(MappedOperation, entry) for entry in _mappings(value, "node", "op"))


def _graph(value: object) -> tuple[ExportedNode, ...]:
    return tuple(
        _parse(ExportedNode, entry, shapes=tuple(_shape(shape) or () for shape in _list(entry.get("shapes"))))
        for entry in _mappings(value, "node", "op")
    )


def _tensor_rules(value: object) -> tuple[TensorRule, ...]:
    return tuple(_parse(TensorRule, entry, rule=entry["rule"]) for entry in _mappings(value, "rule"))


def _rank_problems(value: object) -> tuple[RankProblem, ...]:
    entries = _mappings(value, "key", "kind")
    return tuple(_parse(RankProblem, entry, key=entry["key"], kind=entry["kind"]) for entry in entries)


def _tensors(value: object) -> dict[str, TensorInfo]:
    entries = {name: _mapping(entry) for name, entry in _mapping(value).items()}
    return {
        name: _parse(TensorInfo, entry, statistics=_statistics(entry.get("statistics")))
        for name, entry in entries.items()
    }


def _statistics(value: object) -> Statistics | None:
    """Statistics by name; None unless each is a number, or null if it may be."""
    numbers = {spec.name: _mapping(value).get(spec.name) for spec in fields(Statistics)}
    counts = [_count(numbers[name]) for name in ("nan", "posinf", "neginf", "zeros")]
    values = [numbers[name] for name in ("minimum", "maximum", "mean", "l2")]
    if None in counts or any(v is not None and _number(v) is None for v in values):
        return None
    return Statistics(**numbers)  # type: ignore[arg-type] # each was looked at


def _error(value: object) -> ErrorInfo | None:
    if isinstance(value, str):
        return ErrorInfo(value) if value else None
    return _parse(ErrorInfo, value) if isinstance(value, Mapping) else None


def _nested(cls: type[_Info]) -> Callable[[object], _Info | None]:
    def read(value: object) -> _Info | None:
        return _parse(cls, _mapping(value)) if _mapping(value) else None

    return read


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: object, *required: str) -> Iterator[Mapping[str, Any]]:
    """The mappings in a list that have a text under each of the required names."""
    for item in _list(value):
        if isinstance(item, Mapping) and all(isinstance(item.get(name), str) for name in required):
            yield item


def _texts(value: object) -> tuple[str, ...]:
    return tuple(item for item in _list(value) if isinstance(item, str))


def _texts_by_name(value: object) -> dict[str, str]:
    return {name: item for name, item in _mapping(value).items() if isinstance(item, str)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shape(value: object) -> tuple[int, ...] | None:
    is_shape = isinstance(value, list) and all(_count(size) is not None for size in value)
    return tuple(_list(value)) if is_shape else None


def _shapes_by_name(value: object) -> dict[str, tuple[int, ...]]:
    shapes = {name: _shape(item) for name, item in _mapping(value).items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


_MEMBERS: Final = {"class_name": "class", "is_training": "training", "map_text": "map"}
_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "str": _text,
    "bool": _flag,
    "bool | None": _flag,
    "int": _count,
    "int | None": _count,
    "float | None": _number,
    "tuple[int, ...] | None": _shape,
    "tuple[int, ...]": _shape,
    "tuple[str, ...]": _texts,
    "tuple[Mapping[str, Any], ...]": lambda value: tuple(_mappings(value)),
    "tuple[MappedOperation, ...]": _operation_map,
    "tuple[ExportedNode, ...]": _graph,
    "tuple[InjectedSlot, ...]": _injected_slots,
    "tuple[TensorRule, ...]": _tensor_rules,
    "tuple[RankProblem, ...]": _rank_problems,
    "RanksInfo | None": _nested(RanksInfo),
    "Mapping[str, Any]": _mapping,
    "Mapping[str, str]": _texts_by_name,
    "Mapping[str, tuple[int, ...]]": _shapes_by_name,
    "Mapping[str, TensorInfo]": _tensors,
    "WorkloadInfo": _nested(WorkloadInfo),
    "ScopeInfo | None": _nested(ScopeInfo),
    "StopInfo | None": _nested(StopInfo),
    "InjectionInfo | None": _nested(InjectionInfo),
    "ErrorInfo | None": _error,
}
