"""Archived tensors in the place of the arguments and results of a torch model's calls.

The model goes on with a fresh copy, with the dtype, the device and the strides of its own tensor. What a call
writes to its copy of an argument is written to its caller's tensor when it ends, so that a state that is kept
in place is what the call made it. Gradients go through to the model's own tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.tensor_leaves import KINDS
from tensorcap.adapters.torch.tensors import dtype_name, equal_values, from_stored, plain
from tensorcap.recording import Call, Kind, Substitution, leaf_slot, no_fit, rebuild, walk
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import MASK_SENTINELS
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record


class Copy(NamedTuple):
    """What stands for an argument that a call may write to.

    Attributes:
        own: The caller's tensor.
        copy: What the call is given.
        version: Of that, as it was given.
        before: Its values, likewise: kernels, numpy and `.data` write without a new version.
    """

    own: torch.Tensor
    copy: torch.Tensor
    version: int
    before: torch.Tensor


Copies = list[Copy]


def inject(
    substitution: Substitution,
    call: Call,
    kind: Kind,
    slots: Sequence[str],
    values: list[Any],
    copies: Copies | None = None,
) -> list[Any]:
    """Replace the values that a call goes on with, or its caller gets; containers stay the same.

    Args:
        substitution: The archived tensors.
        call: The call.
        kind: Whether the values are its arguments or its result.
        slots: The slot of each value.
        values: The values, which are recorded already.
        copies: Where to note what `write_back` needs; None if nothing is written back.

    Raises:
        UsageError: A tensor does not fit.
    """
    planned = substitution.planned(call.point.site, call.step, call.number, kind)
    if planned is None:
        return values
    try:
        injector = _CallInjector(substitution, call, planned)
        replaced = injector.replace(slots, values)
    except UsageError as error:
        substitution.failure = error
        raise
    if copies is not None:
        copies += injector.writable_copies()
    return replaced


def write_back(copies: Copies) -> None:
    """Write to the caller's tensors what a call wrote to its copies of them, and change their shape likewise.

    Nothing is written to one whose copy had another shape from the beginning, as of a smaller batch.
    """
    with torch.no_grad():
        for own, copy, version, before in copies:
            if own.shape != before.shape:
                continue
            if copy.shape != before.shape:
                own.data = copy
            elif copy._version != version or not equal_values(copy, before):
                own.copy_(copy)


class _CallInjector:
    """Replaces the values of one call."""

    def __init__(self, substitution: Substitution, call: Call, planned: Mapping[str, Record]) -> None:
        self._substitution = substitution
        self._call = call
        self._left = dict(planned)
        self._copies: dict[int, list[tuple[torch.Tensor, Array, torch.Tensor]]] = {}

    def replace(self, slots: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Replace the values of all slots, and note the archived tensors that have no place among them."""
        replaced = [self._value(slot, value) for slot, value in zip(slots, values, strict=True)]
        if self._left:
            names = {name for pair in zip(slots, values, strict=True) for name in _names(*pair)}
            for name in self._left:
                self._substitution.note_left(self._call.key(name), is_held=name in names)
        return replaced

    def writable_copies(self) -> Copies:
        """Return copies of tensors that a call may write to: not of a graph, nor of shared elements."""
        return [
            Copy(natural, copy, copy._version, copy.clone())
            for copies in self._copies.values()
            for natural, _, copy in copies
            if not (natural.requires_grad or natural.is_inference() or copy.is_inference())
            and _has_own_elements(natural)
        ]

    def _value(self, slot: str, value: Any) -> Any:
        return rebuild(value, KINDS, lambda name, natural: self._tensor(leaf_slot(slot, name), natural))

    def _tensor(self, slot: str, natural: Any) -> Any:
        key, record = self._call.key(slot), self._left.pop(slot, None)
        if record is None:
            self._substitution.note_absent(key)
            return natural
        try:
            if not isinstance(natural, torch.Tensor):
                raise NotCapturableError("a numpy array, expected a torch tensor")
            own = plain(natural.dequantize() if natural.is_quantized else natural)
        except NotCapturableError as error:
            self._substitution.note_left(key, str(error))
            return natural
        bits = self._substitution.read(record)
        for earlier, earlier_bits, copy in self._copies.get(id(natural), ()):
            # one tensor passed twice stays one: attention asks whether key and value are the same
            is_same = earlier is natural and earlier_bits.shape == bits.shape
            if is_same and earlier_bits.tobytes() == bits.tobytes():
                self._substitution.note_injected(key, "")
                return copy
        try:
            replacement, cast = self._fit(key, bits, record.dtype, own)
        except UsageError as error:
            if not self._substitution.leaves_misfit(key):
                raise
            self._substitution.note_left(key, str(error))
            return natural
        if natural.is_quantized:
            replacement, cast = _quantised_like(natural, replacement)
        if torch.is_grad_enabled() and natural.requires_grad:
            replacement = _WithGradientOf.apply(natural, replacement)  # type: ignore[no-untyped-call] # torch's own
        self._copies.setdefault(id(natural), []).append((natural, bits, replacement))
        self._substitution.note_injected(key, cast)
        return replacement

    def _fit(self, key: Key, bits: Array, dtype: DType, own: torch.Tensor) -> tuple[torch.Tensor, str]:
        """A tensor like the model's own with archived values; and how they were cast, or an empty text."""
        path = self._substitution.archive.path
        is_alike = tuple(own.shape) == bits.shape
        if not is_alike and not self._substitution.may_resize(key):
            raise no_fit(self._substitution.archive, key, bits.shape, tuple(own.shape))
        archived = from_stored(bits, dtype)
        try:
            values, cast = _cast_to(archived, own)
        except UsageError as error:
            raise UsageError(f"{path}: {key.text}: does not fit: {error}", hint=error.hint) from None
        return (_like(own).copy_(values) if is_alike else values.to(own.device, copy=True)), cast


