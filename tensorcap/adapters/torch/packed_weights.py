"""Weights that are kept in few bits: packed for an engine, beside their scales, or in a class of their own.

Read `quantised_weights` first: which layouts are known, and how numbers, steps and zero points lie in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.tensor_leaves import untraced
from tensorcap.adapters.torch.tensors import PLAIN_CLASSES, dtype_name

_DYNAMIC: Final = "torch.ao.nn.quantized.dynamic."  # beginning of the modules whose inputs are floats
_QUANTISERS: Final = "torch.ao.nn.quantized.modules"  # of the module that rounds what enters a model
_LIMITS: Final = {torch.quint8: (0, 255), torch.qint8: (-128, 127)}
_REDUCED_RANGE: Final = 4  # version of a module from which on it leaves out a bit of its inputs
_BLOCKS: Final = "_blocks"
_MXFP4: Final = "MXFP4"
_MXFP4_LEVELS: Final = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
_MXFP4_BIAS: Final = 127
_NIBBLES: Final = 8  # numbers of four bits in an int32
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight outputs among the nibbles (AutoAWQ)
_BYTES: Final = {torch.int8: "int8", torch.uint8: "uint8"}
_SCALES: Final = ("_scale", "_scales", "_scale_inv", "_absmax")  # behind the name of a weight
_ZEROS: Final = ("_zero_point", "_zero_points", "_zeros", "_zero")
_LONE_SCALES: Final = ("scale", "scales", "SCB")  # where one weight is held
_LONE_ZEROS: Final = tuple(end.removeprefix("_") for end in _ZEROS)
_PROBES: Final = 4  # inputs that tell readings of one weight apart
_AS_MADE: Final = 0.03  # of what a module makes of these, that a reading may leave; int8 inputs leave 0.01
_MOST_FLOATS: Final = 4  # tensors besides a matrix of bytes that are tried as its scales


def packed_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return `weight` (quantised) and `bias` of a module that has them as methods; else nothing."""
    if not type(module).__module__.startswith("torch.ao.nn.") or "weight" in module._parameters:
        return {}
    methods = {name: getattr(module, name, None) for name in ("weight", "bias")}
    tensors = {name: method() for name, method in methods.items() if callable(method)}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def packed_settings(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return how a module rounds its inputs and its result.

    `one_scale` of all its weights; `input_bits` if inputs are rounded at each call, to one grid from their
    smallest to their largest value, or to one for each row (`input_rows`), which may be symmetric around 0
    (`input_symmetric`); `output_step` and `output_range` if results are rounded to whole steps. A dynamic
    module of torch.ao leaves out a bit of its inputs so that products do not overflow on processors without
    VNNI.
    """
    weight = tensors.get("weight")
    settings: dict[str, Any] = {}
    if weight is not None and weight.is_quantized:
        settings["one_scale"] = weight.qscheme() == torch.per_tensor_affine
        if type(module).__module__.startswith(_DYNAMIC):
            if weight.dtype == torch.qint8:
                version = getattr(module, "version", 0)
                is_reduced = version is None or version >= _REDUCED_RANGE
                settings["input_bits"] = 7 if is_reduced else 8
        elif isinstance(step := getattr(module, "scale", None), float):
            settings |= _rounded_results(module, step)
    if type(module).__module__ == _QUANTISERS and isinstance(
        step := getattr(module, "scale", None), torch.Tensor
    ):
        settings |= _rounded_results(module, float(step))
    for parameter in module._parameters.values():
        settings |= _rounded_inputs(parameter)
    return settings


def _rounded_results(module: nn.Module, step: float) -> dict[str, Any]:
    """How a module rounds its result: by its step, and the range of its numbers, quint8 if it says none."""
    number = getattr(module, "dtype", torch.quint8)
    if number not in _LIMITS:
        return {"output_step": step}
    zero = int(getattr(module, "zero_point", 0))
    return {"output_step": step, "output_range": [(limit - zero) * step for limit in _LIMITS[number]]}


def _rounded_inputs(weight: object) -> dict[str, Any]:
    """How torchao rounds what is multiplied by a weight of one of its classes."""
    how = getattr(weight, "activation_quantization", None)
    if isinstance(how, str) and how.startswith("int8"):
        return {"input_bits": 8, "input_rows": "token" in how, "input_symmetric": "_sym" in how}
    options = getattr(weight, "act_quant_kwargs", None)
    if options is None or "Int8" not in type(options).__name__:
        return {}
    is_symmetric = "ASYM" not in str(getattr(options, "mapping_type", ""))
    is_by_row = "Row" in type(getattr(options, "granularity", None)).__name__
    return {"input_bits": 8, "input_rows": is_by_row, "input_symmetric": is_symmetric}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight in few bits, which its module makes floats of when it computes.

    Attributes:
        kept: The tensor that the module keeps it in.
        number: The format of one number: `int8`, `uint4`, `float8_e4m3fn`, `MXFP4`, `nf4`; "" if unknown.
        values: Returns the weight in float32.
        steps: Returns what numbers are multiplied by, one for each block along each axis; None if unknown.
        zeros: Returns the numbers that stand for 0, in the shape of the steps; None if that is 0.
    """

    kept: torch.Tensor
    number: str
    values: Callable[[], torch.Tensor]
    steps: Callable[[], torch.Tensor] | None = None
    zeros: Callable[[], torch.Tensor] | None = None


def quantised_weights(module: nn.Module) -> dict[str, QuantisedWeight]:
    """Return weights that a module holds in few bits, by their name as floats.

    1. `weight` that a module of torch.ao packs, and parameters of a class with numbers, scales and a method
       that dequantises them, as those of torchao.
    2. `NAME_blocks` and `NAME_scales` of uint8 are MXFP4.
    3. `qweight` of int32 beside `scales`: eight numbers of four bits in each along the inputs (GPTQ) or the
       outputs (AWQ).
    4. `NAME` of bytes with a state of blocks (bitsandbytes).
    5. `NAME` of int8, uint8 or float8 with floats `NAME_scale`, `NAME_scales`, or `scale` or `scales` if
       there is one such weight, that fit its shape: one, one for each row, or one for each block along the
       axes. Zero points lie beside them likewise. Two numbers of four bits may be in a byte.
    6. The only matrix of bytes of a module without a `weight`, as it is or transposed, with scales and zero
       points under whatever names, if the module makes of a few inputs what that makes of them.

    Where several readings of the same bytes are in use, the one counts by which the module computes.
    """
    weights: dict[str, QuantisedWeight] = {}
    packed = packed_tensors(module).get("weight")
    if packed is not None and packed.is_quantized:
        weights["weight"] = _of_torch(packed)
    tensors = {n: t for n, t in {**module._parameters, **module._buffers}.items() if t is not None}
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN_CLASSES and callable(getattr(tensor, "dequantize", None)):
            if hasattr(tensor, "qdata"):
                weights[name] = _of_class(tensor)
        elif (state := getattr(tensor, "quant_state", None)) is not None and hasattr(state, "absmax"):
            weights[name] = _of_bitsandbytes(tensor, state)
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS)
        exponents = tensors.get(f"{base}_scales")
        is_pair = base != name and exponents is not None and tensor.dtype == exponents.dtype == torch.uint8
        if is_pair and exponents is not None and exponents.shape == tensor.shape[:-1]:
            weights[base] = _of_mxfp4(tensor, exponents)
    weights |= _of_words(module, tensors)
    for name, readings in _of_bytes(module, tensors):
        if name not in weights:
            weights[name] = _as_computed(module, readings)
    if not weights and "weight" not in tensors:
        weights |= _of_other_names(module, tensors)
    return weights


