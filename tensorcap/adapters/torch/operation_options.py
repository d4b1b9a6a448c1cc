"""Do an operation of a module's code with one of its options changed: axes, groups, padding, taps, numbers.

Each `_…_options` lists what one kind of operation can do instead, by the words that `Operation.alternatives`
has for it; each is made only when it is called.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from tensorcap.adapters.torch.operation_functions import ACTIVATIONS, function_options
from tensorcap.adapters.torch.operation_indices import index_options
from tensorcap.adapters.torch.operation_layouts import group_counts, layout_options

Options = Iterator[tuple[str, Callable[[], Any]]]

_MOST_AXES: Final = 5  # of a tensor whose axes are all tried; the number of sets doubles with each
_BESIDE: Final = (1, 2)  # distances of indices
_REDUCTIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "vector_norm": torch.linalg.vector_norm,
    "linalg_vector_norm": torch.linalg.vector_norm,
    "amax": torch.amax,
    "amin": torch.amin,
}
_CONVOLUTIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "conv1d": functional.conv1d,
    "conv2d": functional.conv2d,
    "conv3d": functional.conv3d,
}
_SPACINGS: Final = range(1, 9)  # of the taps of a convolution
_PADDING_MODES: Final = ("reflect", "replicate", "circular")
_POOLS: Final[Mapping[str, str]] = {
    **{f"avg_pool{n}d": f"max_pool{n}d" for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": f"adaptive_max_pool{n}d" for n in (1, 2, 3)},
}
_MODES: Final[Mapping[int, Sequence[str]]] = {  # of interpolation, by the axes of what is interpolated
    3: ("nearest", "linear"),
    4: ("nearest", "bilinear", "bicubic"),
    5: ("nearest", "trilinear"),
}
_CHOICES: Final = ("topk", "sort", "argsort")
_REPEATED: Final = ACTIVATIONS | frozenset(
    {
        *(
            "mul",
            "__mul__",
            "div",
            "__truediv__",
            "true_divide",
            "softmax",
            "add",
            "__add__",
            "sub",
            "__sub__",
        ),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm"),
    }
)
_PRODUCTS: Final = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__"})


def find_options(name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[str]:
    """List what an operation can do with one option changed, in words.

    Args:
        name: Of the operation, as torch calls it.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.
    """
    return [words for words, _ in _options(name, None, args, kwargs, result)]


def find_own_axes(name: str, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Say which axes a reduction that keeps them is over, in the words of its alternatives; else nothing."""
    if name not in _REDUCTIONS or not args or not kwargs.get("keepdim"):
        return ""
    return _axes_words(read_axes(name, args, kwargs))


def run_option(name: str, words: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Do an operation with the option changed that the words say.

    Raises:
        KeyError: It has no such option on what it is given now.
    """
    options = _options(name, func, args, kwargs, func(*args, **kwargs))
    for own, run in options:
        if own == words:
            return run()
    raise KeyError(words)


def _options(name: str, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Options:
    yield from _options_of_kind(name, args, kwargs, result)
    if name in _CHOICES:
        yield from _choice_options(name, func, args, kwargs)
    yield from function_options(name, args, kwargs, result)
    yield from index_options(name, args, result)
    yield from layout_options(name, func, args, kwargs, result)
    if name in _REPEATED and _is_alike(args[0] if args else None, result):
        yield "done twice", lambda: func(result, *args[1:], **kwargs)


def _is_alike(x: Any, result: Any) -> bool:
    """Whether an operation keeps shape and dtype of floats, so that it can be done once more."""
    if not isinstance(x, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return result.is_floating_point() and (x.shape, x.dtype) == (result.shape, result.dtype)


def _options_of_kind(name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> Options:
    if not args or not isinstance(args[0], torch.Tensor) or not isinstance(result, torch.Tensor):
        return
    if name in _CONVOLUTIONS:
        yield from _convolution_options(_CONVOLUTIONS[name], args, kwargs, result)
    elif name in _REDUCTIONS:
        yield from _reduction_options(name, args, kwargs)
    elif name in _POOLS:
        other: Callable[..., Any] = getattr(functional, _POOLS[name])
        yield "largest ones", lambda: other(*args, **kwargs)
    elif name in _PRODUCTS:
        yield from _number_options(args)
    elif name in _BY_NAME:
        names, options = _BY_NAME[name]
        yield from options({**dict(zip(names, args, strict=False)), **kwargs})
    if name in ("__getitem__", "mean") and result.is_floating_point():
        yield from _pooling_options(args[0], result)


def _axes_words(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def _groups_words(count: int) -> str:
    return f"{count} group{'s' if count > 1 else ''}"


def _groups_in_turn(count: int) -> str:
    return f"{count} groups of channels that lie {count} apart"


def _sets_of_axes(ndim: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, ndim + 1):
        yield from itertools.combinations(range(ndim), count)


def read_axes(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the axes that a reduction is over, counted from the first one.

    Args:
        name: Of the operation, as torch calls it.
        args: What it was given.
        kwargs: Likewise.
    """
    at = 2 if "norm" in name else 1
    dim = kwargs.get("dim", args[at] if len(args) > at else None)
    if dim is None:
        return tuple(range(args[0].ndim))
    axes = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted(axis % args[0].ndim for axis in axes))


