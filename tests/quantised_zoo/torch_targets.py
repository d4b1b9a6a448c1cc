"""Targets in torch: torchao, torch.ao, and packed layers.

A mistake is planted in one layer of a target that is right otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.ao import quantization as torch_ao
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from tensorcap.workload import Workload
from tests.quantised_zoo import models
from tests.quantised_zoo.entry import Entry
from tests.quantised_zoo.layers import (
    FP4,
    IN_ORDER,
    AWQLinear,
    CorrectedLinear,
    Float8Linear,
    GPTQLinear,
    Int8DynamicLinear,
    Int8Linear,
    Maker,
    MXFP4Linear,
    OutlierLinear,
    RotatedLinear,
    SmoothLinear,
    awq,
    corrected,
    float8,
    gptq,
    int8,
    mxfp4,
    rotated,
    smooth,
    with_outliers,
)

UP: Final = "model.layers.1.mlp.up_proj"
DOWN: Final = "model.layers.1.mlp.down_proj"
Q: Final = "model.layers.1.self_attn.q_proj"
K: Final = "model.layers.1.self_attn.k_proj"
OUT: Final = "model.layers.1.self_attn.o_proj"
NORM: Final = "model.layers.1.post_attention_layernorm"


def linears(model: Any) -> dict[str, nn.Linear]:
    """Layers of the blocks, by site; the head stays as it is."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layer" in name
    }


def inputs_of(workload: Workload) -> dict[str, Tensor]:
    """What each layer is given by 1,024 tokens of another text, `[tokens, in]`."""
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs: given.update({name: inputs[0].flatten(0, -2)})

    model: Any = workload.model
    hooks = [layer.register_forward_pre_hook(keep(name)) for name, layer in linears(model).items()]
    with torch.no_grad():
        model(input_ids=torch.randint(0, 200, (16, 64), generator=torch.Generator().manual_seed(5)))
    for hook in hooks:
        hook.remove()
    return given