def _of_torch(packed: torch.Tensor) -> QuantisedWeight:
    """A quantised tensor of torch, with one scale or one for each slice of an axis."""

    def along(per_channel: Callable[[], torch.Tensor], of_all: Callable[[], float]) -> torch.Tensor:
        if packed.qscheme() == torch.per_tensor_affine:
            return torch.full((1,) * packed.ndim, float(of_all()))
        shape = [1] * packed.ndim
        shape[packed.q_per_channel_axis()] = -1
        return per_channel().float().reshape(shape)

    name = dtype_name(packed.dtype).removeprefix("q")
    return QuantisedWeight(
        packed,
        name,
        packed.dequantize,
        lambda: along(packed.q_per_channel_scales, packed.q_scale),
        lambda: along(packed.q_per_channel_zero_points, packed.q_zero_point),
    )


def _of_class(tensor: Any) -> QuantisedWeight:
    """A tensor of a class with `qdata`, `scale`, perhaps `zero_point`, and `dequantize`, as torchao has."""
    scale, zeros = getattr(tensor, "scale", None), getattr(tensor, "zero_point", None)
    numbers = getattr(tensor, "target_dtype", None) or tensor.qdata.dtype

    def values() -> torch.Tensor:
        floats: torch.Tensor = tensor.dequantize()
        return floats.detach().float()

    if not isinstance(scale, torch.Tensor) or not tensor.qdata.ndim == scale.ndim == tensor.ndim:
        return QuantisedWeight(tensor.qdata, "", values)
    if tensor.qdata.shape != tensor.shape:
        return QuantisedWeight(tensor.qdata, "", values)
    offsets = zeros.float if isinstance(zeros, torch.Tensor) and zeros.shape == scale.shape else None
    return QuantisedWeight(tensor.qdata, dtype_name(numbers), values, scale.float, offsets)


