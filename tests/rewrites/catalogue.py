"""A reference and a target as runs, and the proof without tensorcap that the target is right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

FLOAT32: Final = 1e-5  # relative distance of the main results that a correct port stays within, by precision
FLOAT16: Final = 2e-2
BFLOAT16: Final = 0.12
INT8: Final = 0.08
MISTAKE_FACTOR: Final = 10  # a mistake lies so much farther off than the correct port beside it

View = Callable[[Tensor], Tensor]


def whole(result: Tensor) -> Tensor:
    return result


@dataclass(frozen=True)
class Run:
    """A model and its call.

    Attributes:
        inputs: Positional arguments as a tuple, or named ones.
        call: In place of the model itself, for runs of several forwards; gets model and inputs.
    """

    model: Any
    inputs: tuple[Any, ...] | Mapping[str, Any]
    call: Callable[..., Any] | None = None

    def __call__(self) -> Any:
        head = (self.model,) if self.call else ()
        function = self.call or self.model
        if isinstance(self.inputs, Mapping):
            return function(*head, **self.inputs)
        return function(*head, *self.inputs)


@dataclass(frozen=True)
class Entry:
    """A port of a model, correct or with one mistake.

    Attributes:
        kind: What the porter did, in words.
        tolerance: Relative distance of the main results that is right; no unit.
        reference_view: The part of the reference's main result that the target has, too.
        target_view: The part of the target's main result that the reference has, too.
        guilty: The module of the reference whose counterpart is wrong; empty if the port is right.
        beside: The name of the correct port that the mistake was planted in.
    """

    name: str
    kind: str
    reference: Callable[[], Run]
    target: Callable[[], Run]
    tolerance: float = FLOAT32
    reference_view: View = whole
    target_view: View = whole
    guilty: str = ""
    beside: str = ""

    @property
    def is_right(self) -> bool:
        return not self.guilty

    def error(self) -> float:
        """The relative distance of the main results, ||target - reference|| / ||reference||; no unit."""
        with torch.no_grad():
            reference = self.reference_view(main_result(self.reference()())).double()
            target = self.target_view(main_result(self.target()())).double()
        if reference.shape != target.shape:
            raise ValueError(f"{self.name}: found {tuple(target.shape)}, expected {tuple(reference.shape)}")
        return float((target - reference).norm() / reference.norm())


@dataclass
class Family:
    """The rewrites of one architecture; an entry has the name of the function that makes its target."""

    name: str
    reference: Callable[[], Run]
    entries: list[Entry] = field(default_factory=list)

    def correct(
        self, kind: str, *, reference: Callable[[], Run] | None = None, **more: Any
    ) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
        """Enter a correct port."""

        def enter(target: Callable[[], Run]) -> Callable[[], Run]:
            name = f"{self.name}/{target.__name__.replace('_', '-')}"
            self.entries.append(Entry(name, kind, reference or self.reference, target, **more))
            return target

        return enter

    def mistake(
        self, kind: str, *, guilty: str, beside: Callable[[], Run]
    ) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
        """Enter a port with a mistake; it is compared as the correct one beside it."""

        def enter(target: Callable[[], Run]) -> Callable[[], Run]:
            right = next(entry for entry in self.entries if entry.target is beside)
            self.entries.append(
                Entry(
                    f"{self.name}/{target.__name__.replace('_', '-')}",
                    kind,
                    right.reference,
                    target,
                    tolerance=right.tolerance,
                    reference_view=right.reference_view,
                    target_view=right.target_view,
                    guilty=guilty,
                    beside=right.name,
                )
            )
            return target

        return enter


def main_result(output: Any) -> Tensor:
    """Logits or last hidden states of what a model returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is not None:
            return main_result(value)
    values: Iterator[Any] = iter(output.values() if isinstance(output, Mapping) else output)
    return main_result(next(values))


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill a model with weights that look trained: no norm is one, no bias zero, attention is not flat."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                if isinstance(module, nn.Embedding):
                    parameter.copy_(0.3 * normal(parameter))
                elif parameter.ndim < 2:
                    start = 0.0 if name.endswith("bias") else parameter
                    parameter.copy_(start + 0.2 * normal(parameter))
                elif parameter.ndim == 2:
                    parameter.copy_(1.3 * parameter.numel() ** -0.25 * normal(parameter))
                elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
                    parameter.copy_(1.3 * parameter[0].numel() ** -0.5 * normal(parameter))
                else:  # a stack of matrices
                    parameter.copy_(1.3 * parameter[0].numel() ** -0.25 * normal(parameter))
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(0.3 * normal(module.running_mean))
                module.running_var.copy_(0.5 + normal(module.running_var).abs())


def random_model(kind: Any, config_kind: Any, **settings: Any) -> Any:
    """A model of transformers in eval mode, with weights that look trained."""
    port = kind(config_kind(**settings)).eval()
    randomise(port)
    return port


def tokens(rows: int, length: int, vocabulary: int, seed: int = 1) -> Tensor:
    return torch.randint(
        3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)
    )  # below 3 stand padding and its like
