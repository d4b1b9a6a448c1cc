"""Which record holds a tensor's values at this moment: a ledger by storage, without keeping any alive.

A record holds its tensor's elements in C order. Another tensor of the same memory is told as a view of the
record, with strides over that order, whatever the strides in memory are. A write to a storage ends what was
known of it. A storage is known by its address, which a weak reference keeps from being used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from tensorcap.adapters.torch.tensors import dtype_name

if TYPE_CHECKING:
    import torch

Geometry = tuple[Any, ...]  # offset, shape, strides, dtype, whether conjugated, whether negated
_FEW: Final = 256  # storages, from which on those that are gone are looked for


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How a tensor lies in its storage."""
    return (
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Axis(NamedTuple):
    """An axis of memory, all in bytes: one further along it in memory is `step` further in C order."""

    stride: int
    size: int
    step: int


class _Base:
    """A record, a parameter or a buffer that holds all elements of a tensor.

    Attributes:
        place: A reference to it.
        geometry: How the tensor lies in memory.
    """

    __slots__ = ("_axes", "geometry", "place")

    def __init__(self, place: dict[str, Any], geometry: Geometry) -> None:
        self.place = place
        self.geometry = geometry
        self._axes: tuple[_Axis, ...] | None = None

    @property
    def axes(self) -> tuple[_Axis, ...]:
        """The axes of its memory; most bases are never asked for them."""
        if self._axes is None:
            _, shape, strides, dtype, *_ = self.geometry
            self._axes = _axes(shape, strides, dtype.itemsize)
        return self._axes


class _Storage:
    """What is known of one storage.

    Attributes:
        reference: Keeps its address from being used again.
        exact: By geometry, the record or the parameter with exactly these values.
        views: By geometry, the view with exactly these values.
        bases: What views can be told of, the newest last.
        weights: Those of the bases that are parameters, and stay through a write.
        is_unfilled: Whether it was made without values, and not written as a whole since.
        writes: How often an op wrote to it.
    """

    __slots__ = ("bases", "exact", "is_unfilled", "reference", "views", "weights", "writes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's code
        self.exact: dict[Geometry, dict[str, Any]] = {}
        self.views: dict[Geometry, str] = {}
        self.bases: list[_Base] = []
        self.weights: list[_Base] = []
        self.is_unfilled = False
        self.writes = 0


class Ledger:
    """The storages of a run, each with what holds the values that it has at this moment.

    Every method takes a dense tensor that has a storage, and raises RuntimeError for another.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._limit = _FEW

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether anything was seen of the tensor's storage before."""
        return tensor.untyped_storage()._cdata in self._storages

    def is_unfilled(self, tensor: torch.Tensor) -> bool:
        """Whether its memory was made without values, and not written as a whole since."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.is_unfilled

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether its memory was made without values, and nothing was written to it since."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.is_unfilled and not known.writes

    def note_unfilled(self, tensor: torch.Tensor) -> None:
        """An op made the tensor without values."""
        self._storage(tensor).is_unfilled = True

    def hold_weight(self, name: str, tensor: torch.Tensor, *, is_parameter: bool, writes: int = 0) -> None:
        """The tensor is a parameter or a buffer of the model.

        Args:
            name: Its name in the model.
            tensor: Itself.
            is_parameter: Whether it is told by its name even after a write.
            writes: How often it may have been written before.
        """
        known = self._storage(tensor)
        known.writes = max(known.writes, writes)
        base = _Base(_weight(name, known.writes), geometry_of(tensor))
        known.exact[base.geometry] = base.place
        known.bases.append(base)
        if is_parameter:
            known.weights.append(base)

    def hold(self, tensor: torch.Tensor, key: str, *, is_whole: bool = True) -> None:
        """A record was made of the tensor.

        Args:
            tensor: Itself.
            key: The record's key text.
            is_whole: Whether it holds all elements, so that views can be read from it.
        """
        known = self._storage(tensor)
        geometry = geometry_of(tensor)
        known.exact[geometry] = place = {"record": key}
        if is_whole:
            known.bases.append(_Base(place, geometry))

    def hold_view(self, tensor: torch.Tensor, key: str) -> None:
        """The tensor was told as a view, under this key."""
        self._storage(tensor).views[geometry_of(tensor)] = key

    def note_write(self, tensor: torch.Tensor) -> None:
        """An op wrote to the tensor: what was known of its storage is over."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            return
        known.writes += 1
        known.exact.clear()
        known.views.clear()
        for base in known.weights:
            base.place = _weight(base.place["parameter"], known.writes)
        known.bases = list(known.weights)
        known.exact.update((base.geometry, base.place) for base in known.weights)
        if known.is_unfilled and tensor.numel() * tensor.itemsize == storage.nbytes():
            known.is_unfilled = False

    def forget_records(self) -> None:
        """Writes may have been missed: only parameters and buffers are taken for what they were."""
        self._storages = {a: s for a, s in self._storages.items() if not s.reference.expired()}
        for known in self._storages.values():
            known.views.clear()
            known.bases = [base for base in known.bases if "parameter" in base.place]
            known.exact = {base.geometry: base.place for base in known.bases}

    def find(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Where the tensor's values are: in a record, in a view that was told, or None if nowhere."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        geometry = geometry_of(tensor)
        exact = known.exact.get(geometry)
        if exact is not None:
            return exact
        view = known.views.get(geometry)
        if view is not None:
            return {"view": view}
        found = self._based(known, geometry)
        if found is None:
            return None
        base, told = found
        return base.place if _is_all(told, base.geometry) else told

    def view(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """The tensor as a view of a record or of a parameter; None where it is none that can be told."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        found = None if known is None else self._based(known, geometry_of(tensor))
        return None if found is None else found[1]

    def _based(self, known: _Storage, geometry: Geometry) -> tuple[_Base, dict[str, Any]] | None:
        for base in reversed(known.bases):
            found = _relative(geometry, base)
            if found is not None:
                offset, strides = found
                place = base.place
                whole = {"view_of": place["record"]} if "record" in place else place
                shape = list(geometry[1])
                name = dtype_name(geometry[3])
                return base, {**whole, "shape": shape, "strides": strides, "offset": offset, "dtype": name}
        return None

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._storages.get(address)
        if known is None:
            if len(self._storages) >= self._limit:
                self._storages = {a: s for a, s in self._storages.items() if not s.reference.expired()}
                self._limit = max(_FEW, 2 * len(self._storages))
            known = self._storages[address] = _Storage(storage)
        return known


def _weight(name: str, writes: int) -> dict[str, Any]:
    return {"parameter": name, "writes": writes} if writes else {"parameter": name}


def _axes(shape: Iterable[int], strides: Iterable[int], itemsize: int) -> tuple[_Axis, ...]:
    """The axes of memory from the outermost to the bytes of an element; none where there is no element.

    Neighbours that are neighbours in C order too are one axis, so that a contiguous tensor has one.
    """
    step = itemsize
    axes = [_Axis(1, itemsize, 1)]
    for size, stride in zip(reversed(tuple(shape)), reversed(tuple(strides)), strict=True):
        if size == 0:
            return ()
        if size != 1 and stride != 0:
            axes.append(_Axis(stride * itemsize, size, step))
        step *= size
    axes.sort(reverse=True)
    merged = axes[:1]
    for inner in axes[1:]:
        outer = merged[-1]
        extent = inner.size * inner.stride
        if outer.stride == extent and outer.step == inner.size * inner.step:
            merged[-1] = _Axis(inner.stride, outer.size * inner.size, inner.step)
        else:
            merged.append(inner)
    return tuple(merged)


def _relative(view: Geometry, base: _Base) -> tuple[int, list[int]] | None:
    """Offset and strides of a view over the base's elements in C order, in elements of the view's dtype.

    Every stride is written as whole steps along the axes of the base's memory; where no index of the view
    carries one of them into the next, moving in the view is the same linear move in both orders.
    """
    axes = base.axes
    offset, shape, strides, dtype, *flags = view
    base_offset, _, _, base_dtype, *base_flags = base.geometry
    if not axes or flags != base_flags or (dtype != base_dtype and any(flags)):
        return None
    itemsize = dtype.itemsize
    start = _steps(offset * itemsize - base_offset * base_dtype.itemsize, axes)
    if start is None:
        return None
    last = start[:]  # where the last element of the view is
    last[-1] += itemsize - 1
    moves = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return None
        if size == 1 or stride == 0:
            moves.append(0)
            continue
        steps = _steps(stride * itemsize, axes)
        if steps is None:
            return None
        for i, step in enumerate(steps):
            last[i] += (size - 1) * step
        moves.append(_position(steps, axes))
    position = _position(start, axes)
    if any(n >= axis.size for n, axis in zip(last, axes, strict=True)):
        return None
    if position % itemsize or any(move % itemsize for move in moves):
        return None
    return position // itemsize, [move // itemsize for move in moves]


def _steps(distance: int, axes: tuple[_Axis, ...]) -> list[int] | None:
    """A distance in memory as steps along the axes; None where it ends between them, or outside."""
    if distance < 0:
        return None
    steps = []
    for axis in axes:
        count, distance = divmod(distance, axis.stride)
        if count >= axis.size:
            return None
        steps.append(count)
    return steps


def _position(steps: list[int], axes: tuple[_Axis, ...]) -> int:
    return sum(count * axis.step for count, axis in zip(steps, axes, strict=True))


def _is_all(told: dict[str, Any], base: Geometry) -> bool:
    """Whether a view is all of its base in the same shape; strides of axes of one element do not count."""
    _, shape, _, dtype, *_ = base
    if told["offset"] or tuple(told["shape"]) != shape or told["dtype"] != dtype_name(dtype):
        return False
    expected = 1
    for size, stride in zip(reversed(told["shape"]), reversed(told["strides"]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
