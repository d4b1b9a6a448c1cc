"""Run a module's code with mutated operations: other options, operands, numbers, and another order of them.

An operation is known by the place where it is written: in a loop, or for each expert, all of it changes.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tensorcap.adapters.edits import MASK_EXTENTS, CallMutation, Operation
from tensorcap.adapters.torch import recurrent
from tensorcap.adapters.torch.low_precision import (
    RoundedOperations,
    find_low_precisions,
    is_low_precision,
    run_in_low_precision,
)
from tensorcap.adapters.torch.masks import attend_with_extent
from tensorcap.adapters.torch.operation_functions import ACTIVATIONS
from tensorcap.adapters.torch.operation_indices import counts_up
from tensorcap.adapters.torch.operation_numbers import find_numbers, with_number
from tensorcap.adapters.torch.operation_options import find_options, find_own_axes, read_axes, run_option

_TORCH_FOLDER: Final = str(Path(torch.__file__).parent)
_TORCH_MODULES: Final = str(Path(torch.__file__).parent / "nn" / "modules")
_OWN_FOLDER: Final = str(Path(__file__).parent)
_WRITTEN_OUT: Final = recurrent.__file__
_ATTENTION: Final = "scaled_dot_product_attention"
_SUMS: Final = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_DIFFERENCES: Final = frozenset({"sub", "__sub__", "sub_", "__isub__"})
_SPLITS: Final = frozenset({"chunk", "split", "unbind", "tensor_split"})
_JOINS: Final = frozenset({"cat", "stack", "concat"})
_POOLINGS: Final = frozenset({"mean", "sum", "amax", "amin"})  # they may be done behind what comes of them
_MOST_PARTS: Final = 4  # of a split or a join; the number of pairs grows with its square
_MOST_OPERANDS: Final = 12  # other values that are tried for an operand, the latest ones
_MOST_BEHIND: Final = 12  # operations that another one is tried behind, the next ones
_MOST_AHEAD: Final = 6  # values that an operation is tried on, the latest ones
_LARGEST_KEPT: Final = 1 << 26  # elements of all results that are kept as other operands
_TERM_BEHIND: Final = "its operand's last term added to its result"
_WORDS: Final = frozenset(
    {"first", "second", "twice", "opposite", *MASK_EXTENTS}
)  # that no option is called by


Call = tuple[Any, Any, Any]  # an operation and what it is given


@dataclass(slots=True)
class _Done:
    """An operation as it was done in the call that lists all.

    Attributes:
        name: As torch calls it.
        place: File and line.
        line: That line as it is written.
        alternatives: As in `Operation`.
        has_number: As in `Operation`.
        own_axes: As in `Operation`.
        numbers: As in `Operation`.
        operands: Shape and dtype of each operand that is a tensor of floats, by its number.
        given: As in `Operation`.
        known: How many values were known before it.
        is_function: Whether it is a function of one tensor alone, of any shape.
        result: Shape and dtype of its result; None if that is no tensor of floats.
        child: As in `Operation`.
        call: What it was given the last time; None if that is not kept.
        is_whole: As in `Operation`.
    """

    name: str
    place: str
    line: str
    alternatives: tuple[str, ...]
    has_number: bool
    own_axes: str
    numbers: Mapping[str, float]
    operands: Mapping[int, Any]
    given: Mapping[int, str]
    known: int
    is_function: bool
    result: Any
    child: str
    call: Call | None
    is_whole: bool


class OperationMutator(TorchFunctionMode):
    """Runs code with mutated operations, and lists those that can be mutated.

    Attributes:
        values: What is known by a name: what the module was given, what calls within it and operations
            returned; of a name that returned several the last one.
        is_needed: Whether it has anything to do, or sizes may be others.
        count: How many operations were done.
        within: The modules whose code runs, by their names, the innermost last.
    """

    def __init__(
        self,
        mutation: CallMutation,
        rounded: RoundedOperations | None = None,
        listed: Mapping[str, Call] | None = None,
    ) -> None:
        """Mutate some operations.

        Args:
            mutation: Its operations, numbers, operands, and what is moved; of one of nothing all are listed.
            rounded: Does every other operation instead of torch; None for torch.
            listed: What operations were given in the call that listed them, by key.
        """
        super().__init__()
        self._rounded = rounded
        self._mutation = mutation
        self._done: dict[str, _Done] = {}
        self._sums: dict[int, tuple[torch.Tensor, Any]] = {}  # by what they made: that, and their operands
        self._moved_by_place = {behind: key for key, (_, behind) in mutation.moved.items()}
        self._waiting: dict[str, Call] = {}  # operations that are moved
        self.values: dict[str, torch.Tensor] = {}
        self._listed = listed or {}
        self._ahead_by_place = {place: key for key, (_, place) in mutation.moved_ahead.items()}
        keys = {*mutation.operations, *mutation.moved, *self._moved_by_place}
        keys |= {*mutation.moved_ahead, *self._ahead_by_place}
        keys |= {key for key, _ in (*mutation.numbers, *mutation.operands)} | {*mutation.operands.values()}
        self._is_listing = mutation == CallMutation()
        is_resized = any(type(value) is int for value in mutation.settings.values())
        self.is_needed = bool(keys) or rounded is not None or self._is_listing or is_resized
        self._names = {key.partition(" ")[0] for key in keys}
        if _TERM_BEHIND in mutation.operations.values():
            self._names |= _SUMS
        self.count = 0
        self.within: list[str] = []
        self._kept = 0
        self._named: dict[int, str] = {}  # names of the values, by their identity

    @property
    def operations(self) -> dict[str, Operation]:
        """Operations that can be mutated, by key; of a call without mutations, else none."""
        return {
            key: Operation(
                one.name.strip("_"),
                one.place,
                one.line,
                one.alternatives,
                one.has_number,
                one.own_axes,
                one.numbers,
                {at: others for at in one.operands if (others := self._find_others(one, at))},
                one.given,
                tuple(self._find_places_behind(key, one)),
                one.child,
                tuple(self._find_places_ahead(key, one)),
                one.is_whole,
            )
            for key, one in self._done.items()
        }

    @property
    def calls(self) -> dict[str, Call]:
        """What operations that can be done ahead were given, by key."""
        return {key: one.call for key, one in self._done.items() if one.call is not None}

    def note(self, name: str, value: Any) -> None:
        """Note a tensor of floats that the code is given, under a name."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and self._kept < _LARGEST_KEPT:
            self._kept += value.numel()
            self.values[name] = value
            self._named[id(value)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation.

        1. Operations of our own code run as they are.
        2. Attention on a tensor without elements is refused if anything is mutated.
        3. The key is name, file, line and instruction of the code that calls it.
        4. A mutated operation does its alternative; any other one is rounded, or runs as it is and is listed.
        5. Of torch's own modules nothing is rounded, and only options of operations change.
        """
        kwargs = kwargs or {}
        written = str(getattr(func, "__name__", ""))
        name = written.rpartition(".")[2]
        if name == _ATTENTION and not self._is_listing:
            _refuse_empty(args, kwargs)
        if name in ("__get__", "__set__") or not (
            self._is_listing or self._rounded is not None or name in self._names
        ):
            return func(*args, **kwargs)
        frame, is_direct = _find_caller(sys._getframe(1))
        if frame is None:
            return func(*args, **kwargs)
        self.count += 1
        place = _place_of(frame)
        key = f"{name} at {place} ({frame.f_lasti})"
        result = self._run(key, name, func, args, kwargs, is_direct=is_direct)
        if self._is_listing or key in self._mutation.operands.values():
            self.note(key, result if isinstance(result, torch.Tensor) else None)
        if name in _SUMS and isinstance(args[0], torch.Tensor) and args[0].shape == result.shape:
            self._sums[id(result)] = result, args[:2]
        if self._is_listing and key not in self._done:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._list(key, name, (place, line), (func, args, kwargs), result, is_direct=is_direct)
        return result

    def _run(self, key: str, name: str, func: Any, args: Any, kwargs: Any, *, is_direct: bool) -> Any:
        """Do an operation, or what the mutation has for it, and behind it one that is moved there."""
        mutation = self._mutation
        for (of, at), source in mutation.operands.items():
            if of == key:
                args = (*args[:at], self.values[source], *args[at + 1 :])
        for (of, which), number in mutation.numbers.items():
            if of == key:
                args, kwargs = with_number(args, kwargs, which, number)
        if key in mutation.moved_ahead and key in self._listed:
            return args[mutation.moved_ahead[key][0]]
        if key in mutation.moved:
            at, _ = mutation.moved[key]
            if name in _POOLINGS:
                spread, axes = _with_places_inside(name, args, kwargs)
                self._waiting[key] = func, (spread,), {"dim": axes}
                return spread
            self._waiting[key] = func, args, kwargs
            return args[at]
        alternative = mutation.operations.get(key)
        if alternative == _TERM_BEHIND:
            first, second = self._sums[id(args[0])][1]
            return func(first, *args[1:], **kwargs) + second
        if alternative is not None:
            made = _run_alternative(name, alternative, func, args, kwargs)
            if _is_whole(made):
                _refuse_out_of_range(made, name, func, args, kwargs)
            return made
        if self._rounded is not None:
            return self._rounded(name, func, args, kwargs) if is_direct else func(*args, **kwargs)
        return self.finish(key, func(*args, **kwargs))

    def finish(self, name: str, result: Any) -> Any:
        """Do the operation that is moved behind an operation, a call within or an argument, on its value."""
        ahead = self._ahead_by_place.get(name)
        if ahead is not None and ahead in self._listed:
            at = self._mutation.moved_ahead[ahead][0]
            func, args, kwargs = self._listed[ahead]
            return func(*args[:at], result, *args[at + 1 :], **kwargs)
        moved = self._moved_by_place.get(name)
        if moved not in self._waiting:
            return result
        at = self._mutation.moved[moved][0]
        func, args, kwargs = self._waiting.pop(moved)
        return func(*args[:at], result, *args[at + 1 :], **kwargs)

    def _list(
        self,
        key: str,
        name: str,
        where: tuple[str, str],
        call: Call,
        result: Any,
        *,
        is_direct: bool,
    ) -> None:
        """List what an operation can do instead."""
        _, args, kwargs = call
        own = _find_alternatives(name, args, result) if is_direct else []
        if name in ACTIVATIONS and args and id(args[0]) in self._sums:
            own.append(_TERM_BEHIND)
        low = find_low_precisions(name, result) if is_direct and isinstance(result, torch.Tensor) else []
        options = find_options(name, args, kwargs, result)
        self._done[key] = _Done(
            name,
            *where,
            tuple(dict.fromkeys((*own, *options, *low))),
            any(isinstance(arg, (int, float)) for arg in args[:2]),
            find_own_axes(name, args, kwargs),
            find_numbers(name, args, kwargs),
            {at: _form(arg) for at, arg in enumerate(args) if is_direct and _form(arg)},
            {at: self._named[id(arg)] for at, arg in enumerate(args) if id(arg) in self._named},
            len(self.values) - (key in self.values),
            len(args) == 1 and not kwargs and _form(args[0]) == _form(result),
            _form(result) if is_direct else None,
            self.within[-1] if self.within else "",
            call if is_direct and _form(result) and self._kept < _LARGEST_KEPT else None,
            _is_whole(result),
        )

    def _find_others(self, one: _Done, at: int) -> tuple[str, ...]:
        """Names of other values of the shape and dtype of an operand, the latest ones."""
        known = list(self.values.items())[: one.known]
        fitting = [name for name, value in known if _form(value) == one.operands[at]]
        return tuple(reversed(fitting[-_MOST_OPERANDS:]))

    def _find_places_behind(self, key: str, one: _Done) -> Iterator[tuple[int, str]]:
        """Find operations and calls of its result's form that it may be done behind, on which operand.

        A reduction may be, if they work on each place of its operand as they do on its result.
        """
        operands = [at for at, form in one.operands.items() if form == one.result and at < 2]
        names = list(self.values)
        behind = names[names.index(key) + 1 :] if key in self.values else ()
        later = [n for n in behind if one.is_function or _form(self.values[n]) == one.result]
        if one.name in _POOLINGS and one.result is not None and 0 in one.operands:
            (shape, _), (whole, _) = one.result, one.operands[0]
            operands = [0] if 1 < len(shape) < len(whole) else []
            later = [n for n in behind if self.values[n].shape[:-1] == shape[:-1]]
        yield from itertools.product(operands, later[:_MOST_BEHIND])

    def _find_places_ahead(self, key: str, one: _Done) -> Iterator[tuple[int, str]]:
        """Find earlier values of its result's form that it may be done on, the latest first."""
        if one.call is None:
            return
        operands = [at for at, form in one.operands.items() if form == one.result and at < 2]
        known = [name for name in list(self.values)[: one.known] if name != key]
        earlier = [name for name in reversed(known) if _form(self.values[name]) == one.result]
        for at in operands:
            places = [name for name in earlier if name != one.given.get(at)]
            yield from ((at, name) for name in places[:_MOST_AHEAD])


def _with_places_inside(name: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, list[int]]:
    """The operand of a reduction, the axes that it is over moved before the last; and which they are then."""
    x, axes = args[0], read_axes(name, args, kwargs)
    first = x.ndim - len(axes) - 1
    inside = list(range(first, first + len(axes)))
    return x.movedim(axes, inside), inside


def _refuse_empty(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse attention on a tensor without elements, as another count of heads may make it.

    The kernel divides by the count of heads of the keys without a check, which ends the process.

    Raises:
        ValueError: There is such a tensor.
    """
    if any(isinstance(one, torch.Tensor) and not one.numel() for one in (*args, *kwargs.values())):
        raise ValueError(_ATTENTION)


def _refuse_out_of_range(made: torch.Tensor, name: str, func: Any, args: Any, kwargs: Any) -> None:
    """Refuse whole numbers beyond those that the operation makes, or beyond its count if it counts places.

    They may be indices, and kernels that do not check these read memory that nobody has written.

    Raises:
        IndexError: They are out of that range, or the operation can't be done once more to know it.
    """
    is_in_place = name.endswith("_") and not name.endswith("__")
    natural = None if is_in_place else func(*args, **kwargs)
    if not isinstance(natural, torch.Tensor) or not _is_whole(natural):
        raise IndexError(name)
    if made.numel() and natural.numel():
        lowest, highest = int(natural.min()), int(natural.max())
        if natural.ndim and counts_up(natural):
            highest = max(highest, lowest + natural.shape[-1] - 1)
        if int(made.min()) < lowest or int(made.max()) > highest:
            raise IndexError(name)


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor of whole numbers."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _form(value: Any) -> Any:
    """Shape and dtype of a tensor of floats; None of anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return None
    return tuple(value.shape), value.dtype


def _place_of(frame: FrameType) -> str:
    """Where the code stands: file and line; of a layer that is written out here the line itself."""
    file = frame.f_code.co_filename
    if file == _WRITTEN_OUT:
        line = linecache.getline(file, frame.f_lineno).partition("#")[0].strip()
        return f"`{line}` of its steps"
    return f"{Path(file).name}:{frame.f_lineno}"


def _find_caller(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Find the code whose operation it is, and whether it calls it by no module of torch's that is made anew.

    1. An operation that our code calls is nobody's.
    2. It is that of the nearest frame that is neither torch's nor ours.
    3. If the module that is called again is torch's, it is that of the module's code.
    4. A layer of torch's that is written out here counts as code of the user's.
    """
    file = "" if frame is None else frame.f_code.co_filename
    is_ours = file.startswith(_OWN_FOLDER) and file != _WRITTEN_OUT
    is_direct = True
    of_module: FrameType | None = None
    while frame is not None and not is_ours:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_MODULES):
            is_base = file.endswith("module.py")
            of_module = frame if of_module is None and not is_base else of_module
        elif file == _WRITTEN_OUT:
            return frame, is_direct
        elif file.startswith(_OWN_FOLDER):
            is_direct = False
            if frame.f_code.co_name == "run":
                return of_module, False
        elif not file.startswith(_TORCH_FOLDER):
            return frame, is_direct
        frame = frame.f_back
    return None, False


def _find_alternatives(name: str, args: Any, result: Any) -> list[str]:
    """List what an operation can do instead, as `Operation.alternatives` names it.

    1. Parts of one shape that are split or joined can be exchanged.
    2. Attention can see another extent.
    3. Any other operation can return an operand of its result's shape and dtype; sums and
       differences have alternatives of their own kind.
    """
    if name in _SPLITS or name in _JOINS:
        parts = (args[0] if args else ()) if name in _JOINS else result
        pairs = itertools.combinations(range(min(len(parts), _MOST_PARTS)), 2)
        return [f"{one} and {other}" for one, other in pairs if parts[one].shape == parts[other].shape]
    if not isinstance(result, torch.Tensor) or result.is_complex() or not args:
        return []
    if not result.is_floating_point() and result.device.type != "cpu":
        return []
    if name == _ATTENTION:
        return list(MASK_EXTENTS)
    alternatives = [
        operand
        for operand, arg in zip(("first", "second"), args[:2], strict=False)
        if isinstance(arg, torch.Tensor) and arg.shape == result.shape and arg.dtype == result.dtype
    ]
    if name in _SUMS:
        alternatives += ["twice", "opposite"]
    elif name in _DIFFERENCES:
        alternatives.append("opposite")
    return alternatives


def _run_alternative(name: str, alternative: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Do what an operation can do instead."""
    if is_low_precision(alternative):
        return run_in_low_precision(name, alternative, func, args, kwargs)
    if alternative not in _WORDS and not _is_exchange(alternative):
        return run_option(name, alternative, func, args, kwargs)
    if name == _ATTENTION:
        return attend_with_extent(alternative, func, args, kwargs)
    if alternative in ("first", "second"):
        return args[alternative == "second"]
    if name in _SPLITS or name in _JOINS:
        parts = list(args[0] if name in _JOINS else func(*args, **kwargs))
        one, other = map(int, alternative.split(" and "))
        parts[one], parts[other] = parts[other], parts[one]
        return func(parts, *args[1:], **kwargs) if name in _JOINS else tuple(parts)
    if alternative == "twice":
        return args[0] + args[1] + args[1]
    if alternative == "opposite":
        return args[0] - args[1] if name in _SUMS else args[0] + args[1]
    raise KeyError(alternative)


def _is_exchange(alternative: str) -> bool:
    """Whether an alternative is that two parts are exchanged: `0 and 1`."""
    one, _, other = alternative.partition(" and ")
    return one.isdigit() and other.isdigit()
