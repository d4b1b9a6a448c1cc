"""Conversions to Core AI: ten with one mistake, five that are right; each with its reference in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from transformers.models.llama import modeling_llama

from tests.coreai import conversion, models, ports

Kind = Literal[
    "activation",
    "bias",
    "mask",
    "norm_eps",
    "eps_dtype",
    "quantisation",
    "rope",
    "scale",
    "softmax_axis",
    "transposition",
]
Precision = Literal["float32", "float16", "int8"]
Source = nn.Module | ExportedProgram

LLAMA: Final = Path(modeling_llama.__file__)
MODELS: Final = Path(models.__file__)
PORTS: Final = Path(ports.__file__)


@dataclass(frozen=True)
class Line:
    """A line of a source, by a piece of its text that no other line of the file has."""

    file: Path
    text: str

    @property
    def number(self) -> int:
        """Counted from 1."""
        (number,) = (i for i, line in enumerate(self.file.read_text().splitlines(), 1) if self.text in line)
        return number


@dataclass(frozen=True)
class Guilty:
    """Where a mistake is.

    Attributes:
        module: Path of the module whose own computation is wrong.
        op: Operation of the converted program that gives the wrong value.
        nodes: Names of nodes of the converted program that are right answers: the wrong operation, and
            those of the same call through which it goes wrong.
        counterparts: Names of nodes of the reference's program that compute what is wrong.
        line: Line of the source at which the operation is called.
        carriers: Names of nodes of the converted program in whose target values the mistake is first seen,
            if Core AI fuses the wrong operation away or has another value in its place.
    """

    module: str
    op: str
    nodes: tuple[str, ...]
    counterparts: tuple[str, ...]
    line: Line
    carriers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """A model as it is and as it is given to the converter.

    Attributes:
        name: Of the entry.
        model: A key of `models.MODELS`.
        convert: Makes the source of the conversion of the reference, which it may change.
        precision: Of the conversion's arithmetic, or of its weights if these are coarser.
    """

    name: str
    model: str
    convert: Callable[[nn.Module], Source]
    precision: Precision

    def reference(self) -> nn.Module:
        """In float32."""
        return models.make(self.model)

    def source(self) -> Source:
        """What the converter is given, a module or a program."""
        return self.convert(self.reference())

    def reference_inputs(self) -> models.Inputs:
        return models.make_inputs(self.model)

    def inputs(self) -> models.Inputs:
        """For the conversion: equal in value to those of the reference."""
        dtype = torch.float16 if self.precision == "float16" else torch.float32
        values = self.reference_inputs()
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in values.items()}

    def reference_program(self) -> ExportedProgram:
        return conversion.exported(self.reference(), self.reference_inputs())

    def program(self) -> ExportedProgram:
        """The source, exported if it is a module."""
        source = self.source()
        return source if isinstance(source, ExportedProgram) else conversion.exported(source, self.inputs())


@dataclass(frozen=True)
class Mistake(Conversion):
    """A conversion with one mistake.

    Attributes:
        kind: What is wrong.
        guilty: Where.
        correctly: Makes the source of the same conversion without the mistake.
    """

    kind: Kind
    guilty: Guilty
    correctly: Callable[[nn.Module], nn.Module]

    def without(self) -> Conversion:
        """The same conversion without the mistake."""
        return Conversion(f"{self.model} in {self.precision}", self.model, self.correctly, self.precision)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def in_program(
    model: str, change: Callable[[ExportedProgram], ExportedProgram]
) -> Callable[[nn.Module], Source]:
    """Change the exported program of a model, not its module."""
    return lambda module: change(conversion.exported(module, models.make_inputs(model)))


def recast(site: str, port: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: ports.recast(model, site, port)


def fused(model: nn.Module) -> nn.Module:
    for i in range(2):
        ports.recast(model, f"layers.{i}", ports.FusedAttention)
    return model


MISTAKES: Final = (
    Mistake(
        "gelu by tanh",
        "mlp",
        recast("blocks.1", ports.BlockWithTanh),
        "float32",
        kind="activation",
        guilty=Guilty(
            module="blocks.1",
            op="aten.gelu.default",
            nodes=("gelu_1",),
            counterparts=("gelu_1",),
            line=Line(PORTS, "# line: gelu by tanh"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "epsilon of a layer norm ten times too large",
        "mlp",
        ports.other_epsilon,
        "float32",
        kind="norm_eps",
        guilty=Guilty(
            module="blocks.0.norm",
            op="aten.native_layer_norm.default",
            nodes=("native_layer_norm", "getitem"),
            counterparts=("native_layer_norm", "getitem"),
            line=Line(MODELS, "# line: norm of a block"),
            carriers=("addmm",),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "scores scaled by the width of the model",
        "llama",
        ports.scaled_by_the_width,
        "float32",
        kind="scale",
        guilty=Guilty(
            module="model.layers.1.self_attn",
            op="aten.mul.Tensor",
            nodes=("mul_19",),
            counterparts=("mul_19",),
            line=Line(LLAMA, "attn_output, attn_weights = attention_interface("),
            carriers=("_softmax_1",),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "square weight transposed",
        "llama",
        in_program("llama", ports.transposed),
        "float32",
        kind="transposition",
        guilty=Guilty(
            module="model.layers.0.self_attn.o_proj",
            op="aten.mm.default",
            nodes=("mm_3", "permute_8", "view_19"),
            counterparts=("mm_3", "permute_8", "view_19"),
            line=Line(LLAMA, "attn_output = self.o_proj(attn_output)"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "softmax over queries",
        "decoder",
        recast("layers.1", ports.SoftmaxOverQueries),
        "float32",
        kind="softmax_axis",
        guilty=Guilty(
            module="layers.1",
            op="aten._softmax.default",
            nodes=("_softmax_1",),
            counterparts=("_softmax_1",),
            line=Line(PORTS, "# line: softmax over queries"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "bias of a convolution dropped",
        "convnet",
        in_program("convnet", ports.without_bias),
        "float32",
        kind="bias",
        guilty=Guilty(
            module="conv2",
            op="aten.convolution.default",
            nodes=("convolution_1",),
            counterparts=("convolution_1",),
            line=Line(MODELS, "# line: second convolution"),
            carriers=("_native_batch_norm_legit_no_training_1", "getitem_3"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "rotation with the other sign",
        "llama",
        recast("model.layers.1.self_attn", ports.RotatedBackwards),
        "float32",
        kind="rope",
        guilty=Guilty(
            module="model.layers.1.self_attn",
            op="aten.cat.default",
            nodes=("cat_4", "neg_2", "cat_5", "neg_3"),
            counterparts=("cat_4", "neg_2", "cat_5", "neg_3"),
            line=Line(PORTS, "# line: sign of the rotation"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "mask that leaks",
        "padded decoder",
        recast("layers.0", ports.LeakyMask),
        "float32",
        kind="mask",
        guilty=Guilty(
            module="layers.0",
            op="aten.where.self",
            nodes=("where", "scalar_tensor"),
            counterparts=("where", "scalar_tensor"),
            line=Line(PORTS, "# line: mask that leaks"),
        ),
        correctly=as_it_is,
    ),
    Mistake(
        "epsilon cast to float16",
        "rms",
        ports.epsilon_cast,
        "float16",
        kind="eps_dtype",
        guilty=Guilty(
            module="layers.0.norm",
            op="aten.add.Tensor",
            nodes=("add",),
            counterparts=("add",),
            line=Line(PORTS, "# line: epsilon from a buffer"),
        ),
        correctly=ports.halved,
    ),
    Mistake(
        "int8 rows with the scale of the tensor",
        "llama",
        ports.one_scale_of_the_tensor,
        "int8",
        kind="quantisation",
        guilty=Guilty(
            module="model.layers.1.mlp.up_proj",
            op="aten.mul.Tensor",
            nodes=("mul_34", "permute_22", "mm_12", "view_49"),
            counterparts=("mm_12", "permute_22", "view_49"),
            line=Line(PORTS, "# line: dequantisation"),
            carriers=("mul_35",),
        ),
        correctly=ports.quantised,
    ),
)
CORRECT: Final = (
    Conversion("llama in float32", "llama", as_it_is, "float32"),
    Conversion("llama in float16", "llama", ports.halved, "float16"),
    Conversion("llama with int8 weights", "llama", ports.quantised, "int8"),
    Conversion("batch norms folded", "convnet", ports.folded, "float32"),
    Conversion("attention fused", "padded decoder", fused, "float32"),
)