def _of_bitsandbytes(tensor: torch.Tensor, state: Any) -> QuantisedWeight:
    """Numbers of four bits, two in a byte, the high one first, with an absolute maximum for each block."""

    def absmax() -> torch.Tensor:
        if getattr(state, "nested", False):
            inner = state.state2
            codes = inner.code[state.absmax.long()].reshape(-1)
            sizes = inner.absmax.repeat_interleave(inner.blocksize)[: codes.numel()]
            nested: torch.Tensor = codes * sizes + state.offset
            return nested.float()
        largest: torch.Tensor = state.absmax.float()
        return largest.reshape(-1)

    def wide() -> torch.Tensor:
        count = 1
        for size in state.shape:
            count *= size
        return absmax().repeat_interleave(state.blocksize)[:count].reshape(tuple(state.shape))

    def values() -> torch.Tensor:
        data = tensor.detach().view(torch.uint8).reshape(-1)
        codes = torch.stack([data >> 4, data & 0x0F], -1).reshape(-1).long()
        scales = wide()
        levels: torch.Tensor = state.code.float()[codes][: scales.numel()]
        return levels.reshape(scales.shape) * scales

    def steps() -> torch.Tensor:
        shape = tuple(state.shape)
        if shape[-1] % state.blocksize:
            return wide()
        return absmax().reshape(*shape[:-1], -1)

    return QuantisedWeight(tensor, str(getattr(state, "quant_type", "")), values, steps)


def _of_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> QuantisedWeight:
    """Blocks along the last axis: two numbers in a byte, the low one first, and one exponent of 2."""

    def steps() -> torch.Tensor:
        powers = exponents.to(torch.int32) - _MXFP4_BIAS
        return torch.ldexp(torch.ones(powers.shape, device=powers.device), powers)

    def values() -> torch.Tensor:
        levels = torch.tensor(_MXFP4_LEVELS, device=packed.device)
        halves = torch.stack([packed & 0x0F, packed >> 4], dim=-1)
        return (levels[halves.long()].flatten(-2) * steps()[..., None]).flatten(-2)

    return QuantisedWeight(packed, _MXFP4, values, steps)


def _affine(
    kept: torch.Tensor,
    number: str,
    numbers: Callable[[], torch.Tensor],
    steps: torch.Tensor,
    zeros: torch.Tensor | None,
) -> QuantisedWeight:
    """Numbers less their zero points, times their steps."""

    def values() -> torch.Tensor:
        whole = numbers().float()
        shape = tuple(whole.shape)
        if zeros is not None:
            whole = whole - _spread(zeros.float(), shape)
        return whole * _spread(steps.float(), shape)

    return QuantisedWeight(
        kept, number, values, lambda: steps.float(), None if zeros is None else (lambda: zeros.float())
    )


def _of_words(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, QuantisedWeight]:
    """`weight` of a layer that holds it as `qweight`, `scales` and perhaps `qzeros` and `g_idx`.

    GPTQ has eight inputs in an int32, `[inputs / 8, outputs]`, and zero points of which some versions store
    one less; AWQ eight outputs, `[inputs, outputs / 8]`, in an order of its own. Scales are
    `[groups, outputs]`.
    """
    packed, scales = tensors.get("qweight"), tensors.get("scales")
    if packed is None or scales is None or packed.dtype != torch.int32 or packed.ndim != scales.ndim != 2:
        return {}
    zeros, index = tensors.get("qzeros"), tensors.get("g_idx")
    outputs = scales.shape[1]
    steps = scales.t()
    readings: list[torch.Tensor | None]
    if packed.shape[1] == outputs:
        inputs = packed.shape[0] * _NIBBLES

        def numbers() -> torch.Tensor:
            return _nibbles(packed).permute(1, 0, 2).reshape(outputs, inputs)

        held = None if zeros is None else _nibbles(zeros).reshape(len(zeros), -1)[:, :outputs].t()
        readings = [None] if held is None else [held + 1, held]
        if index is not None and len(index) == inputs and not _is_in_order(index):
            groups = index.long()
            steps = steps[:, groups]
            readings = [None if one is None else one[:, groups] for one in readings]
    elif packed.shape[1] * _NIBBLES == outputs:

        def numbers() -> torch.Tensor:
            return _nibbles(packed)[..., list(_AWQ_ORDER)].reshape(len(packed), outputs).t()

        held = None if zeros is None else _nibbles(zeros)[..., list(_AWQ_ORDER)].reshape(len(zeros), -1).t()
        readings = [held]
    else:
        return {}
    number = "uint4"
    middle = torch.full((1, 1), 8.0)
    candidates = [_affine(packed, number, numbers, steps, middle if one is None else one) for one in readings]
    return {"weight": _as_computed(module, candidates)}


