"""Logical dtypes: their names, the numpy type that holds their bits, and their values.

A tensor's bits are kept exactly, whatever its dtype. numpy has no bfloat16, float8 or float4, so each
logical dtype names a *storage* type of the same size. `decode` gives the values, `encode` and `cast` give
stored elements. Facts of float formats are in `float_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import FLOAT_FORMATS, LEAST_FINITE, MASK_SENTINELS

Array = NDArray[Any]
Kind = Literal["bool", "int", "uint", "float", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One logical dtype.

    Attributes:
        name: As torch and ml_dtypes name it, without the module.
        storage: numpy type code of one stored element, little endian.
        kind: What the values are.
        packed: Values in one stored element; 2 for a byte that holds two float4 values.
        itemsize: Size of one stored element, in bytes.
    """

    name: str
    storage: str
    kind: Kind
    packed: int = 1
    itemsize: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", np.dtype(self.storage).itemsize)

    @property
    def is_inexact(self) -> bool:
        """Whether values are float or complex, so that computing with them rounds."""
        return self.kind in ("float", "complex")

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers, signed or not; bool is none."""
        return self.kind in ("int", "uint")

    @property
    def is_native(self) -> bool:
        """Whether numpy itself has this dtype, so that stored elements are values."""
        return np.dtype(self.storage).name == self.name


_SMALL_FLOATS: Final = [name for name, form in FLOAT_FORMATS.items() if form.bits <= 8]
_SUB_BYTE_INTS: Final = {  # one element a byte, as torch and ml_dtypes keep them: width in bits, signed
    **{f"int{n}": (n, True) for n in range(1, 8)},
    **{f"uint{n}": (n, False) for n in range(1, 8)},
}

DTYPES: Final = {
    d.name: d
    for d in (
        DType("bool", "|b1", "bool"),
        DType("int8", "|i1", "int"),
        DType("uint8", "|u1", "uint"),
        *(DType(f"int{8 * n}", f"<i{n}", "int") for n in (2, 4, 8)),
        *(DType(f"uint{8 * n}", f"<u{n}", "uint") for n in (2, 4, 8)),
        DType("float16", "<f2", "float"),
        DType("bfloat16", "<u2", "float"),
        DType("float32", "<f4", "float"),
        DType("float64", "<f8", "float"),
        DType("complex32", "<u4", "complex"),
        DType("complex64", "<c8", "complex"),
        DType("complex128", "<c16", "complex"),
        *(DType(name, "|u1", "float") for name in _SMALL_FLOATS),
        DType("float4_e2m1fn_x2", "|u1", "float", packed=2),
        *(DType(n, "|i1" if s else "|u1", "int" if s else "uint") for n, (_, s) in _SUB_BYTE_INTS.items()),
    )
}


def dtype(name: str) -> DType:
    """Look a logical dtype up by name.

    Raises:
        UsageError: There is no such dtype; the hint lists those that exist.
    """
    logical = DTYPES.get(name)
    if logical is None:
        raise UsageError(f"dtype {name!r} is unknown", hint=f"Known are: {', '.join(sorted(DTYPES))}.")
    return logical


def dtype_of(array: Array) -> DType:
    """The logical dtype of a numpy array; those of ml_dtypes are known by their names.

    Raises:
        UsageError: The array holds text, objects, dates or another thing that is no tensor.
    """
    name = array.dtype.name
    if name not in DTYPES or array.dtype.kind in "OSUMm":
        raise UsageError(f"dtype {name!r} of a numpy array is no tensor dtype")
    return DTYPES[name]


def bits_of(array: Array) -> Array:
    """The array's bits in the storage type, C-contiguous, little endian; copied only if it must be."""
    logical = dtype_of(array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        array = array.astype(array.dtype.newbyteorder("<"))
    shape = array.shape  # ascontiguousarray turns 0-d into 1-d
    return np.ascontiguousarray(array).view(logical.storage).reshape(shape)


def decode(bits: Array, logical: DType) -> Array:
    """The values of stored elements, exactly.

    Args:
        bits: Stored elements, any shape, of type `logical.storage`.
        logical: Their dtype.

    Returns:
        The array itself if numpy has the dtype; else float32 (bfloat16, float8, float6, float4),
        complex64 (complex32) or int8/uint8 (narrower integers). A packed dtype doubles the last axis,
        low half of each byte first.
    """
    if logical.name == "bfloat16":
        return (bits.astype("<u4") << 16).view("<f4")
    if logical.name == "complex32":
        pairs = np.ascontiguousarray(bits).reshape(-1).view("<f2").astype("<f4")
        return pairs.view("<c8").reshape(bits.shape)
    if logical.name == "float4_e2m1fn_x2":
        flat = np.stack([bits & 15, bits >> 4], axis=-1)
        shape = (*bits.shape[:-1], 2 * bits.shape[-1]) if bits.ndim else (2,)
        return _table("float4_e2m1fn")[flat].reshape(shape)
    if logical.name in _SMALL_FLOATS:
        return _table(logical.name)[bits]
    if logical.name in _SUB_BYTE_INTS:
        width, signed = _SUB_BYTE_INTS[logical.name]
        low = bits.view("u1") & ((1 << width) - 1)
        if not signed:
            return low
        shift = np.uint8(8 - width)
        return (low << shift).view("i1") >> np.int8(shift)
    return bits


def encode(values: Array, wanted: DType) -> Array:
    """Stored elements of a float dtype of two bytes or more, rounded to nearest; too large becomes infinite.

    Args:
        values: float64, any shape.
        wanted: float16, bfloat16, float32 or float64.

    Example:
        >>> encode(np.array([-1.0, 1e39, np.nan]), DTYPES["bfloat16"]).tolist()
        [49024, 32640, 32704]
    """
    if wanted.is_native:
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(wanted.storage)
    is_finite = np.isfinite(values)
    numbers = np.abs(FLOAT_FORMATS[wanted.name].numbers(np.where(is_finite, values, 0.0)))
    magnitudes = np.where(is_finite, numbers, np.where(np.isnan(values), 0x7FC0, 0x7F80))
    signs = np.signbit(values).astype(wanted.storage) << 15
    return np.asarray(magnitudes.astype(wanted.storage) | signs)


def cast(bits: Array, logical: DType, wanted: DType) -> tuple[Array, str]:
    """Convert stored elements to another dtype, and say how (INJ-5).

    Floats are rounded to nearest, ties to even. A mask sentinel beyond the range becomes the least finite
    value. A bool mask becomes one of 0 and the least finite value, or one of the whole numbers 0 and 1, and
    the other way round.

    Args:
        bits: Stored elements of `logical`, any shape.
        logical: Their dtype.
        wanted: The dtype of the result.

    Returns:
        Stored elements of `wanted`, and a text; "" if nothing was done.

    Raises:
        UsageError: A finite value would not be finite any more, a whole number would change, or one side has
            floats and the other has not.

    Example:
        >>> cast(np.array([1.5], "<f4"), DTYPES["float32"], DTYPES["bfloat16"])
        (array([16320], dtype=uint16), 'float32 to bfloat16')
    """
    if logical == wanted:
        return bits, ""
    names = f"{logical.name} to {wanted.name}"
    values = decode(bits, logical)
    kinds = logical.kind, wanted.kind
    if kinds == ("float", "bool"):
        attends = values == 0
        if bool((attends | _is_blocked(values)).all()):
            return attends, f"{names}, as a mask"
    elif kinds == ("bool", "float") and wanted.name in LEAST_FINITE:
        return encode(np.where(values, 0.0, LEAST_FINITE[wanted.name]), wanted), f"{names}, as a mask"
    elif "bool" in kinds and {*kinds} <= {"bool", "int", "uint"} and wanted.is_native:
        if bool(((values == 0) | (values == 1)).all()):
            return values.astype(wanted.storage), names
    elif {*kinds} <= {"int", "uint"}:
        whole = values.astype(wanted.storage)
        if wanted.is_native and bool(((whole == values) & ((whole < 0) == (values < 0))).all()):
            return whole, names
        raise UsageError(f"whole numbers of {names} change")
    elif kinds == ("float", "float") and wanted.name in LEAST_FINITE:
        return _cast_floats(values.astype(np.float64), wanted, names)
    raise UsageError(f"{logical.name} in the archive, {wanted.name} in the model")


@cache
def _table(name: str) -> NDArray[np.float32]:
    """The values of all 256 bytes of a float of at most 8 bits; bits above its width are ignored."""
    kind = FLOAT_FORMATS[name]
    byte = np.arange(256)
    if not kind.is_signed:
        values = np.ldexp(1.0, byte - kind.bias)
        values[255] = np.nan
        return values.astype(np.float32)
    e_bits, m_bits = kind.exponent_bits, kind.mantissa_bits
    mantissa = byte & ((1 << m_bits) - 1)
    exponent = (byte >> m_bits) & ((1 << e_bits) - 1)
    negative = (byte >> (e_bits + m_bits)) & 1
    normal = np.ldexp(1.0 + mantissa / (1 << m_bits), exponent - kind.bias)
    subnormal = np.ldexp(mantissa / (1 << m_bits), 1 - kind.bias)
    values = np.where(exponent == 0, subnormal, normal)
    top = exponent == (1 << e_bits) - 1
    if kind.special == "ieee":
        values = np.where(top, np.where(mantissa == 0, np.inf, np.nan), values)
    elif kind.special == "fn":
        values = np.where(top & (mantissa == (1 << m_bits) - 1), np.nan, values)
    values = np.where(negative == 1, -values, values)
    if kind.special == "fnuz":
        values[0x80] = np.nan
    return values.astype(np.float32)


def _cast_floats(values: Array, wanted: DType, names: str) -> tuple[Array, str]:
    elements = encode(values, wanted)
    lost = np.isfinite(values) & ~np.isfinite(decode(elements, wanted))
    blocked = lost & _is_blocked(values)
    if bool(blocked.any()):
        least = LEAST_FINITE[wanted.name]
        elements = np.where(blocked, encode(np.array(least), wanted), elements)
        names += f", mask sentinels to {least:g}"
    lost &= ~blocked
    if bool(lost.any()):
        raise UsageError(f"{values[lost].flat[0]:g} is beyond the range of {wanted.name}")
    return elements, names


def _is_blocked(values: Array) -> Array:
    """Whether each value stands for minus infinity (MET-4)."""
    return np.isin(values.astype(np.float64), (-np.inf, *MASK_SENTINELS))
