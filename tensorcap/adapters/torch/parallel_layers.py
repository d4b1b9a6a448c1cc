"""What parallel layers' classes say of their tensors: parts, terms or all of it (RNK-3, NRN-151).

The layers are those of NxD and of what is named like it. Nothing of them is imported: a class is known by its
name, or that of a base class, and says what it does by attributes. One without the attribute that decides has
no rule; `tcap merge` then goes by values and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcap.adapters.torch.modules import argument_names
from tensorcap.recording import Placement, Recorder
from tensorcap_formats.keys import escape

if TYPE_CHECKING:
    import torch
    from torch import nn

_COLUMN: Final = "ColumnParallelLinear"
_ROW: Final = "RowParallelLinear"
_EMBEDDING: Final = "ParallelEmbedding"
_GROUPED: Final = "GroupQueryAttention_QKV"
_RANK: Final = "SPMDRank"
_ACTIVATIONS: Final = ("torch.nn.modules.activation", "transformers.activations")
_WHOLE: Final = "replicated"
_KEYS_AND_VALUES: Final = ("k_proj", "v_proj")
_FUSED: Final = "Wqkv"  # queries, keys and values of a rank, one behind the other


class _Heads(NamedTuple):
    """How often the heads of keys are repeated for ranks; more than once if there are fewer than ranks."""

    copies: int
    known: str


class _Place(NamedTuple):
    """The rule of a slot, and what says so."""

    slot: str
    rule: str
    known: str


def place_parallel_layers(modules: Mapping[str, nn.Module], recorder: Recorder) -> None:
    """Tell the recorder what the tensors of parallel layers are parts of, for a run of several processes.

    Args:
        modules: All modules of the model by path.
        recorder: The recorder of the capture.
    """
    names: dict[Any, list[str]] = {}
    for path, module in modules.items():
        places = [*_layer_places(path, module, modules, names), *_parameter_places(path, module, modules)]
        for place in places:
            recorder.place_slot(recorder.points[path].site, place.slot, Placement(place.rule, place.known))


def _layer_places(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], names: dict[Any, list[str]]
) -> Iterator[_Place]:
    """What arguments and results of a layer are, by its class and the attributes that decide."""
    kind = _kind(module)
    if kind is None:
        yield from _cache_places(path, module, modules)
        yield from _split_places(path, module, modules)
        yield from _activation_places(path, module, modules, names)
        return
    argument = next((f"input.{escape(name)}" for name in argument_names(module, names)), None)
    tokens = _token_axis(module)
    if kind == _EMBEDDING:
        if tokens is not None:
            yield _Place("output", f"concat {tokens}", f"{kind}, sequence_parallel_enabled true")
        else:
            yield _Place("output", _WHOLE, kind)
        return
    if kind == _COLUMN and (gathers := _flag(module, "gather_output")) is not None:
        if argument is not None and tokens is None:
            yield _Place(argument, _WHOLE, kind)
        if gathers:
            yield _Place("output", _WHOLE, f"{kind}, gather_output true")
        elif (columns := _columns(path, module, modules)) is not None:
            yield _Place("output", columns.rule, f"{kind}, gather_output false{columns.known}")
    if kind == _ROW:
        is_parallel = _flag(module, "input_is_parallel")
        if argument is not None and is_parallel is not None:
            rule = "concat -1" if is_parallel else _WHOLE
            yield _Place(argument, rule, f"{kind}, input_is_parallel {str(is_parallel).lower()}")
        reduces = _flag(module, "reduce_output")
        if reduces is False:
            yield _Place("output", "sum", f"{kind}, reduce_output false")
        elif reduces and tokens is not None:
            yield _Place("output", f"concat {tokens}", f"{kind}, sequence_parallel_enabled true")
        elif reduces:
            yield _Place("output", _WHOLE, f"{kind}, reduce_output true")


def _columns(path: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> _Place | None:
    """The rule of columns that are not gathered, behind its kind; None if it has none."""
    if path.rpartition(".")[2] == _FUSED:
        fused = _fused_heads(path, module, modules)
        return None if fused is None else _Place("output", f"concat -1{fused.rule}", f", {fused.known}")
    words, known = ["concat -1"], []
    if (stride := _number(module, "stride") or 1) > 1:
        words.append(f"parts={stride}")
        known.append(f"stride {stride}")
    heads = _repeated_heads(path, modules)
    if heads is not None:
        words.append(f"copies={heads.copies}")
        known.append(heads.known)
    padding, size = _number(module, "pad_size") or 0, _number(module, "output_size")
    if padding > 0 and size is not None and heads is None and stride == 1:
        words.append(f"cut={size - padding}")
        known.append(f"pad_size {padding}")
    return _Place("output", " ".join(words), "".join(f", {text}" for text in known))


def _parameter_places(path: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Place]:
    """What parameters are that are marked as parts: `partition_dim` says of which axis."""
    heads = _repeated_heads(path, modules)
    is_fused = path.rpartition(".")[2] == _FUSED
    fused = _fused_heads(path, module, modules) if is_fused else None
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if _is_a(module, _RANK):
            yield _Place(f"param.{escape(name)}", "concat 0", f"{_RANK}: the number of the rank")
            continue
        axis = _number(parameter, "partition_dim")
        if not getattr(parameter, "tensor_model_parallel", False) or axis is None:
            continue
        rule, known = f"concat {axis}", f"partition_dim {axis} of the parameter"
        if is_fused:
            if fused is not None:
                yield _Place(f"param.{escape(name)}", f"{rule}{fused.rule}", f"{known}, {fused.known}")
            continue
        if (stride := _number(parameter, "partition_stride") or 1) > 1:
            rule, known = f"{rule} parts={stride}", f"{known}, partition_stride {stride}"
        if heads is not None:
            rule, known = f"{rule} copies={heads.copies}", f"{known}, {heads.known}"
        yield _Place(f"param.{escape(name)}", rule, known)


def _cache_places(path: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Place]:
    """Keys and values that an attention returns beside its hidden states: heads of this rank, in axis 1."""
    inner = next(
        (
            f"{path}.{name}" if path else name
            for name, child in module.named_children()
            if _is_a(child, _GROUPED)
        ),
        None,
    )
    if inner is None:
        return
    heads = _repeated_heads(f"{inner}.k_proj", modules)
    copies = "" if heads is None else f" copies={heads.copies}"
    known = f"heads of its {_GROUPED}" + ("" if heads is None else f", {heads.known}")
    for i in range(2):
        yield _Place(f"output.present_key_value.{i}", f"concat 1{copies}", known)


def _split_places(path: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Place]:
    """Queries, keys and values that a fused projection is split into, as fields or by number."""
    inner = f"{path}.{_FUSED}" if path else _FUSED
    if not _is_a(module, _GROUPED) or inner not in modules or _flag(modules[inner], "gather_output"):
        return
    if _fused_heads(inner, modules[inner], modules) is None:
        return
    heads = _repeated_heads(inner, modules)
    copies, repeated = ("", "") if heads is None else (f" copies={heads.copies}", f", {heads.known}")
    for number, name in enumerate(("query", "key", "value")):
        rule, known = ("concat -1", "") if name == "query" else (f"concat -1{copies}", repeated)
        for slot in (f"output.{number}", f"output.{name}"):
            yield _Place(slot, rule, f"heads of a {_GROUPED} with {_FUSED}{known}")


def _activation_places(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], names: dict[Any, list[str]]
) -> Iterator[_Place]:
    """What an activation computes of columns that are not gathered, for a layer that takes them as parts."""
    if type(module).__module__ not in _ACTIVATIONS or any(True for _ in module.parameters()):
        return
    above, _, _ = path.rpartition(".")
    beside = dict(modules[above].named_children()) if above in modules else {}
    columns = [n for n, m in beside.items() if _is_a(m, _COLUMN) and _flag(m, "gather_output") is False]
    rows = [n for n, m in beside.items() if _is_a(m, _ROW) and _flag(m, "input_is_parallel")]
    if not columns or not rows:
        return
    known = f"inferred: an activation between {columns[0]} and {rows[0]}"
    for slot in (*(f"input.{escape(name)}" for name in argument_names(module, names)[:1]), "output"):
        yield _Place(slot, "concat -1", known)


def _repeated_heads(path: str, modules: Mapping[str, nn.Module]) -> _Heads | None:
    """How often the heads of a projection of keys or values are repeated; None if each is there once.

    Each rank has one head then: what is repeated within a rank is no matter of ranks.
    """
    above, _, name = path.rpartition(".")
    parent = modules.get(above)
    if name not in (*_KEYS_AND_VALUES, _FUSED) or parent is None or not _is_a(parent, _GROUPED):
        return None
    source, held = _number(parent, "_src_num_key_value_heads"), _number(parent, "num_key_value_heads")
    ranks = _number(parent, "tp_degree")
    if not source or not held or held <= source or held % source or ranks != held:
        return None
    return _Heads(held // source, f"{source} heads of keys repeated to {held}")


def _fused_heads(path: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> _Place | None:
    """Queries, keys and values in one projection, behind the kind of its rule; None if sizes are not known.

    Of keys and values there may be copies, of queries there are none.
    """
    parent = modules.get(path.rpartition(".")[0])
    if parent is None or not _is_a(parent, _GROUPED):
        return None
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "tp_degree")
    numbers = [_number(parent, name) for name in names]
    queries, keys, size, ranks = (number or 0 for number in numbers)
    if min(queries, keys, size, ranks) < 1 or queries % ranks or keys % ranks:
        return None
    if (queries + 2 * keys) * size != _number(module, "output_size"):
        return None
    widths = [queries * size // ranks, keys * size // ranks, keys * size // ranks]
    heads = _repeated_heads(path, modules)
    copies = "" if heads is None else f" copies=1,{heads.copies},{heads.copies}"
    known = "queries, keys and values by its heads" + ("" if heads is None else f", {heads.known}")
    return _Place("output", f" parts={','.join(map(str, widths))}{copies}", known)


def _token_axis(module: nn.Module) -> int | None:
    """The axis along which ranks hold tokens; None if each has all of them."""
    if not getattr(module, "sequence_parallel_enabled", False):
        return None
    return _number(module, "sequence_dimension") or 0


def _kind(module: nn.Module) -> str | None:
    return next((kind for kind in (_COLUMN, _ROW, _EMBEDDING) if _is_a(module, kind)), None)


def _is_a(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _flag(module: nn.Module, name: str) -> bool | None:
    value = getattr(module, name, None)
    return value if isinstance(value, bool) else None


def _number(holder: nn.Module | torch.Tensor, name: str) -> int | None:
    value = getattr(holder, name, None)
    return value if type(value) is int else None