def _is_in_order(index: torch.Tensor) -> bool:
    """Whether inputs are of groups one after the other, of one size."""
    groups = int(index.max()) + 1
    is_whole = len(index) % groups == 0
    wanted = torch.arange(len(index), device=index.device) // max(1, len(index) // groups)
    return is_whole and torch.equal(index.long(), wanted)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The eight numbers of four bits in each int32, the lowest first, along a further axis."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return (packed[..., None] >> shifts) & 0x0F


def _of_bytes(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Sequence[QuantisedWeight]]]:
    """Yield the name and the readings of each weight of bytes beside its scales."""
    held = [n for n, t in tensors.items() if t.ndim > 1 and (t.dtype in _BYTES or _is_float8(t))]
    held = [name for name in held if not name.endswith((_BLOCKS, *_SCALES, *_ZEROS))]
    held = [name for name in held if name not in (*_LONE_SCALES, *_LONE_ZEROS)]
    for name in held:
        packed = tensors[name]
        alone: tuple[str, ...] = _LONE_SCALES if len(held) == 1 else ()
        scales = next((tensors[n] for n in (*(name + end for end in _SCALES), *alone) if n in tensors), None)
        if scales is None:
            scales = getattr(packed, "SCB", None)  # of bitsandbytes: the largest of each row
        if scales is None or not scales.is_floating_point():
            continue
        if scales is getattr(packed, "SCB", None) or scales is tensors.get("SCB"):
            scales = scales / 127
        alone = _LONE_ZEROS if len(held) == 1 else ()
        zeros = next((tensors[n] for n in (*(name + end for end in _ZEROS), *alone) if n in tensors), None)
        readings = list(_readings(module, packed, scales, zeros))
        if readings:
            is_alone = name == "packed" and alone != () and "weight" not in tensors
            yield "weight" if is_alone else name, readings


