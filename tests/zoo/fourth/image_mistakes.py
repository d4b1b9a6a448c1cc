"""Mistakes in the ports of EfficientNet, BEiT, DPT; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fourth.images import BeitPort, Cell, DptPort, EfficientPort, Seer
from tests.zoo.fourth.parts import together
from tests.zoo.planting import with_tensors, with_values
from tests.zoo.third.parts import having

BLOCKS: Final = range(5)
_BLOCK: Final = "efficientnet.encoder.blocks"


def eps_of_torch(port: Any) -> None:
    for module in port.modules():
        if isinstance(module, Cell):
            module.eps = 1e-5


def relu(_: Any, x: Tensor) -> Tensor:
    return x.relu()


_NORMS: Final = (
    "efficientnet.embeddings.batchnorm",
    "efficientnet.encoder.top_bn",
    *(f"{_BLOCK}.{at}.depthwise_conv.depthwise_norm" for at in BLOCKS),
    *(f"{_BLOCK}.{at}.projection.project_bn" for at in BLOCKS),
    *(f"{_BLOCK}.{at}.expansion.expand_bn" for at in BLOCKS[1:]),
)
_EXCITED: Final = tuple(f"{_BLOCK}.{at}.squeeze_excite{end}" for at in BLOCKS for end in (".act_reduce", ""))
_STEM: Final = tuple(f"efficientnet.embeddings{end}" for end in (".padding", ".convolution", ""))
_STRIDED: Final = tuple(
    f"{_BLOCK}.1.depthwise_conv{end}" for end in (".depthwise_conv_pad", ".depthwise_conv", "")
)

EFFICIENT: Final = (
    PortedMistake(
        "efficientnet_even_padding",
        "efficientnet",
        "efficientnet.embeddings.convolution",
        "padding",
        together(
            with_values("stem", pads=(1, 1, 1, 1)),
            with_values("blocks.1.each", pads=(1, 1, 1, 1)),
        ),
        also=(*_STEM, *_STRIDED),
        also_kinds=("shift",),
        port=EfficientPort,
        in_words="strided convolutions are padded on all sides, not on the right and below only",
        words=("pad", "shift"),
    ),
    PortedMistake(
        "efficientnet_eps_of_torch",
        "efficientnet",
        "efficientnet.embeddings.batchnorm",
        "norm_eps",
        eps_of_torch,
        also=_NORMS,
        port=EfficientPort,
        in_words="1e-5, the default, in the place of 1e-3 in the norms over batches",
        words=("eps",),
    ),
    PortedMistake(
        "efficientnet_excited_by_relu",
        "efficientnet",
        f"{_BLOCK}.0.squeeze_excite.act_reduce",
        "activation",
        having(*(f"blocks.{at}.excite" for at in BLOCKS), act=relu),
        also=_EXCITED,
        port=EfficientPort,
        in_words="ReLU in the place of swish where channels are squeezed",
        words=("activation", "relu", "silu", "swish"),
    ),
    PortedMistake(
        "efficientnet_block_not_added",
        "efficientnet",
        f"{_BLOCK}.2.projection",
        "residual",
        with_values("blocks.2", adds=False),
        also=(f"{_BLOCK}.2",),
        port=EfficientPort,
        in_words="the second block of a stage does not add what it is given",
        words=("residual", "added", "skip"),
    ),
)


def transposed_slots(self: Any) -> Tensor:
    return Seer.slots(self).T


def mean_of_all(_: Any, x: Tensor) -> Tensor:
    return x.mean(1)


def bias_of_keys(bias: Tensor) -> Tensor:
    q, k, v = bias.chunk(3)
    return torch.cat((q, v, k))


def gain_of_attention(port: Any) -> None:
    block = port.blocks[1]
    block.gain_feed = block.gain_see


_PAIRS: Final = tuple(
    f"beit.layers.{at}{end}" for at in range(3) for end in (".relative_position_bias", ".attention", "")
)

BEIT: Final = (
    PortedMistake(
        "beit_pairs_transposed",
        "beit",
        "beit.layers.0.relative_position_bias",
        "transposition",
        having(*(f"blocks.{at}.see" for at in range(3)), slots=transposed_slots),
        also=_PAIRS,
        also_kinds=("position", "permutation"),
        port=BeitPort,
        in_words="the bias of a query and a key is that of the key and the query",
        words=("transpos", "position", "relative", "bias"),
    ),
    PortedMistake(
        "beit_bias_of_values_on_keys",
        "beit",
        "beit.layers.1.attention.v_proj",
        "bias",
        with_tensors("blocks.1.see.qkv", bias=bias_of_keys),
        also=("beit.layers.1.attention.k_proj", "beit.layers.1.attention"),
        also_kinds=("other_weights", "order"),
        port=BeitPort,
        in_words="the bias of values was put on the keys, which have none",
        words=("bias",),
    ),
    PortedMistake(
        "beit_class_token_pooled",
        "beit",
        "beit.pooler",
        "pooling",
        having("@root", pooled=mean_of_all),
        port=BeitPort,
        in_words="the mean is taken over the class token, too",
        words=("pool", "mean", "class token", "cls"),
    ),
    PortedMistake(
        "beit_one_gain_for_both",
        "beit",
        "beit.layers.1",
        "other_weights",
        gain_of_attention,
        also_kinds=("factor",),
        port=BeitPort,
        in_words="the factors of channels after attention are used after the feed-forward, too",
        words=("weight", "parameter", "lambda", "scale", "factor", "gain"),
    ),
)


def by_areas(_: Any, x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def class_token_first(_: Any, patches: Tensor, first: Tensor) -> Tensor:
    return torch.cat((first.expand_as(patches), patches), -1)


def rectified_input_added(self: Any, x: Tensor) -> Tensor:
    x = x.relu()
    out: Tensor = x + self.two(self.one(x).relu())
    return out


def grid_by_columns(self: Any, height: int, width: int) -> Tensor:
    side = round((self.places.shape[1] - 1) ** 0.5)
    grid = self.places[:, 1:].transpose(1, 2).unflatten(-1, (side, side)).transpose(2, 3)
    grid = functional.interpolate(grid, (height, width), mode="bilinear", align_corners=False)
    return torch.cat((self.places[:, :1], grid.flatten(2).transpose(1, 2)), 1)


def a_layer_too_early(self: Any, x: Tensor) -> list[Tensor]:
    """What layers are given is taken for what they give."""
    features = []
    for block, mapped in zip(self.blocks, self.maps, strict=True):
        features.append(mapped(x))
        x = block(x)
    return features


_FUSION: Final = tuple(f"neck.fusion_stage.layers.{at}" for at in range(4))
_READOUT: Final = "neck.reassemble_stage.readout_projects.1"

DPT: Final = (
    PortedMistake(
        "dpt_corners_not_aligned",
        "dpt",
        _FUSION[0],
        "interpolation",
        having(*(f"fuse.{at}" for at in range(4)), grown=by_areas),
        also=_FUSION,
        port=DptPort,
        in_words="maps are made larger without corners aligned",
        words=("interpol", "align", "corner", "resiz", "upsampl"),
    ),
    PortedMistake(
        "dpt_class_token_first",
        "dpt",
        "neck.reassemble_stage",
        "permutation",
        having("maps.1", joined=class_token_first),
        also=(_READOUT, f"{_READOUT}.0"),
        also_kinds=("order", "wiring"),
        port=DptPort,
        in_words="the class token is joined before the patch, not after it",
        words=("permut", "order", "swap", "concat", "halves"),
    ),
    PortedMistake(
        "dpt_rectified_input_added",
        "dpt",
        "neck.fusion_stage.layers.2.residual_layer2",
        "residual",
        having("fuse.2.main", forward=rectified_input_added),
        also=("neck.fusion_stage.layers.2.residual_layer2.activation1",),
        also_kinds=("activation", "wiring"),
        port=DptPort,
        in_words="ReLU works in place, so that its result is added, not the input",
        words=("residual", "relu", "in place", "in-place", "added"),
    ),
    PortedMistake(
        "dpt_grid_by_columns",
        "dpt",
        "dpt.embeddings",
        "transposition",
        having("@root", grid=grid_by_columns),
        also_kinds=("position", "permutation"),
        port=DptPort,
        in_words="the grid of places is transposed before it is resized",
        words=("transpos", "position", "permut"),
    ),
    PortedMistake(
        "dpt_maps_of_a_layer_too_early",
        "dpt",
        "@root",
        "wiring",
        having("@root", features=a_layer_too_early),
        also=("neck",),
        also_kinds=("shift",),
        port=DptPort,
        in_words="maps are made of the states before each layer, not after it",
        words=("wiring", "wired", "layer", "input", "index"),
    ),
)

MISTAKES: Final = (*EFFICIENT, *BEIT, *DPT)