def packed(
    maker: Maker,
    others: Mapping[str, Maker] | None = None,
    *,
    make: Callable[[], Workload] = models.decoder,
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> Workload:
    """A model whose layers a maker has exchanged, some of them another one; both ends may change it."""
    workload = make()
    model: Any = workload.model
    if before is not None:
        before(model)
    given = inputs_of(workload)
    for name, layer in linears(model).items():
        made = (others or {}).get(name, maker)(layer, given[name])
        model.set_submodule(name, made.eval())
    if after is not None:
        after(model)
    return workload


# --- mistakes of readers: what they unpack in another way than it was packed


class ZerosAsStored(GPTQLinear):
    zeros_less = 0


class HighBitsFirst(GPTQLinear):
    order = IN_ORDER[::-1]


class NoActOrder(GPTQLinear):
    def groups(self) -> Tensor:
        return torch.arange(self.in_features) // (self.in_features // len(self.scales))


class TwiceTheGroup(GPTQLinear):
    def groups(self) -> Tensor:
        return torch.arange(self.in_features) // (2 * self.in_features // len(self.scales))


class InOrder(AWQLinear):
    order = IN_ORDER


class NibblesSwapped(MXFP4Linear):
    low_first = False


class OneExponentOff(MXFP4Linear):
    bias_of_scales = 126


class EightAtTheEnd(MXFP4Linear):
    table = (*FP4[:-1], 8.0)


class ReadAsE5M2(Float8Linear):
    def values(self) -> Tensor:
        return self.weight.view(torch.float8_e5m2).float()


class GridTransposed(Float8Linear):
    def factors(self) -> Tensor:
        return self.weight_scale_inv.T


class ReadUnsigned(Int8Linear):
    def dequantised(self) -> Tensor:
        return (self.weight.view(torch.uint8).float() - self.weight_zero_point.float()) * self.weight_scale


class NoZeroPoint(Int8Linear):
    def dequantised(self) -> Tensor:
        return self.weight.float() * self.weight_scale


class ScalesAlongInputs(Int8Linear):
    def dequantised(self) -> Tensor:
        return self.weight.float() * self.weight_scale.T


class ScalesRolled(Int8Linear):
    def dequantised(self) -> Tensor:
        return self.weight.float() * self.weight_scale.roll(1, 0)


class Transposed(Int8Linear):
    def dequantised(self) -> Tensor:
        return super().dequantised().T


class StepOfTheTokenBefore(Int8DynamicLinear):
    def step(self, x: Tensor) -> Tensor:
        return super().step(x).roll(1, -2)


class StepOfTheFirstToken(Int8DynamicLinear):
    def step(self, x: Tensor) -> Tensor:
        return super().step(x)[..., :1, :].expand(*x.shape[:-1], 1)


class FourBitsOfInputs(Int8DynamicLinear):
    levels = 7


class NotSmoothed(SmoothLinear):
    def forward(self, x: Tensor) -> Tensor:
        return Int8DynamicLinear.forward(self, x)


class NotRotated(RotatedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return Int8Linear.forward(self, x)


class OutliersForgotten(OutlierLinear):
    def forward(self, x: Tensor) -> Tensor:
        return Int8Linear.forward(self, x)


class CorrectionSubtracted(CorrectedLinear):
    sign = -1.0


# --- mistakes of writers: what they round or store in another way


def _numbers(change: Callable[[Any], None]) -> Maker:
    """As int8, with a change of the layer that was made."""

    def make(linear: nn.Linear, x: Tensor) -> nn.Module:
        made = int8(linear, x)
        change(made)
        return made

    return make


def _truncate(linear: nn.Linear, x: Tensor) -> Any:
    made: Any = int8(linear, x)
    made.weight = (linear.weight.detach() / made.weight_scale).trunc().to(torch.int8)
    return made


def _clip_one_channel(linear: nn.Linear, x: Tensor) -> Any:
    made: Any = int8(linear, x)
    made.weight_scale[9] /= 3
    made.weight[9] = (
        (linear.weight.detach()[9] / made.weight_scale[9]).round().clamp(-127, 127).to(torch.int8)
    )
    return made


def _drop_bias(made: Any) -> None:
    made.bias = None


def _round_bias(made: Any) -> None:
    """The bias in int8 with the scale of the weight, as nobody should."""
    step = made.weight_scale[:, 0]
    made.bias = nn.Parameter((made.bias.detach() / step).round().clamp(-127, 127) * step.roll(1))


def _exchange(model: Any, *names: str, buffers: tuple[str, ...]) -> None:
    """Give the first of two layers the buffers of the second."""
    first, second = (model.get_submodule(name) for name in names)
    for name in buffers:
        setattr(first, name, getattr(second, name).clone())


def _twice(linear: nn.Linear, x: Tensor) -> nn.Module:
    """Rounded to int8 first, then to int4, as of a checkpoint that was int8 already."""
    first: Any = int8(linear, x)
    again = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    again.weight = nn.Parameter(first.dequantised())
    again.bias = linear.bias
    return awq(again, x)


def _fold(model: Any, *, norm: str = NORM, times: int = 1, of: str = NORM) -> None:
    """Scales of AWQ: weights behind a norm times them, the norm over them, as often as `times` says."""
    scale = model.get_submodule(norm).weight.detach().abs().clamp(min=0.1).sqrt()
    other = model.get_submodule(of).weight.detach().abs().clamp(min=0.1).sqrt()
    with torch.no_grad():
        for name in ("gate_proj", "up_proj"):
            model.get_submodule(norm.replace("post_attention_layernorm", f"mlp.{name}")).weight.mul_(scale)
        model.get_submodule(norm).weight.div_(other**times)


def _torchao(config: Callable[[], Any], after: Callable[[Any], None] | None = None) -> Workload:
    from torchao.quantization import quantize_

    workload = models.decoder()
    model: Any = workload.model
    quantize_(
        model, config(), filter_fn=lambda module, name: isinstance(module, nn.Linear) and ".layers." in name
    )
    if after is not None:
        after(model)
    return workload


def _ao(name: str, **options: Any) -> Any:
    import torchao.quantization

    return getattr(torchao.quantization, name)(**options)


def _int4_groups() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(weight_dtype=getattr(torch, "int4"), granularity=PerGroup(32))  # noqa: B009  # no stub has it


def _other_numbers(model: Any) -> None:
    """The numbers of the layer before, with scales of its own."""
    own, other = (model.get_submodule(name).weight for name in (UP, UP.replace("1", "0")))
    own.qdata = other.qdata.clone()


def _other_scales(model: Any) -> None:
    own, other = (model.get_submodule(name).weight for name in (UP, UP.replace("1", "0")))
    own.scale = other.scale.clone()


def _dynamic(after: Callable[[Any], None] | None = None) -> Workload:
    workload = models.encoder()
    quantise: Any = torch_ao.quantize_dynamic
    model = quantise(workload.model, {nn.Linear}, dtype=torch.qint8)
    if after is not None:
        after(model)
    return Workload(model, workload.inputs)


QUERY: Final = "encoder.layer.1.attention.self.query"


def _dynamic_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """A dynamic layer of torch.ao with other numbers."""

    def plant(model: Any) -> None:
        layer = model.get_submodule(QUERY)
        weight, bias = layer._weight_bias()
        layer.set_weight_bias(change(weight), bias)

    return plant


def _shifted(weight: Tensor) -> Tensor:
    numbers = weight.int_repr()
    return torch._make_per_tensor_quantized_tensor(numbers, weight.q_scale(), 3)


def _wrapped(weight: Tensor) -> Tensor:
    """A scale that is one number too small, and what is beyond it wraps around."""
    scale = weight.q_scale() * 0.97
    numbers = (weight.dequantize() / scale).round().to(torch.int32).to(torch.int8)
    return torch._make_per_tensor_quantized_tensor(numbers, scale, 0)


def _static(after: Callable[[Any], None] | None = None, *, calibrate_times: float = 1.0) -> Workload:
    workload = models.network()
    model: Any = copy.deepcopy(workload.model)
    torch.backends.quantized.engine = "x86"
    prepared = prepare_fx(model, torch_ao.get_default_qconfig_mapping("x86"), (models.images(0),))
    with torch.no_grad():
        for seed in range(8):
            prepared(models.images(seed) * calibrate_times)
    converted = convert_fx(prepared)
    if after is not None:
        after(converted)
    return Workload(converted, workload.inputs)


def _range_of_the_stem(model: Any) -> None:
    model.block1.conv2.scale, model.block1.conv2.zero_point = model.stem.scale / 3, model.stem.zero_point


def _conv_weight(change: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        layer = model.block1.conv2
        layer.set_weight_bias(change(layer), layer.bias())

    return plant


def _per_channel(numbers: Tensor, scales: Tensor, zeros: Tensor, axis: int = 0) -> Tensor:
    return torch._make_per_channel_quantized_tensor(numbers.contiguous(), scales, zeros, axis)


def _rolled_scales(layer: Any) -> Tensor:
    weight = layer.weight()
    return _per_channel(
        weight.int_repr(), weight.q_per_channel_scales().roll(1), weight.q_per_channel_zero_points()
    )


def _axes_exchanged(layer: Any) -> Tensor:
    weight = layer.weight()
    return _per_channel(
        weight.int_repr().transpose(0, 1), weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
    )


def _bias_times(factor: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        layer = model.block1.conv2
        layer.set_weight_bias(layer.weight(), (layer.bias() * factor).detach())

    return plant


def _entry(
    make: Callable[[], Workload], name: str, in_words: str, target: Callable[[], Workload], **more: Any
) -> Entry:
    def made(folder: Path) -> Workload:
        return target()

    return Entry(name, in_words, make, made, **more)


_of_decoder = partial(_entry, models.decoder)
_of_encoder = partial(_entry, models.encoder)
_of_network = partial(_entry, models.network)

RIGHT: Final = (
    _of_decoder("torchao/int8", "weights in int8", lambda: _torchao(lambda: _ao("Int8WeightOnlyConfig"))),
    _of_decoder(
        "torchao/int8-dynamic",
        "weights and activations in int8",
        lambda: _torchao(lambda: _ao("Int8DynamicActivationInt8WeightConfig")),
    ),
    _of_decoder("torchao/int4", "weights in int4, groups of 32", lambda: _torchao(_int4_groups)),
    _of_decoder(
        "torchao/float8", "weights in float8", lambda: _torchao(lambda: _ao("Float8WeightOnlyConfig"))
    ),
    _of_encoder("torch-ao/dynamic", "quantize_dynamic of a BERT", _dynamic),
    _of_network("torch-ao/static", "convert_fx of a network", _static),
    _of_decoder(
        "gptq/nearest", "GPTQ's layout, rounded to nearest", lambda: packed(partial(gptq, feedback=False))
    ),
    _of_decoder("gptq/feedback", "GPTQ with its error feedback", lambda: packed(gptq)),
    _of_decoder(
        "gptq/act-order", "GPTQ in the order of activations", lambda: packed(partial(gptq, act_order=True))
    ),
    _of_decoder("gptq/symmetric", "GPTQ without zero points", lambda: packed(partial(gptq, symmetric=True))),
    _of_decoder("awq/folded", "AWQ's scales folded into the norm before", lambda: packed(awq, before=_fold)),
    _of_decoder("awq/clipped", "ranges cut by AWQ's search", lambda: packed(partial(awq, is_searched=True))),
    _of_decoder("awq/rounded-twice", "int4 of an int8 checkpoint", lambda: packed(_twice)),
    _of_decoder("mx/mxfp4", "MXFP4", lambda: packed(mxfp4)),
    _of_decoder("fp8/blocks", "float8 with a scale for each block", lambda: packed(float8)),
    _of_encoder("int8/rows", "int8 with a scale for each row", lambda: packed(int8, make=models.encoder)),
    _of_encoder(
        "int8/tensor", "one scale, coarse", lambda: packed(partial(int8, tensor=True), make=models.encoder)
    ),
    _of_encoder(
        "int8/asymmetric",
        "with zero points",
        lambda: packed(partial(int8, symmetric=False), make=models.encoder),
    ),
    _of_decoder(
        "int8/dynamic", "inputs too, by token", lambda: packed(partial(int8, kind=Int8DynamicLinear))
    ),
    _of_decoder("int8/smooth", "SmoothQuant", lambda: packed(smooth)),
    _of_decoder("int8/rotated", "QuaRot: weights and inputs rotated", lambda: packed(rotated)),
    _of_decoder("int8/outliers", "LLM.int8: four inputs in floats", lambda: packed(with_outliers)),
    _of_decoder("awq/corrected", "LQER: what is lost is added by thin matrices", lambda: packed(corrected)),
    _of_decoder(
        "mixed/bits",
        "int8, but one layer in int4 and one in float8",
        lambda: packed(int8, {UP: awq, DOWN: float8}),
    ),
)


def _reads(
    maker: Any, kind: Callable[..., nn.Module], site: str = DOWN, **options: Any
) -> Callable[[], Workload]:
    """One layer is read otherwise than all, which are packed alike."""
    return lambda: packed(partial(maker, **options), {site: partial(maker, kind=kind, **options)})


def _encoder_reads(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], Workload]:
    return lambda: packed(
        partial(int8, **options), {QUERY: partial(int8, kind=kind, **options)}, make=models.encoder
    )


def _awq_with(**options: Any) -> Callable[[], Workload]:
    return lambda: packed(awq, before=partial(_fold, **options))


def _with_other(
    buffers: tuple[str, ...], maker: Any, first: str = UP, second: str = UP.replace("1", "0")
) -> Any:
    return lambda: packed(maker, after=lambda model: _exchange(model, first, second, buffers=buffers))


BEHIND_NORM: Final = (NORM, UP, UP.replace("up", "gate"))
MISTAKES: Final = (
    _of_decoder(
        "gptq/zeros-as-stored",
        "zero points that are stored less one are read as they are",
        _reads(gptq, ZerosAsStored),
        guilty=(DOWN,),
        words=("zero point", "zero-point"),
    ),
    _of_decoder(
        "gptq/high-bits-first",
        "the first number is taken from the high bits",
        _reads(gptq, HighBitsFirst),
        guilty=(DOWN,),
        words=("packed", "nibble", "bits first", "order of", "order in"),
    ),
    _of_decoder(
        "gptq/no-act-order",
        "g_idx is ignored",
        _reads(gptq, NoActOrder, act_order=True),
        guilty=(DOWN,),
        words=("g_idx", "act-order", "order of", "other groups", "groups are", "scales are those"),
    ),
    _of_decoder(
        "gptq/twice-the-group",
        "groups are taken for twice as large",
        _reads(gptq, TwiceTheGroup, feedback=False),
        guilty=(DOWN,),
        words=("group", "scale for 64", "blocks of 64"),
    ),
    _of_decoder(
        "awq/in-order",
        "the order of AWQ's packed outputs is ignored",
        _reads(awq, InOrder),
        guilty=(DOWN,),
        words=("packed", "nibble", "order", "permut", "rows are"),
    ),
    _of_decoder(
        "awq/not-folded",
        "the norm keeps its weight",
        _awq_with(times=0),
        guilty=BEHIND_NORM,
        words=("factor", "channel", "times a", "norm"),
    ),
    _of_decoder(
        "awq/folded-twice",
        "the norm is divided twice",
        _awq_with(times=2),
        guilty=BEHIND_NORM,
        words=("factor", "channel", "times a", "norm"),
    ),
    _of_decoder(
        "awq/folded-of-another",
        "the norm is divided by the scales of the next layer",
        _awq_with(of=NORM.replace("1", "2")),
        guilty=BEHIND_NORM,
        words=("factor", "channel", "times a", "another"),
    ),
    _of_decoder(
        "awq/correction-subtracted",
        "the thin matrices are subtracted",
        _reads(corrected, CorrectionSubtracted),
        guilty=(DOWN,),
        words=("sign", "subtract", "lora"),
    ),
    _of_decoder(
        "mx/nibbles-swapped",
        "the first value is taken from the high bits",
        _reads(mxfp4, NibblesSwapped),
        guilty=(DOWN,),
        words=("packed", "nibble", "halves", "order", "pairs", "exchanged"),
    ),
    _of_decoder(
        "mx/one-exponent-off",
        "the bias of exponents is 126",
        _reads(mxfp4, OneExponentOff),
        guilty=(DOWN,),
        words=("exponent", "factor", "times 2", "2 times", "twice", "doubled"),
    ),
    _of_decoder(
        "mx/eight-at-the-end",
        "the largest value is taken for 8, not 6",
        _reads(mxfp4, EightAtTheEnd),
        guilty=(DOWN,),
        words=("table", "largest", "8 in", "for 6", "code"),
    ),
    _of_decoder(
        "fp8/read-as-e5m2",
        "bytes of e4m3 are read as e5m2",
        _reads(float8, ReadAsE5M2),
        guilty=(DOWN,),
        words=("e5m2", "e4m3"),
    ),
    _of_decoder(
        "fp8/grid-transposed",
        "the grid of scales is transposed",
        _reads(float8, GridTransposed, OUT),
        guilty=(OUT,),
        words=("transpos", "axis", "axes"),
    ),
    _of_decoder(
        "fp8/scales-of-another",
        "scales are those of the layer before",
        _with_other(("weight_scale_inv",), float8),
        guilty=(UP,),
        words=("scales are", "another", "layers.0"),
    ),
    _of_encoder(
        "int8/read-unsigned",
        "int8 is read as uint8",
        _encoder_reads(ReadUnsigned),
        guilty=(QUERY,),
        words=("sign",),
    ),
    _of_encoder(
        "int8/no-zero-point",
        "zero points are not subtracted",
        _encoder_reads(NoZeroPoint, symmetric=False),
        guilty=(QUERY,),
        words=("zero point",),
    ),
    _of_encoder(
        "int8/scales-along-inputs",
        "scales of rows are taken for those of columns",
        _encoder_reads(ScalesAlongInputs),
        guilty=(QUERY,),
        words=("axis", "column", "inputs"),
    ),
    _of_encoder(
        "int8/scales-rolled",
        "each row has the scale of the one before",
        _encoder_reads(ScalesRolled),
        guilty=(QUERY,),
        words=("rolled", "shifted", "row behind", "row before", "rows behind", "row ahead"),
    ),
    _of_encoder(
        "int8/transposed",
        "the weight is transposed",
        _encoder_reads(Transposed),
        guilty=(QUERY,),
        words=("transpos",),
    ),
    _of_encoder(
        "int8/truncated",
        "numbers are cut, not rounded",
        lambda: packed(int8, {QUERY: _truncate}, make=models.encoder),
        guilty=(QUERY,),
        words=("truncat", "cut", "toward", "floor"),
    ),
    _of_encoder(
        "int8/wraps",
        "a scale of 1/131 of the largest is too small, and numbers wrap",
        lambda: packed(int8, {QUERY: partial(int8, top=131)}, make=models.encoder),
        guilty=(QUERY,),
        words=("wrap", "overflow", "sign"),
    ),
    _of_encoder(
        "int8/one-channel-clipped",
        "the range of one row is a third of what it should be",
        lambda: packed(int8, {QUERY: _clip_one_channel}, make=models.encoder),
        guilty=(QUERY,),
        words=("clip", "cut", "saturat", "row 9", "channel 9", "one row", "[9]"),
    ),
    _of_encoder(
        "int8/no-bias",
        "the bias is lost",
        lambda: packed(int8, {QUERY: _numbers(_drop_bias)}, make=models.encoder),
        guilty=(QUERY,),
        words=("bias",),
    ),
    _of_encoder(
        "int8/bias-rounded",
        "the bias is rounded, and read with the scales of the rows before",
        lambda: packed(int8, {QUERY: _numbers(_round_bias)}, make=models.encoder),
        guilty=(QUERY,),
        words=("bias",),
    ),
    _of_decoder(
        "int8/weight-of-another",
        "numbers and scales of the layer before",
        _with_other(("weight", "weight_scale"), int8),
        guilty=(UP,),
        words=("another", "layers.0", "other layer", "another layer"),
    ),
    _of_decoder(
        "int8/scales-of-another",
        "scales of the layer before",
        _with_other(("weight_scale",), int8),
        guilty=(UP,),
        words=("layers.0", "another layer", "other layer"),
    ),
    _of_decoder(
        "int8/gate-and-up-exchanged",
        "the weight of gate_proj in up_proj",
        _with_other(("weight", "weight_scale"), int8, UP, UP.replace("up", "gate")),
        guilty=(UP,),
        words=("gate_proj", "another", "exchanged", "swapped"),
    ),
    _of_decoder(
        "int8/step-of-the-token-before",
        "inputs are rounded with the step of the token before",
        lambda: packed(
            partial(int8, kind=Int8DynamicLinear), {DOWN: partial(int8, kind=StepOfTheTokenBefore)}
        ),
        guilty=(DOWN,),
        words=("clip", "cut", "inputs", "activations", "range"),
    ),
    _of_decoder(
        "int8/step-of-the-first-token",
        "inputs are rounded with the step of the first token",
        lambda: packed(
            partial(int8, kind=Int8DynamicLinear), {DOWN: partial(int8, kind=StepOfTheFirstToken)}
        ),
        guilty=(DOWN,),
        words=("clip", "cut", "inputs", "activations", "range"),
    ),
    _of_decoder(
        "int8/four-bits-of-inputs",
        "inputs are rounded to four bits where eight were meant",
        lambda: packed(partial(int8, kind=Int8DynamicLinear), {DOWN: partial(int8, kind=FourBitsOfInputs)}),
        guilty=(DOWN,),
        words=("inputs", "activations", "int4", "4 bits", "coarse"),
    ),
    _of_decoder(
        "int8/not-smoothed",
        "inputs are not divided by the factors of SmoothQuant",
        lambda: packed(smooth, {DOWN: partial(smooth, kind=NotSmoothed)}),
        guilty=(DOWN,),
        words=("factor", "smooth", "column", "channel"),
    ),
    _of_decoder(
        "int8/not-rotated",
        "inputs are not rotated",
        lambda: packed(rotated, {DOWN: partial(rotated, kind=NotRotated)}),
        guilty=(DOWN,),
        words=("rotat",),
    ),
    _of_decoder(
        "int8/outliers-forgotten",
        "what is in floats is not added",
        lambda: packed(with_outliers, {DOWN: partial(with_outliers, kind=OutliersForgotten)}),
        guilty=(DOWN,),
        words=("outlier", "column", "inputs", "missing", "zero"),
    ),
    _of_decoder(
        "torchao/numbers-of-another",
        "the numbers of the layer before, with scales of its own",
        lambda: _torchao(lambda: _ao("Int8WeightOnlyConfig"), _other_numbers),
        guilty=(UP,),
        words=("layers.0", "another layer", "other layer", "another"),
    ),
    _of_decoder(
        "torchao/scales-of-another",
        "scales of the layer before",
        lambda: _torchao(_int4_groups, _other_scales),
        guilty=(UP,),
        words=("layers.0", "another layer", "other layer", "scales are"),
    ),
    _of_encoder(
        "torch-ao/dynamic-zero-point",
        "the weight's zero point is 3, not 0",
        lambda: _dynamic(_dynamic_weight(_shifted)),
        guilty=(QUERY,),
        words=("zero point",),
    ),
    _of_encoder(
        "torch-ao/dynamic-wraps",
        "the scale is 3 % too small, and numbers wrap",
        lambda: _dynamic(_dynamic_weight(_wrapped)),
        guilty=(QUERY,),
        words=("wrap", "overflow", "sign"),
    ),
    _of_network(
        "torch-ao/static-range-of-another",
        "the range of another layer's result, a third of it",
        lambda: _static(_range_of_the_stem),
        guilty=("block1.conv2",),
        words=("range", "clip", "cut"),
    ),
    _of_network(
        "torch-ao/static-calibrated-on-less",
        "calibrated on images of an eighth of the contrast",
        lambda: _static(calibrate_times=0.125),
        guilty=("stem", "relu"),
        words=("range", "clip", "cut"),
    ),
    _of_network(
        "torch-ao/static-scales-rolled",
        "scales of the channel before",
        lambda: _static(_conv_weight(_rolled_scales)),
        guilty=("block1.conv2",),
        words=("rolled", "shifted", "behind", "before"),
    ),
    _of_network(
        "torch-ao/static-axes-exchanged",
        "inputs and outputs of a square kernel exchanged",
        lambda: _static(_conv_weight(_axes_exchanged)),
        guilty=("block1.conv2",),
        words=("transpos", "axes", "axis"),
    ),
    _of_network(
        "torch-ao/static-bias-scaled",
        "the bias is a half of what it should be",
        lambda: _static(_bias_times(0.5)),
        guilty=("block1.conv2",),
        words=("bias",),
    ),
)
TORCH_ENTRIES: Final = (*RIGHT, *MISTAKES)
