"""A residual network of convolutions, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils.fusion import fuse_conv_bn_eval
from transformers import ResNetConfig, ResNetForImageClassification

from tests.rewrites.catalogue import BFLOAT16, FLOAT16, Family, Run, random_model
from tests.rewrites.layers import Weights, linear_of, replace

SIZES, DEPTHS, CLASSES = (24, 32, 40), (2, 2, 1), 9
PIXELS: Final = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def model() -> Any:
    return random_model(
        ResNetForImageClassification,
        ResNetConfig,
        embedding_size=16,
        hidden_sizes=list(SIZES),
        depths=list(DEPTHS),
        layer_type="basic",
        num_labels=CLASSES,
    )


def run_of(port: Any) -> Run:
    return Run(port, {"pixel_values": PIXELS})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("resnet", reference)


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return Run(model().bfloat16(), {"pixel_values": PIXELS.bfloat16()})


@FAMILY.correct("the same in float16", tolerance=FLOAT16)
def float16() -> Run:
    return Run(model().half(), {"pixel_values": PIXELS.half()})


@FAMILY.correct("channels-last memory")
def channels_last_memory() -> Run:
    port = model().to(memory_format=torch.channels_last)
    return Run(port, {"pixel_values": PIXELS.contiguous(memory_format=torch.channels_last)})


def fold(port: Any) -> Any:
    """Put every batch norm into the convolution before it."""
    for module in list(port.modules()):
        if hasattr(module, "normalization"):
            module.convolution = fuse_conv_bn_eval(module.convolution, module.normalization)
            module.normalization = nn.Identity()
    return port


@FAMILY.correct("batch norms folded into the convolutions, an identity in their place")
def folded_batch_norms() -> Run:
    return run_of(fold(model()))


@FAMILY.correct("batch norms folded, in float16", tolerance=FLOAT16)
def folded_float16() -> Run:
    return Run(fold(model()).half(), {"pixel_values": PIXELS.half()})


class Affine(nn.Module):
    """Batch norm at inference: one scale and one offset a channel."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_var is not None
        assert norm.running_mean is not None
        scale = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
        self.register_buffer("scale", scale[:, None, None])
        self.register_buffer("offset", (norm.bias.detach() - norm.running_mean * scale)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        offset: Any = self.offset
        out: Tensor = x * scale + offset
        return out


@FAMILY.correct("frozen batch norms: a scale and an offset")
def frozen_batch_norms() -> Run:
    port = model()
    replace(port, nn.BatchNorm2d, Affine)
    return run_of(port)


@FAMILY.correct("the stem compiled")
def compiled_stem() -> Run:
    port = model()
    port.resnet.embedder = torch.compile(port.resnet.embedder, backend="eager")
    return run_of(port)


@FAMILY.correct("one image of the batch", reference_view=lambda logits: logits[1:2])
def one_image() -> Run:
    return Run(model(), {"pixel_values": PIXELS[1:2]})


def convolution_of(w: Weights, at: str, stride: int = 1) -> nn.Conv2d:
    weight = w[f"{at}.weight"]
    layer = nn.Conv2d(
        weight.shape[1], weight.shape[0], weight.shape[2], stride, weight.shape[2] // 2, bias=False
    )
    layer.weight = nn.Parameter(weight.clone())
    return layer


def batch_norm_of(w: Weights, at: str) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(len(w[f"{at}.weight"]))
    norm.load_state_dict({name: w[f"{at}.{name}"] for name in norm.state_dict()})
    return norm


class BasicBlock(nn.Module):
    def __init__(self, w: Weights, at: str, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution_of(w, f"{at}.layer.0.convolution", stride)
        self.bn1 = batch_norm_of(w, f"{at}.layer.0.normalization")
        self.conv2 = convolution_of(w, f"{at}.layer.1.convolution")
        self.bn2 = batch_norm_of(w, f"{at}.layer.1.normalization")
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if f"{at}.shortcut.convolution.weight" in w:
            self.downsample = nn.Sequential(
                convolution_of(w, f"{at}.shortcut.convolution", stride),
                batch_norm_of(w, f"{at}.shortcut.normalization"),
            )
        self.has_last_relu = True

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        result: Tensor = self.relu(out) if self.has_last_relu else out
        return result


class TorchvisionLike(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.conv1 = convolution_of(w, "resnet.embedder.embedder.convolution", 2)
        self.bn1 = batch_norm_of(w, "resnet.embedder.embedder.normalization")
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        for stage, depth in enumerate(DEPTHS):
            blocks = (
                BasicBlock(w, f"resnet.encoder.stages.{stage}.layers.{i}", 2 if stage and not i else 1)
                for i in range(depth)
            )
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), linear_of(w, "classifier.1")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(len(DEPTHS)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def torchvision_like() -> Any:
    return TorchvisionLike(model().state_dict()).eval()


@FAMILY.correct("as in torchvision: other names, one ReLU in place that is used again and again")
def as_in_torchvision() -> Run:
    return Run(torchvision_like(), (PIXELS,))


class ChannelsLastConvolution(nn.Module):
    """Images of [batch, height, width, channel] and kernels of [height, width, in, out], as in Keras."""

    def __init__(self, w: Weights, at: str, stride: int = 1) -> None:
        super().__init__()
        folded = fuse_conv_bn_eval(
            convolution_of(w, f"{at}.convolution", stride).eval(),
            batch_norm_of(w, f"{at}.normalization").eval(),
        )
        assert folded.bias is not None
        self.kernel, self.bias = nn.Parameter(folded.weight.detach().permute(2, 3, 1, 0)), folded.bias
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kernel.permute(3, 2, 0, 1)
        out = F.conv2d(x.permute(0, 3, 1, 2), weight, self.bias, self.stride, weight.shape[2] // 2)
        return out.permute(0, 2, 3, 1).contiguous()


class ChannelsLastNet(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.stem = ChannelsLastConvolution(w, "resnet.embedder.embedder", 2)
        self.first, self.second, self.shortcuts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for stage, depth in enumerate(DEPTHS):
            for i in range(depth):
                at = f"resnet.encoder.stages.{stage}.layers.{i}"
                stride = 2 if stage and not i else 1
                self.first.append(ChannelsLastConvolution(w, f"{at}.layer.0", stride))
                self.second.append(ChannelsLastConvolution(w, f"{at}.layer.1"))
                self.shortcuts.append(
                    nn.Identity() if i else ChannelsLastConvolution(w, f"{at}.shortcut", stride)
                )
        self.dense = linear_of(w, "classifier.1")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images)).permute(0, 3, 1, 2)
        x = F.max_pool2d(x, 3, 2, 1).permute(0, 2, 3, 1)
        for first, second, shortcut in zip(self.first, self.second, self.shortcuts, strict=True):
            x = F.relu(second(F.relu(first(x))) + shortcut(x))
        logits: Tensor = self.dense(x.mean((1, 2)))
        return logits


@FAMILY.correct("channels last throughout, as in Keras, batch norms folded, no module for ReLU")
def channels_last_throughout() -> Run:
    return Run(ChannelsLastNet(model().state_dict()).eval(), (PIXELS.permute(0, 2, 3, 1).contiguous(),))


@FAMILY.mistake(
    "one batch norm in train mode",
    guilty="resnet.encoder.stages.0.layers.1.layer.0.normalization",
    beside=as_in_torchvision,
)
def batch_norm_in_train_mode() -> Run:
    port = torchvision_like()
    port.layer1[1].bn1.train()
    return Run(port, (PIXELS,))


@FAMILY.mistake(
    "the epsilon of Keras, 1e-3", guilty="resnet.embedder.embedder.normalization", beside=as_in_torchvision
)
def epsilon_of_keras() -> Run:
    port = torchvision_like()
    for module in port.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return Run(port, (PIXELS,))


@FAMILY.mistake(
    "running statistics of one batch norm not loaded",
    guilty="resnet.encoder.stages.1.layers.0.layer.1.normalization",
    beside=float16,
)
def statistics_not_loaded() -> Run:
    port = model()
    port.resnet.encoder.stages[1].layers[0].layer[1].normalization.reset_running_stats()
    return Run(port.half(), {"pixel_values": PIXELS.half()})


@FAMILY.mistake(
    "no ReLU behind the sum", guilty="resnet.encoder.stages.1.layers.1.activation", beside=as_in_torchvision
)
def relu_missing() -> Run:
    port = torchvision_like()
    port.layer2[1].has_last_relu = False
    return Run(port, (PIXELS,))


@FAMILY.mistake("a pool that pads on one side", guilty="resnet.embedder.pooler", beside=as_in_torchvision)
def pool_pads_on_one_side() -> Run:
    port = torchvision_like()
    port.maxpool = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(3, 2))
    return Run(port, (PIXELS,))


@FAMILY.mistake(
    "the mean folded, the offset of one batch norm forgotten",
    guilty="resnet.encoder.stages.2.layers.0.layer.0.convolution",
    beside=folded_batch_norms,
)
def offset_not_folded() -> Run:
    port = fold(model())
    convolution = port.resnet.encoder.stages[2].layers[0].layer[0].convolution
    original = model().resnet.encoder.stages[2].layers[0].layer[0].normalization
    with torch.no_grad():
        convolution.bias -= original.bias
    return run_of(port)


@FAMILY.mistake(
    "a frozen batch norm whose mean was not scaled",
    guilty="resnet.encoder.stages.0.layers.0.layer.1.normalization",
    beside=frozen_batch_norms,
)
def mean_not_scaled() -> Run:
    port = frozen_batch_norms().model
    norm = model().resnet.encoder.stages[0].layers[0].layer[1].normalization
    frozen = port.resnet.encoder.stages[0].layers[0].layer[1].normalization
    frozen.offset = (norm.bias - norm.running_mean).detach()[:, None, None]
    return run_of(port)


@FAMILY.mistake(
    "a kernel of channels last with rows and columns swapped",
    guilty="resnet.encoder.stages.1.layers.0.layer.1.convolution",
    beside=channels_last_throughout,
)
def kernel_transposed() -> Run:
    run = channels_last_throughout()
    convolution = run.model.second[2]
    convolution.kernel = nn.Parameter(convolution.kernel.detach().transpose(0, 1).contiguous())
    return run


@FAMILY.mistake("another padding in what is compiled", guilty="resnet.embedder", beside=compiled_stem)
def padding_inside_compiled() -> Run:
    port = model()
    port.resnet.embedder.embedder.convolution.padding_mode = "reflect"
    port.resnet.embedder.embedder.convolution._reversed_padding_repeated_twice = [3, 3, 3, 3]
    port.resnet.embedder = torch.compile(port.resnet.embedder, backend="eager")
    return run_of(port)
