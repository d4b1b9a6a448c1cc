"""Ports with a mistake: the mapping that is computed leads to the same module as that of the right port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorcap
from tensorcap.alignment import align
from tests.alignment.conftest import PORTS

MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 1.1,
    "rolled": lambda x: torch.roll(x, 1, -1),
    "noisy": lambda x: x + 0.05 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
    "negated": lambda x: -x,
    "reversed": lambda x: x.flip(-1),
}


def leaves(model: nn.Module) -> Iterator[str]:
    """Modules without children, of the second of each list only."""
    for path, module in model.named_modules():
        numbers = [part for part in path.split(".") if part.isdigit()]
        if path and not list(module.children()) and (not numbers or "1" in numbers):
            yield path


def damaged(value: Any, mistake: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return mistake(value) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(damaged(item, mistake) for item in value)
    return value


@pytest.mark.sampled
@pytest.mark.spec("ALN-22", "ALN-25", "ALN-27", "ALN-31")
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", [name for name in PORTS if name != "t5"])  # its scan only hands results out
def test_a_mistake_is_found_where_the_mapping_of_the_right_port_finds_it(
    name: str, mistake: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("transformers")
    if (name, mistake) == ("llama", "noisy"):
        reason = "behind noise in o_proj, layers of equal names are paired in place of the sum that they are"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    port = import_module(f"tests.alignment.ports.{name}").PORT
    model, inputs = port.reference()
    other, others = port.target(model.state_dict(), inputs)
    other.eval()
    for path, made, given in (("ref", model, inputs), ("right", other, others)):
        with torch.no_grad(), tensorcap.capture(made, tmp_path / f"{path}.h5"):
            made(**given)
    with (
        tensorcap.open_archive(tmp_path / "ref.h5") as reference,
        tensorcap.open_archive(tmp_path / "right.h5") as right,
    ):
        known = align(reference, right).alignment
    elsewhere = {}
    for site in leaves(other):
        hook = other.get_submodule(site).register_forward_hook(
            lambda _, __, output: damaged(output, MISTAKES[mistake])
        )
        with torch.no_grad(), tensorcap.capture(other, tmp_path / "wrong.h5"):
            other(**others)
        hook.remove()
        expected = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "wrong.h5", mapping=known)
        if all(pair.is_green for pair in expected.pairs if pair.key.startswith("0/@root/output")):
            continue  # a norm behind it undoes it, and compare says so (CMP-55)
        found = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "wrong.h5")
        places = [c.divergence.module if c.divergence else None for c in (expected, found)]
        if places[0] != places[1]:
            elsewhere[site] = places
    assert elsewhere == {}
