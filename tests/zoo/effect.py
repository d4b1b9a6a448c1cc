"""Whether the inputs exercise a mistake, and which modules compute something else with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache

from tensorcap.workload import Workload
from tensorcap_formats.keys import ROOT_SITE
from tests.zoo.architectures import ALL_ARCHITECTURES, make
from tests.zoo.entry import Correct, Mistake, PortedMistake, build
from tests.zoo.planting import module_at, put

# One rounding of a dtype, relative: 0.425 units in the last place of 1.
ROUNDINGS: Final[Mapping[str, float]] = {"float32": 0.425 * 2**-24, "bfloat16": 0.425 * 2**-8}
_EXERCISED: Final = 0.1  # roundings


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        args: What it was given, before the call.
        options: What it was given by name, before the call.
        result: The tensors that it gave, and after them those that the caches it was given had then.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any]
    result: Sequence[Tensor]

    def again(self, module: Any) -> Sequence[Tensor]:
        """What another module gives for the same arguments."""
        args, options = copy.deepcopy((self.args, self.options))
        with torch.no_grad():
            torch.manual_seed(0)
            given = tensors(module(*args, **options))
        return [*given, *cached(args, options)]


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, in a fixed order."""
    leaves = pytree.tree_leaves(result)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def cached(*arguments: Any) -> list[Tensor]:
    """The tensors of the caches among arguments, in a fixed order."""
    caches = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Cache)]
    held = [vars(layer) for cache in caches for layer in getattr(cache, "layers", ())]
    return tensors([[layer[name] for name in sorted(layer)] for layer in held])


def run(workload: Workload) -> Any:
    """Run a workload once."""
    torch.manual_seed(0)
    with torch.no_grad():
        if workload.run is None:
            return workload.model(**dict(workload.inputs))
        return workload.run(workload.model, **dict(workload.inputs))


def calls_of(workload: Workload) -> dict[str, list[Call]]:
    """Every call of every module of a run, by site."""
    found: dict[str, list[Call]] = {}
    handles = []
    for path, module in workload.model.named_modules():
        site = path or ROOT_SITE
        given: list[tuple[Any, Any]] = []

        def before(_: Any, args: Any, options: Any, given: list[Any] = given) -> None:
            given.append((copy.deepcopy(args), copy.deepcopy(options)))

        def after(
            _: Any, args: Any, options: Any, result: Any, site: str = site, given: list[Any] = given
        ) -> None:
            before_args, before_options = given.pop()
            left = [*tensors(result), *cached(args, options)]
            found.setdefault(site, []).append(Call(before_args, before_options, left))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        run(workload)
    finally:
        for handle in handles:
            handle.remove()
    return found


def clean_calls(architecture: str, dtype: str = "float32") -> dict[str, list[Call]]:
    """The calls of a model without a mistake."""
    return calls_of(ALL_ARCHITECTURES[architecture].workload(make(architecture, dtype)))


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest relative difference of two results, tensor by tensor; infinite where they do not fit."""
    if [t.shape for t in one] != [t.shape for t in other]:
        return float("inf")
    return max((_relative(a.double(), b.double()) for a, b in zip(one, other, strict=True)), default=0.0)


def _relative(one: Tensor, other: Tensor) -> float:
    apart = torch.where(one == other, 0.0, one - other).norm()
    return float(apart / one.norm()) if apart else 0.0


class ModuleDifferences(NamedTuple):
    """How far the modules of a port are from those of the reference.

    Attributes:
        modules: Count of the reference's modules.
        largest: The largest relative difference of a module's results, by the sites that both have.
    """

    modules: int
    largest: dict[str, float]


def compare_modules(port: Correct) -> ModuleDifferences:
    """Compare the modules that a port has, too, in float32, but for those with results in another layout."""
    pair = build(port, "float32")
    expected = calls_of(pair.reference)
    ported = {site.removeprefix("inner."): calls for site, calls in calls_of(pair.target).items()}
    both = [site for site in expected.keys() & ported.keys() if not site.endswith(port.relaid or ("-",))]
    largest = {
        site: max(
            difference(one.result[:1], other.result[:1])
            for one, other in zip(expected[site], ported[site], strict=True)
        )
        for site in both
    }
    return ModuleDifferences(len(expected), largest)


def ported_effect(mistake: PortedMistake, dtype: str) -> float:
    """What a mistake changes in the outputs of its port, relative.

    It is measured in float32, where nothing else differs, a mistake of precision in the dtype.
    """
    measured = dtype if mistake.kind == "precision" else "float32"
    architecture = ALL_ARCHITECTURES[mistake.architecture]
    right = mistake.port(make(mistake.architecture, measured)).eval()
    wrong = mistake.change(make(mistake.architecture, measured))
    outputs = [
        [tensor for call in calls_of(architecture.workload(model))[ROOT_SITE] for tensor in call.result]
        for model in (right, wrong)
    ]
    return difference(*outputs)


def effect(mistake: Mistake, dtype: str) -> float:
    """What a mistake changes by itself: its module's result for the arguments of a correct run, relative.

    It is measured in float32, where nothing else differs. A mistake of precision is measured in the dtype;
    in float32 it is none, as what it computes in the dtype of the activations is then precise.
    """
    if mistake.kind == "precision" and dtype == "float32":
        return 0.0
    measured = dtype if mistake.kind == "precision" else "float32"
    calls = clean_calls(mistake.architecture, measured)[mistake.guilty]
    planted = module_at(mistake.change(make(mistake.architecture, measured)), mistake.guilty)
    return max(difference(call.result, call.again(planted)) for call in calls)


def is_exercised(mistake: Mistake, dtype: str) -> bool:
    """Whether the effect is at least a tenth of a rounding of the dtype."""
    change = ported_effect(mistake, dtype) if isinstance(mistake, PortedMistake) else effect(mistake, dtype)
    return change >= _EXERCISED * ROUNDINGS[dtype]


def changed_sites(mistake: Mistake, dtype: str) -> set[str]:
    """Sites whose modules, called alone with the arguments of a correct run, give other bits."""
    model = mistake.change(make(mistake.architecture, dtype))
    changed = set()
    for site, calls in clean_calls(mistake.architecture, dtype).items():
        module = module_at(model, site)
        if any(not _is_same(call.result, call.again(module)) for call in calls):
            changed.add(site)
    return changed


def _is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def is_cured(mistake: Mistake, dtype: str) -> bool:
    """Whether a run has the bits of a correct one again once the guilty module is a correct one again."""
    name = mistake.architecture
    model = mistake.change(make(name, dtype))
    put(model, mistake.guilty, module_at(make(name, dtype), mistake.guilty))
    runs = calls_of(ALL_ARCHITECTURES[name].workload(model)), clean_calls(name, dtype)
    results = [[call.result for call in calls[ROOT_SITE]] for calls in runs]
    return all(_is_same(*pair) for pair in zip(*results, strict=True))


def around(site: str) -> Iterator[str]:
    """The sites of the modules that a module is part of."""
    if site == ROOT_SITE:
        return
    while "." in site:
        site = site.rpartition(".")[0]
        yield site
    yield ROOT_SITE
