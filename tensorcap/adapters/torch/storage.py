"""A ledger by storage: which record holds a tensor's values at this moment. It keeps no storage alive.

A record holds its tensor's elements in C order. Another tensor of the same memory is described as a view of
the record, with strides over that order, whatever the strides in memory are. A write to a storage ends what
was known of it. A storage is known by its address, which a weak reference keeps from being used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from tensorcap.adapters.torch.tensors import dtype_name

if TYPE_CHECKING:
    import torch

Geometry = tuple[Any, ...]  # offset, shape, strides, dtype, whether conjugated, whether negated
_FEW: Final = 256  # storages that are kept before those that are gone are dropped


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
    """An axis of memory, all in bytes: one element on in memory (`stride`) is `step` on in C order."""

    stride: int
    size: int
    step: int


class _Base:
    """A record, a parameter or a buffer that holds all elements of a tensor.

    Attributes:
        reference: How an op refers to it in the archive.
        geometry: How the tensor lies in its storage.
    """

    __slots__ = ("_axes", "geometry", "reference")

    def __init__(self, reference: dict[str, Any], geometry: Geometry) -> None:
        self.reference = reference
        self.geometry = geometry
        self._axes: tuple[_Axis, ...] | None = None

    @property
    def axes(self) -> tuple[_Axis, ...]:
        """The axes of its memory, computed when first needed: most bases never need them."""
        if self._axes is None:
            _, shape, strides, dtype, *_ = self.geometry
            self._axes = _axes(shape, strides, dtype.itemsize)
        return self._axes


class _Storage:
    """What is known of one storage.

    Attributes:
        reference: Keeps its address from being used again.
        exact: By geometry, the record or the parameter with exactly these values.
        views: By geometry, the key of the view with exactly these values.
        bases: The records, parameters and buffers that views can be described by, the newest last.
        weights: Those of the bases that are parameters, and stay through a write.
        is_unfilled: Whether it was allocated without values, and not written as a whole since.
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
        """Whether its memory was allocated without values, and not written as a whole since."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.is_unfilled

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether its memory was allocated without values, and nothing was written to it since."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.is_unfilled and not known.writes

    def note_unfilled(self, tensor: torch.Tensor) -> None:
        """Note that an op allocated the tensor without values."""
        self._storage(tensor).is_unfilled = True

    def hold_weight(self, name: str, tensor: torch.Tensor, *, is_parameter: bool, writes: int = 0) -> None:
        """Note that the tensor is a parameter or a buffer of the model.

        Args:
            name: Its name in the model.
            tensor: The tensor.
            is_parameter: Whether it is referred to by its name even after a write.
            writes: How often it may have been written before.
        """
        known = self._storage(tensor)
        known.writes = max(known.writes, writes)
        base = _Base(_weight_reference(name, known.writes), geometry_of(tensor))
        known.exact[base.geometry] = base.reference
        known.bases.append(base)
        if is_parameter:
            known.weights.append(base)

    def hold(self, tensor: torch.Tensor, key: str, *, is_whole: bool = True) -> None:
        """Note that there is a record of the tensor.

        Args:
            tensor: The tensor.
            key: The record's key text.
            is_whole: Whether it holds all elements, so that views can be read from it.
        """
        known = self._storage(tensor)
        geometry = geometry_of(tensor)
        known.exact[geometry] = reference = {"record": key}
        if is_whole:
            known.bases.append(_Base(reference, geometry))

    def hold_view(self, tensor: torch.Tensor, key: str) -> None:
        """Note that the tensor was described as a view, under this key."""
        self._storage(tensor).views[geometry_of(tensor)] = key

    def note_write(self, tensor: torch.Tensor) -> None:
        """Note that an op wrote to the tensor: what was known of its storage is over."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            return
        known.writes += 1
        known.exact.clear()
        known.views.clear()
        for base in known.weights:
            base.reference = _weight_reference(base.reference["parameter"], known.writes)
        known.bases = list(known.weights)
        known.exact.update((base.geometry, base.reference) for base in known.weights)
        if known.is_unfilled and tensor.numel() * tensor.itemsize == storage.nbytes():
            known.is_unfilled = False

    def forget_records(self) -> None:
        """Forget all but parameters and buffers, since writes may have been missed."""
        self._storages = {a: s for a, s in self._storages.items() if not s.reference.expired()}
        for known in self._storages.values():
            known.views.clear()
            known.bases = [base for base in known.bases if "parameter" in base.reference]
            known.exact = {base.geometry: base.reference for base in known.bases}

    def find(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """A reference to the tensor's values: to a record, to an earlier view; None if they are nowhere."""
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
        based = self._find_base(known, geometry)
        if based is None:
            return None
        base, view_reference = based
        return base.reference if _is_whole(view_reference, base.geometry) else view_reference

    def view(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """A reference to the tensor as a view of a record or a parameter; None if it is not one."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        based = None if known is None else self._find_base(known, geometry_of(tensor))
        return None if based is None else based[1]

    def _find_base(self, known: _Storage, geometry: Geometry) -> tuple[_Base, dict[str, Any]] | None:
        """The newest base that a view can be described by, and the reference to the view."""
        for base in reversed(known.bases):
            relative = _relative(geometry, base)
            if relative is not None:
                offset, strides = relative
                reference = base.reference
                whole = {"view_of": reference["record"]} if "record" in reference else reference
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


def _weight_reference(name: str, writes: int) -> dict[str, Any]:
    return {"parameter": name, "writes": writes} if writes else {"parameter": name}


def _axes(shape: Iterable[int], strides: Iterable[int], itemsize: int) -> tuple[_Axis, ...]:
    """The axes of memory from the outermost to the bytes of an element; none if there is no element.

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

    Every stride is written as whole steps along the axes of the base's memory; if no index of the view
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
    """A distance in memory as steps along the axes; None if it ends between them, or outside."""
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


def _is_whole(view: dict[str, Any], base: Geometry) -> bool:
    """Whether a view is all of its base in the same shape; strides of axes of one element do not count."""
    _, shape, _, dtype, *_ = base
    if view["offset"] or tuple(view["shape"]) != shape or view["dtype"] != dtype_name(dtype):
        return False
    expected = 1
    for size, stride in zip(reversed(view["shape"]), reversed(view["strides"]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