def _readings(
    module: nn.Module, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> Iterator[QuantisedWeight]:
    """Yield what bytes beside scales may mean, the most usual first.

    Whether a byte holds two numbers of four bits is told by the inputs of the module, or left open.
    """
    inputs = getattr(module, "in_features", None)
    is_whole = not (packed.dtype in _BYTES and packed.ndim == 2 and inputs == 2 * packed.shape[1])
    if is_whole and (steps := _in_blocks(scales, zeros, tuple(packed.shape))) is not None:
        number = dtype_name(packed.dtype)
        yield _affine(packed, number, lambda: packed, *steps)
        if packed.dtype == torch.uint8 and steps[1] is None:
            middle = torch.full((1,) * packed.ndim, 128.0)
            yield _affine(packed, number, lambda: packed, steps[0], middle)
    if packed.dtype not in _BYTES or packed.ndim != 2 or inputs not in (None, 2 * packed.shape[1]):
        return
    halves = _in_blocks(scales, zeros, (packed.shape[0], 2 * packed.shape[1]))
    if halves is None:
        return
    codes = packed.view(torch.uint8)
    low, high = codes & 0x0F, codes >> 4
    middle = torch.full((1, 1), 8.0) if halves[1] is None else halves[1]
    for pair in ((low, high), (high, low)):
        numbers = torch.stack(pair, -1).flatten(-2)
        signed = ((numbers.to(torch.int16) + 8) & 15) - 8
        yield _affine(packed, "uint4", partial(_itself, numbers), halves[0], middle)
        yield _affine(packed, "int4", partial(_itself, signed), *halves)


def _in_blocks(
    scales: torch.Tensor, zeros: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Scales and zero points with an axis for each of a weight's; None if they do not fit its shape."""
    if not _fits(scales, shape) or (zeros is not None and not _fits(zeros, shape)):
        return None
    return _as_blocks(scales, len(shape)), None if zeros is None else _as_blocks(zeros, len(shape))


def _of_other_names(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, QuantisedWeight]:
    """`weight` of a module that computes with one matrix of bytes and scales of any names."""
    held = [tensor for tensor in tensors.values() if tensor.dtype in _BYTES or _is_float8(tensor)]
    matrices = [tensor for tensor in held if tensor.ndim > 1]
    floats = [t for n, t in tensors.items() if n != "bias" and t.is_floating_point() and not _is_float8(t)]
    if len(matrices) != 1 or matrices[0].ndim != 2 or not 1 <= len(floats) <= _MOST_FLOATS:
        return {}
    if any(tensor.is_meta for tensor in tensors.values()):
        return {}
    readings: list[QuantisedWeight] = []
    for packed in (matrices[0], matrices[0].t()):
        for scales in floats:
            besides = (one for one in tensors.values() if one is not scales and one.shape == scales.shape)
            for zeros in (None, *besides):
                readings += _readings(module, packed, scales, zeros)
    made = _made_by(deepcopy(module), readings)  # it may keep what it is given
    return {} if made is None or made[1] > _AS_MADE else {"weight": made[0]}


def _itself(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


def _as_computed(module: nn.Module, readings: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """The reading by which the module computes; the first if it cannot be asked."""
    made = _made_by(module, readings) if len(readings) > 1 else None
    return readings[0] if made is None else made[0]


def _made_by(module: nn.Module, readings: Sequence[QuantisedWeight]) -> tuple[QuantisedWeight, float] | None:
    """The reading that is nearest to what a module makes of a few inputs, and what it leaves, relative.

    None if there is none, or if the module cannot be asked. The generators of random numbers are as before.
    """
    if not readings:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]), untraced():
        return _asked(module, readings)


def _asked(module: nn.Module, readings: Sequence[QuantisedWeight]) -> tuple[QuantisedWeight, float] | None:
    """The same, with whatever the module does to random numbers and to what is recorded."""
    weights = [reading.values() for reading in readings]
    sizes, device = {weight.shape[-1] for weight in weights}, weights[0].device
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = {size: _made_of_probes(module, size, dtype, device) for size in sizes}
        errors = [_left_by(weight, made[weight.shape[-1]]) for weight in weights]
        best = min(range(len(errors)), key=errors.__getitem__)
        if math.isfinite(errors[best]):
            return readings[best], errors[best]
    return None


def _made_of_probes(
    module: nn.Module, inputs: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """What a module makes of a few inputs, less what it makes of zeros; None if it takes others."""
    probe = _probes(inputs).to(device)
    try:
        zero, made = (type(module).forward(module, x.to(dtype)) for x in (torch.zeros_like(probe), probe))
        result: torch.Tensor = made.float() - zero.float()
    except Exception:  # of a module that takes other arguments, or another dtype
        return None
    return result


def _left_by(weight: torch.Tensor, made: torch.Tensor | None) -> float:
    """What a weight leaves of what a module makes of a few inputs, relative; infinite if it does not fit."""
    if made is None or weight.ndim != 2 or made.shape != (_PROBES, weight.shape[0]):
        return math.inf
    probe = _probes(weight.shape[-1]).to(made.device)
    left = float((made - probe @ weight.t()).norm() / made.norm())
    return left if math.isfinite(left) else math.inf


def _probes(inputs: int) -> torch.Tensor:
    return 1 + torch.sin(torch.arange(_PROBES * inputs, dtype=torch.float32)).reshape(_PROBES, inputs) / 2


def _is_float8(tensor: torch.Tensor) -> bool:
    return dtype_name(tensor.dtype).startswith("float8")


def _as_blocks(scales: torch.Tensor, ndim: int) -> torch.Tensor:
    """Scales with an axis for each of the weight's."""
    if scales.ndim == ndim:
        return scales
    return scales.reshape(-1, *(1,) * (ndim - 1))


def _fits(scales: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether scales are one, one for each row, or one for each block along every axis."""
    if scales.numel() == 1 or tuple(scales.shape) == shape[:1]:
        return True
    sizes = zip(scales.shape, shape, strict=False)
    return scales.ndim == len(shape) and all(size and _block(size, whole) for size, whole in sizes)


def _block(count: int, whole: int) -> int:
    """How many elements of an axis a block has, of which the last may be cut; 0 if none fits."""
    if whole % count == 0:
        return whole // count
    return next((size for size in (128, 64, 32) if -(-whole // size) == count), 0)


def _spread(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat scales over the blocks that they are of."""
    if scales.numel() == 1:
        return scales.reshape(())
    for axis, (size, whole) in enumerate(zip(scales.shape, shape, strict=True)):
        if 1 < size < whole:
            scales = scales.repeat_interleave(_block(size, whole), axis).narrow(axis, 0, whole)
    return scales