def _reduction_options(name: str, args: Any, kwargs: Mapping[str, Any]) -> Options:
    """Reduce other axes, or groups of the last one, where the result is spread over what it is made of."""
    x, ndim = args[0], args[0].ndim
    own = read_axes(name, args, kwargs)
    if ndim > _MOST_AXES:
        return
    reduce, keeps = _REDUCTIONS[name], bool(kwargs.get("keepdim"))
    others: dict[str, Any] = {key: value for key, value in kwargs.items() if key not in ("dim", "keepdim")}
    if "norm" in name and len(args) > 1:
        others.setdefault("ord", args[1])
    if "p" in others:
        others["ord"] = others.pop("p")
    left = [size for axis, size in enumerate(x.shape) if axis not in own]
    for axes in _sets_of_axes(ndim):
        if axes != own and (keeps or left == [size for axis, size in enumerate(x.shape) if axis not in axes]):
            yield _axes_words(axes), lambda axes=axes: reduce(x, dim=axes, keepdim=keeps, **others)  # type: ignore[misc]
    if own == (ndim - 1,) and keeps:
        for count in group_counts(x.shape[-1]):
            yield (
                _groups_words(count),
                lambda count=count: reduce(x.unflatten(-1, (count, -1)), dim=-1, **others).repeat_interleave(
                    x.shape[-1] // count, -1
                ),  # type: ignore[misc]
            )
            repeats = [1] * (ndim - 1) + [x.shape[-1] // count]
            yield (
                _groups_in_turn(count),
                lambda count=count, repeats=repeats: reduce(
                    x.unflatten(-1, (-1, count)), dim=-2, **others
                ).repeat(repeats),  # type: ignore[misc]
            )


def _convolution_options(
    convolve: Callable[..., torch.Tensor], args: Any, kwargs: Mapping[str, Any], result: torch.Tensor
) -> Options:
    """Reverse or transpose taps, put them nearer or further apart, and put the padding elsewhere.

    There is as much padding as the result needs.
    """
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, x = given["weight"], given["input"]
    spatial = list(range(2, weight.ndim))
    for axes in [spatial, *([axis] for axis in spatial if len(spatial) > 1)]:
        if all(weight.shape[axis] > 1 for axis in axes):
            which = "all taps" if axes == spatial else f"taps along axis {axes[0]}"
            yield f"{which} reversed", lambda axes=axes: convolve(**{**given, "weight": weight.flip(axes)})  # type: ignore[misc]
    for one, other in itertools.combinations(spatial, 2):
        if weight.shape[one] == weight.shape[other] > 1:
            yield (
                "taps transposed",
                lambda axes=(one, other): convolve(**{**given, "weight": weight.transpose(*axes)}),  # type: ignore[misc]
            )
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        return

    def each(value: Any) -> tuple[int, ...]:
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        return values * len(spatial) if len(values) == 1 else values

    own, strides, dilations = each(padding), each(given.get("stride", 1)), each(given.get("dilation", 1))
    yield from _spacing_options(convolve, given, result, strides, dilations)
    # So much a result of this size needs; a stride may leave some of the padding unread.
    needed = [
        (result.shape[axis - x.ndim] - 1) * stride + dilation * (weight.shape[axis] - 1) + 1 - x.shape[axis]
        for axis, stride, dilation in zip(spatial, strides, dilations, strict=True)
    ]
    if x.ndim != weight.ndim or min(needed) < 0 or not max(needed):
        return

    def padded(before: Sequence[int], after: Sequence[int], mode: str = "constant") -> torch.Tensor:
        both = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
        return convolve(**{**given, "input": functional.pad(x, both, mode=mode), "padding": 0})

    half = [size // 2 for size in needed]
    for where, before in (("end", [0] * len(needed)), ("beginning", needed), ("both ends", half)):
        if tuple(before) != own:
            after = [whole - part for whole, part in zip(needed, before, strict=True)]
            yield f"padding at the {where}", lambda b=before, a=after: padded(b, a)  # type: ignore[misc]
    for size in range(max(needed) + 1):  # the same on each axis: so much before, the rest behind
        before = [min(size, whole) for whole in needed]
        if tuple(before) not in (own, tuple(needed), tuple(half)) and any(before):
            after = [whole - part for whole, part in zip(needed, before, strict=True)]
            words = f"padding of {', '.join(map(str, before))} before and {', '.join(map(str, after))} behind"
            yield words, lambda b=before, a=after: padded(b, a)  # type: ignore[misc]
    for mode in _PADDING_MODES:
        yield f"padding that is {mode}", lambda mode=mode: padded(own, own, mode)  # type: ignore[misc]


def _spacing_options(
    convolve: Callable[..., torch.Tensor],
    given: Mapping[str, Any],
    result: torch.Tensor,
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Options:
    """Put taps nearer or further apart, all axes alike, with padding at both ends that keeps the shape."""
    weight, x = given["weight"], given["input"]
    spans = [size - 1 for size in weight.shape[2:]]
    if not any(spans) or x.ndim != weight.ndim:
        return
    for spacing in _SPACINGS:
        if all(spacing == own or not span for own, span in zip(dilations, spans, strict=True)):
            continue
        sizes = zip(result.shape[2:], strides, spans, x.shape[2:], strict=True)
        needed = [(wide - 1) * by + spacing * span + 1 - size for wide, by, span, size in sizes]
        if min(needed) < 0:
            continue

        def spaced(spacing: int = spacing, needed: Sequence[int] = needed) -> torch.Tensor:
            both = [part for size in reversed(needed) for part in (size // 2, size - size // 2)]
            changed = {"input": functional.pad(x, both), "padding": 0, "dilation": spacing}
            return convolve(**{**given, **changed})

        yield f"taps {spacing} apart", spaced


def _choice_options(name: str, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Options:
    """Choose the smallest ones in the place of the largest, or sort the other way."""
    names = ("input", "k", "dim", "largest", "sorted") if name == "topk" else ("input", "dim", "descending")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    which, default = ("largest", True) if name == "topk" else ("descending", False)
    turned = {**given, which: not given.get(which, default)}
    words = "the smallest ones chosen" if name == "topk" else "the other order of choice"
    x = turned.pop("input", None)  # by position, as methods take it
    if x is not None:
        yield words, lambda: func(x, **turned)


def _number_options(args: Any) -> Options:
    """Multiply by another number than the one that is written."""
    number = next((arg for arg in args[:2] if isinstance(arg, (int, float))), None)
    if number is None or isinstance(number, bool) or not number or not math.isfinite(number):
        return
    others = {1.0, math.copysign(1.0, number), -number, number / 2, number * 2, 1 / number} - {float(number)}
    for other in sorted(others):
        yield f"{other:g} for {number:g}", lambda other=other: args[0] * other  # type: ignore[misc]


def _pooling_options(x: torch.Tensor, result: torch.Tensor) -> Options:
    """Take the first or last slice of an axis for all, their mean or largest; the last axis has channels."""
    for axis in range(1, x.ndim - 1):
        if (*x.shape[:axis], *x.shape[axis + 1 :]) == tuple(result.shape) and x.shape[axis] > 1:
            yield f"the first along axis {axis}", lambda axis=axis: x.select(axis, 0)  # type: ignore[misc]
            yield f"the last along axis {axis}", lambda axis=axis: x.select(axis, -1)  # type: ignore[misc]
            yield f"the mean along axis {axis}", lambda axis=axis: x.mean(axis)  # type: ignore[misc]
            yield f"the largest along axis {axis}", lambda axis=axis: x.amax(axis)  # type: ignore[misc]


def _batch_norm_options(given: dict[str, Any]) -> Options:
    if given.get("training") or given.get("running_var") is None:
        return
    others = {**given, "running_mean": None, "running_var": None, "training": True}
    yield "statistics of the batch", lambda: functional.batch_norm(**others)
    shape = [1, -1, *[1] * (given["input"].ndim - 2)]
    mean, variance = (given[name].view(shape) for name in ("running_mean", "running_var"))
    own = {name: None if given.get(name) is None else given[name].view(shape) for name in ("weight", "bias")}
    yield from _statistics_options({**given, **own}, mean, variance)


def _statistics_options(given: dict[str, Any], mean: torch.Tensor, variance: torch.Tensor) -> Options:
    """Take a step of a norm away, or divide by something else; mean and variance as they are spread over it.

    A weight, or a bias, may also be applied before the statistics are.
    """
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    eps = given.get("eps", 1e-5)
    scale = torch.rsqrt(variance + eps)

    def affine(y: torch.Tensor, *, has_weight: bool = True, has_bias: bool = True) -> torch.Tensor:
        y = y if weight is None or not has_weight else y * weight
        return y if bias is None or not has_bias else y + bias

    yield "division by the variance, and not by its root", lambda: affine((x - mean) * scale**2)
    yield "multiplication by the deviation", lambda: affine((x - mean) / scale)
    yield "no division by the deviation", lambda: affine(x - mean)
    yield "the mean left in", lambda: affine(x * scale)
    yield "the mean taken off behind the division", lambda: affine(x * scale - mean)
    yield "eps added to the deviation", lambda: affine((x - mean) / (variance.sqrt() + eps))
    if weight is not None:
        yield "no weight of the norm", lambda: affine((x - mean) * scale, has_weight=False)
        yield "one more than the weight of the norm", lambda: affine((x - mean) * scale * (1 + 1 / weight))
    if bias is not None:
        yield "no bias of the norm", lambda: affine((x - mean) * scale, has_bias=False)


def _group_norm_options(given: dict[str, Any]) -> Options:
    """Take other groups, neighbours or channels that lie apart, or a step of the norm away."""
    x, own = given["input"], given["num_groups"]
    channels, eps = x.shape[1], given.get("eps", 1e-5)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    parameters = {n: None if given.get(n) is None else given[n].view(shape) for n in ("weight", "bias")}

    def in_turn(count: int) -> torch.Tensor:
        size = x.shape[2:]
        turned = x.reshape(len(x), -1, count, *size).transpose(1, 2).reshape(x.shape)
        normed = functional.group_norm(turned, count, eps=eps)
        y: torch.Tensor = normed.reshape(len(x), count, -1, *size).transpose(1, 2).reshape(x.shape)
        y = y if parameters["weight"] is None else y * parameters["weight"]
        return y if parameters["bias"] is None else y + parameters["bias"]

    for count in dict.fromkeys((1, *group_counts(channels), channels)):
        if count != own:
            yield _groups_words(count), lambda n=count: functional.group_norm(**{**given, "num_groups": n})  # type: ignore[misc]
    for count in dict.fromkeys((own, *group_counts(channels))):
        if 1 < count < channels:
            yield _groups_in_turn(count), lambda n=count: in_turn(n)  # type: ignore[misc]
    variance, mean = torch.var_mean(x.unflatten(1, (own, -1)).flatten(2), 2, correction=0)
    mean, variance = (
        y.repeat_interleave(channels // own, 1).view(len(x), channels, *shape[2:]) for y in (mean, variance)
    )
    yield from _statistics_options({**given, **parameters}, mean, variance)


def _layer_norm_options(given: dict[str, Any]) -> Options:
    """Take mean and variance over other axes, or groups of the last one; weight and bias stay as they are."""
    x = given["input"]
    own = tuple(range(x.ndim - len(given["normalized_shape"]), x.ndim))

    def affine(normed: torch.Tensor) -> torch.Tensor:
        weight, bias = given.get("weight"), given.get("bias")
        normed = normed if weight is None else normed * weight
        return normed if bias is None else normed + bias

    def normed(y: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        variance, mean = torch.var_mean(y, axes, correction=0, keepdim=True)
        return (y - mean) * torch.rsqrt(variance + given.get("eps", 1e-5))

    variance, mean = torch.var_mean(x, own, correction=0, keepdim=True)
    yield from _statistics_options(given, mean, variance)
    if x.ndim <= _MOST_AXES:
        for axes in _sets_of_axes(x.ndim):
            if axes != own:
                yield _axes_words(axes), lambda axes=axes: affine(normed(x, axes))  # type: ignore[misc]
    if len(own) == 1:
        for count in group_counts(x.shape[-1]):
            yield (
                _groups_words(count),
                lambda n=count: affine(normed(x.unflatten(-1, (n, -1)), (-1,)).flatten(-2)),  # type: ignore[misc]
            )
            yield (
                _groups_in_turn(count),
                lambda n=count: affine(normed(x.unflatten(-1, (-1, n)), (-2,)).flatten(-2)),  # type: ignore[misc]
            )


def _weight_norm_options(given: dict[str, Any]) -> Options:
    size, direction = given["g"], given["v"]
    own = tuple(axis for axis in range(direction.ndim) if axis != given.get("dim", 0) % direction.ndim)
    for axes in _sets_of_axes(direction.ndim):
        if axes != own:
            yield (
                _axes_words(axes),
                lambda axes=axes: (
                    size * direction / torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
                ),  # type: ignore[misc]
            )


def _interpolation_options(given: dict[str, Any]) -> Options:
    mode, is_aligned = given.get("mode", "nearest"), bool(given.get("align_corners"))
    for other in _MODES.get(given["input"].ndim, ()):
        for aligned in (False, True) if "linear" in other or "cubic" in other else (None,):
            if other != mode or (aligned is not None and aligned != is_aligned):
                words = f"{other} interpolation"
                if aligned:
                    words += " of aligned corners"
                elif is_aligned and aligned is not None:
                    words += " of corners that are not aligned"
                options = {**given, "mode": other, "align_corners": aligned}
                yield words, lambda options=options: functional.interpolate(**options)  # type: ignore[misc]


def _roll_options(given: dict[str, Any]) -> Options:
    shifts = given["shifts"]
    back = tuple(-by for by in shifts) if isinstance(shifts, (tuple, list)) else -shifts
    yield "the other way", lambda: torch.roll(**{**given, "shifts": back})


def _pad_options(given: dict[str, Any]) -> Options:
    """Pad at the other end, or with what the tensor holds: around, its border, or mirrored at that."""
    pad, x = list(given["pad"]), given["input"]
    swapped = [size for at in range(0, len(pad), 2) for size in (pad[at + 1], pad[at])]
    if swapped != pad:
        yield "padding at the other end", lambda: functional.pad(**{**given, "pad": swapped})
    if given.get("mode", "constant") != "constant":
        return

    def index(places: torch.Tensor, size: int, mode: str) -> torch.Tensor:
        if mode == "circular":
            return torch.remainder(places, size)
        if mode == "reflect":
            places = (places.abs() % (2 * size - 2)) if size > 1 else places * 0
            return torch.where(places < size, places, 2 * size - 2 - places)
        return places.clamp(0, size - 1)

    def filled(mode: str) -> torch.Tensor:
        y: torch.Tensor = x
        for at in range(0, len(pad), 2):
            axis, (before, behind) = x.ndim - 1 - at // 2, pad[at : at + 2]
            if before or behind:
                size = x.shape[axis]
                places = torch.arange(-before, size + behind, device=x.device)
                y = y.index_select(axis, index(places, size, mode))
        return y

    for mode in _PADDING_MODES:
        yield f"padding that is {mode}", lambda mode=mode: filled(mode)  # type: ignore[misc]


def _attention_options(given: dict[str, Any]) -> Options:
    """Round operands; leave the slot of the newest key, value or both as the one before it, or empty.

    Where a cache holds keys and values of earlier calls, the new ones may also lie a slot before theirs.
    """
    for names in (("query",), ("key",), ("value",), ("key", "value"), ("query", "key")):
        for dtype in (torch.bfloat16, torch.float16):
            if given["query"].dtype == torch.float32:
                rounded = {**given, **{name: given[name].to(dtype).to(given[name].dtype) for name in names}}
                words = f"{' and '.join(names)} rounded to {str(dtype).removeprefix('torch.')}"
                yield words, lambda options=rounded: functional.scaled_dot_product_attention(**options)  # type: ignore[misc]
    yield from _extent_options(given)
    yield from _repetition_options(given)
    if given["query"].shape[-2] >= given["key"].shape[-2] or given["key"].shape[-2] < 2:
        return
    for names in (("key",), ("value",), ("key", "value")):
        for what, part in (("that of the token before", slice(-2, -1)), ("empty", None)):

            def attend(names: Sequence[str] = names, part: slice | None = part) -> torch.Tensor:
                stale = dict(given)
                for name in names:
                    x = given[name]
                    last = torch.zeros_like(x[..., -1:, :]) if part is None else x[..., part, :]
                    stale[name] = torch.cat((x[..., :-1, :], last), -2)
                return functional.scaled_dot_product_attention(**stale)

            yield f"the newest {' and '.join(names)} {what}", attend
        count = given["query"].shape[-2]
        if count < given["key"].shape[-2]:

            def attend_early(names: Sequence[str] = names, count: int = count) -> torch.Tensor:
                early = dict(given)
                for name in names:
                    x = given[name]
                    parts = x[..., : -count - 1, :], x[..., -count:, :], torch.zeros_like(x[..., -1:, :])
                    early[name] = torch.cat(parts, -2)
                return functional.scaled_dot_product_attention(**early)

            yield f"the newest {' and '.join(names)} written one slot early", attend_early


def _extent_options(given: dict[str, Any]) -> Options:
    """Look at no mask, look back alone, or both ways."""
    is_causal, mask = bool(given.get("is_causal")), given.get("attn_mask")
    if is_causal or mask is not None:
        whole = {**given, "is_causal": False, "attn_mask": None}
        words = "attention that sees all keys, without a mask"
        yield words, lambda: functional.scaled_dot_product_attention(**whole)
    if not is_causal and given["query"].shape[-2] == given["key"].shape[-2] > 1:
        back = {**given, "is_causal": True, "attn_mask": None}
        words = "attention that is causal" + (", without its mask" if mask is not None else "")
        yield words, lambda: functional.scaled_dot_product_attention(**back)


def _repetition_options(given: dict[str, Any]) -> Options:
    """Repeat heads of keys, of values, or of both in turn, where each of them has to be."""
    if given["query"].ndim != 4 or not given.get("enable_gqa"):
        return
    heads, own = given["query"].shape[1], given["key"].shape[1]
    if not 1 < own < heads:
        return
    for names in (("key", "value"), ("key",), ("value",)):

        def attend(names: Sequence[str] = names) -> torch.Tensor:
            repeated = {
                name: x.repeat(1, heads // own, 1, 1)
                if name in names
                else x.repeat_interleave(heads // own, 1)
                for name in ("key", "value")
                for x in [given[name]]
            }
            return functional.scaled_dot_product_attention(**{**given, **repeated, "enable_gqa": False})

        what = " and ".join(f"{name}s" for name in names)
        yield f"heads of {what} repeated in turn, and not each of them", attend


_NORM_NAMES: Final = ("input", "normalized_shape", "weight", "bias", "eps")
_BY_NAME: Final[Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any]], Options]]]] = {
    "batch_norm": (
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        _batch_norm_options,
    ),
    "group_norm": (("input", "num_groups", "weight", "bias", "eps"), _group_norm_options),
    "layer_norm": (_NORM_NAMES, _layer_norm_options),
    "_weight_norm": (("v", "g", "dim"), _weight_norm_options),
    "interpolate": (
        ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"),
        _interpolation_options,
    ),
    "roll": (("input", "shifts", "dims"), _roll_options),
    "pad": (("input", "pad", "mode", "value"), _pad_options),
    "scaled_dot_product_attention": (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        _attention_options,
    ),
}
