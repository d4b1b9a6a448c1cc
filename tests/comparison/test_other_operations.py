"""Ops of the same name that hold something else on both sides, in modules whose results are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tensorcap.comparison import Comparison, compare
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

X = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
SMALL = X * 1e-4
ROWS = """
[[pair]]
reference = "inner.queries/output"
target = "inner.queries/output"
steps = ["rope_halves 32"]
"""

Code = Callable[["Inner", Tensor], Tensor]


class Inner(nn.Module):
    """A module whose code is given."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.code, self.queries = code, nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Outer(nn.Module):
    """A module in a model."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.inner = Inner(code)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x) - 1
        return made


def compared(folder: Path, codes: tuple[Code, Code], x: Tensor = X, mapping: str = "") -> Comparison:
    """The comparison of two models with such codes, captured with ops."""
    models, paths = [Outer(code).eval() for code in codes], [folder / "ref.h5", folder / "tgt.h5"]
    if mapping:  # rows of two halves side by side
        weight = models[1].inner.queries.weight.data
        weight.copy_(torch.stack([weight[:16], weight[16:]], dim=1).reshape(32, 32))
    for model, path in zip(models, paths, strict=True):
        capture_workload(Workload(model, (x,)), path, level="op")
    given = None
    if mapping:
        given = folder / "map.toml"
        given.write_text(mapping)
    return compare(*paths, mapping=given)


def parts(x: Tensor) -> Tensor:
    """Sums over the last axis, in two parts."""
    return torch.stack([x[..., :16].sum(-1), x[..., 16:].sum(-1)]).sum(0)


OTHERWISE = [
    pytest.param(lambda _, x: x * 2 * 3, lambda _, x: x * 3 * 2, id="another-order-of-factors"),
    pytest.param(
        lambda m, x: m.queries(x) * 2, lambda m, x: m.queries(x * 2) * 1, id="factor-before-a-product"
    ),
    pytest.param(
        lambda _, x: x.max(-1)[0], lambda _, x: x.flip(-1).max(-1)[0], id="indices-that-nobody-takes"
    ),
    pytest.param(lambda _, x: (x * x).sum(-1), lambda _, x: parts(x[None] * x), id="another-shape"),
]


@pytest.mark.spec("CMP-280")
@pytest.mark.parametrize(("reference", "target"), OTHERWISE)
def test_ops_that_hold_something_else_are_explained_where_what_comes_of_them_agrees(
    tmp_path: Path, reference: Code, target: Code
) -> None:
    found = compared(tmp_path, (reference, target))
    explained = [pair for pair in found.pairs if pair.status == "explained" and ":aten" in pair.key]
    assert found.exit_status == 0
    assert any(pair.is_compared or pair.target is not None for pair in explained)


@pytest.mark.spec("CMP-280")
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(lambda x: x, id="elements"),
        pytest.param(lambda x: x.sort(-1)[1].float(), id="their-places-beside-what-agrees"),
    ],
)
def test_ops_of_a_tensor_that_a_mapping_brings_into_another_order_are_in_that_order(
    tmp_path: Path, numbers: Callable[[Tensor], Tensor]
) -> None:
    def code(module: Inner, x: Tensor) -> Tensor:
        made: Tensor = (numbers(module.queries(x)) * 2).logsumexp(-1)
        return made

    found = compared(tmp_path, (code, code), mapping=ROWS)
    (product,) = [pair for pair in found.pairs if "inner:aten.mul" in pair.key]
    assert (product.status, found.exit_status) == ("explained", 0)


@pytest.mark.spec("CMP-280")
def test_an_op_that_lessens_errors_hides_no_wrong_factor(tmp_path: Path) -> None:
    def code(factor: float) -> Code:
        return lambda _, x: (x * factor).softmax(-1)

    found = compared(tmp_path, (code(0.02), code(0.01)), SMALL)
    statuses = {pair.key.rpartition(":")[2]: pair.status for pair in found.pairs}
    assert statuses["aten._softmax.default/output"] == "within-rounding"
    assert statuses["aten.mul.Tensor/output"] == "diverged"
    assert found.exit_status == 1


@pytest.mark.spec("CMP-280")
def test_an_order_that_a_sum_undoes_hides_no_wrong_factor_behind_it(tmp_path: Path) -> None:
    """What is computed of the tensor that the mapping lays out anew agrees before the factor."""

    def code(factor: float) -> Code:
        def run(module: Inner, x: Tensor) -> Tensor:
            total = module.queries(x).sum(-1, keepdim=True) / 1000
            made: Tensor = ((x + total) * factor).softmax(-1)
            return made

        return run

    found = compared(tmp_path, (code(0.02), code(0.01)), SMALL, mapping=ROWS)
    statuses = {pair.key.rpartition(":")[2]: pair.status for pair in found.pairs}
    assert statuses["aten.add.Tensor/output"] == "within-rounding"
    assert statuses["aten.mul.Tensor/output"] == "diverged"
    assert found.exit_status == 1


@pytest.mark.spec("CMP-280")
def test_a_large_term_hides_no_wrong_factor_of_a_small_one(tmp_path: Path) -> None:
    def code(factor: float) -> Code:
        return lambda _, x: x + x.flip(-1) * factor

    found = compared(tmp_path, (code(1e-7), code(2e-7)))
    statuses = {pair.key.rpartition(":")[2]: pair.status for pair in found.pairs}
    assert statuses["aten.add.Tensor/output"] == "within-rounding"
    assert statuses["aten.mul.Tensor/output"] == "diverged"


@pytest.mark.spec("POL-26")
def test_a_product_whose_terms_cancel_makes_relative_errors_larger(tmp_path: Path) -> None:
    """Of 64 products a b, of which pairs cancel but for a hundredth, errors of a rounding remain."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(4, 64, 32, generator=generator)
    b = torch.randn(4, 32, 64, generator=generator)
    a, b = torch.cat([a, -a * 1.01], dim=-1), torch.cat([b, b], dim=1)

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            made: Tensor = (a * 1).bmm(b * 1)
            return made

    for name, dtype in (("ref", torch.float32), ("tgt", torch.bfloat16)):
        workload = Workload(Product(), (a.to(dtype), b.to(dtype)))
        capture_workload(workload, tmp_path / f"{name}.h5", level="op")
    found = compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    (product,) = [pair for pair in found.pairs if "aten.bmm" in pair.key]
    (gain,) = [finding for finding in product.findings if finding.test == "attention_gain"]
    assert product.row_error is not None
    assert product.row_error > 0.05  # thirty roundings
    assert gain.status == "within-rounding"