def _quantised_like(natural: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Floats rounded to the steps of a quantised tensor; and how they were cast."""
    how = f"float32 to {dtype_name(natural.dtype)}"
    if natural.qscheme() == torch.per_tensor_affine:
        steps = natural.q_scale(), natural.q_zero_point()
        return torch.quantize_per_tensor(values, *steps, natural.dtype), how
    by_slice = (
        natural.q_per_channel_scales(),
        natural.q_per_channel_zero_points(),
        natural.q_per_channel_axis(),
    )
    return torch.quantize_per_channel(values, *by_slice, natural.dtype), how


def _like(own: torch.Tensor) -> torch.Tensor:
    """Memory with the strides of a tensor, gaps too: kernels sum and round in another order otherwise."""
    if not _has_own_elements(own):
        return torch.empty_like(own, memory_format=torch.contiguous_format)
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)


def _has_own_elements(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a tensor share memory."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += stride * (size - 1) if size else 0
    return True


class _WithGradientOf(torch.autograd.Function):
    """Other values in the place of a tensor, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, natural: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
        return replacement.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _cast_to(archived: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Cast archived values to the dtype of the model's own; and how, "" if nothing was done.

    Floats are rounded. A mask sentinel beyond the range becomes the least finite value, not minus infinity.
    A bool mask becomes one of 0 and the least finite value, and the other way round (POL-24), unless the
    floats are 0 and 1: these, and whole numbers of 0 and 1, become truth values, and the other way round.

    Raises:
        UsageError: A finite value would not be finite any more, a whole number would change, or only one
            side has floats.
    """
    dtype = own.dtype
    if archived.dtype == dtype:
        return archived, ""
    names = f"{dtype_name(archived.dtype)} to {dtype_name(dtype)}"
    kinds = _kind(archived.dtype), _kind(dtype)
    if kinds in (("float", "bool"), ("bool", "float")) and _is_by_number(archived, own):
        return archived.to(dtype), names
    if kinds == ("float", "bool"):
        attends = archived.double() == 0
        if bool((attends | _is_blocked(archived)).all()):
            return attends, f"{names}, as a mask"
    if kinds == ("bool", "float"):
        least = torch.finfo(dtype).min
        return torch.zeros(archived.shape, dtype=dtype).masked_fill(~archived, least), f"{names}, as a mask"
    if kinds in (("int", "int"), ("int", "bool"), ("bool", "int")):
        values = archived.to(dtype)
        if not torch.equal(values.to(archived.dtype), archived) or bool(
            ((values < 0) != (archived < 0)).any()
        ):
            raise UsageError(f"whole numbers of {names} change")
        return values, names
    if kinds[0] != kinds[1] or kinds[0] not in ("float", "complex"):
        raise UsageError(f"{dtype_name(archived.dtype)} in the archive, {dtype_name(dtype)} in the model")
    values = archived.to(dtype)
    lost = ~_is_finite(values)
    if not bool(lost.any()):
        return values, names
    lost &= _is_finite(archived)
    if kinds[0] == "float":
        blocked = lost & _is_blocked(archived)
        if bool(blocked.any()):
            values = torch.where(blocked, torch.full_like(values, torch.finfo(dtype).min), values)
            names += f", mask sentinels to {torch.finfo(dtype).min:g}"
        lost &= ~blocked
    if bool(lost.any()):
        value = archived[lost].flatten()[0].item()
        raise UsageError(f"{value:g} is beyond the range of {dtype_name(dtype)}")
    return values, names


def _is_by_number(archived: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether of two masks the one of floats has 1 for true and 0 for false, and is not added to scores.

    Zeros alone may be either; they are numbers if no bool is true.
    """
    floats, bools = (archived, own) if own.dtype == torch.bool else (own, archived)
    numbers = floats.double()
    is_one = numbers == 1
    return bool((is_one | (numbers == 0)).all()) and (bool(is_one.any()) or not bool(bools.any()))


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "int"


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(values if values.element_size() > 1 else values.double())  # no kernel for 8 bits


def _is_blocked(values: torch.Tensor) -> torch.Tensor:
    """A mask of the values that stand for minus infinity (MET-4)."""
    wide = values.double()
    is_blocked = torch.isneginf(wide)
    for sentinel in MASK_SENTINELS:
        is_blocked |= wide == sentinel
    return is_blocked


def _names(slot: str, value: Any) -> list[str]:
    return [leaf_slot(slot, leaf.name) for leaf in walk(value, KINDS) if leaf.is_tensor]
