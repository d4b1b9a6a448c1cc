"""Cases from public bug reports that are about comparing, through real commands; numbered as there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tensorcap
from tensorcap_cli.main import main
from tensorcap_formats.dtypes import Array
from tests.support.archives import write_archive
from tests.support.floats import to_bfloat16


@pytest.fixture
def tcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int) -> str:
        result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result.stdout

    return run


def pair_of(folder: Path, reference: Array, target: Array, **options: Any) -> tensorcap.Pair:
    """One tensor of each archive, compared; options of the target's writer."""
    write_archive(folder / "ref.h5", {"0/a/output": reference})
    write_archive(folder / "tgt.h5", {"0/a/output": target}, **options)
    (pair,) = tensorcap.compare(folder / "ref.h5", folder / "tgt.h5").pairs
    return pair


def test_case_19_half_precision_metrics_neither_overflow_nor_pass(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, np.full((64, 256), 300, np.float16), np.full((64, 256), -100, np.float16))
    found = pair.difference
    assert found is not None
    assert (found.mse, found.mean_abs, found.cosine) == (160000.0, 400.0, -1.0)
    assert pair.status == "suspect"  # one tensor without its inputs: never more, and never green


def test_case_21_large_integers_neither_round_nor_wrap(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, np.array([2**53, 2**62, 7]), np.array([2**53 + 1, -(2**62), 7]))
    found = pair.difference
    assert found is not None
    assert (found.unequal, found.max_abs, found.max_abs_index) == (2, 2**63, (1,))
    assert pair.status == "diverged"


@pytest.mark.parametrize(
    ("reference", "target", "status", "cosine", "relative_frobenius"),
    [
        pytest.param(np.zeros(8), np.zeros(8), "identical", None, None, id="zeros"),
        pytest.param(np.zeros(8), np.ones(8), "suspect", None, np.inf, id="zeros-and-ones"),
        pytest.param(np.arange(1.0, 9), 2 * np.arange(1.0, 9), "diverged", 1.0, 1.0, id="scaled"),
        pytest.param(np.full(8, 3.0), np.full(8, 3.0), "identical", None, None, id="constant"),
        pytest.param(np.arange(1, 9) * 1e-30, np.arange(1, 9) * 1e-30, "identical", None, None, id="tiny"),
    ],
)
def test_case_23_zeros_constants_and_scaled_tensors(
    tmp_path: Path,
    reference: Array,
    target: Array,
    status: str,
    cosine: float | None,
    relative_frobenius: float | None,
) -> None:
    pair = pair_of(tmp_path, reference.astype(np.float32), target.astype(np.float32))
    assert pair.status == status
    if status != "identical":  # by digest: nothing is measured
        assert pair.difference is not None
        assert pair.difference.cosine == (None if cosine is None else pytest.approx(cosine, abs=1e-12))
        assert pair.difference.relative_frobenius == relative_frobenius


def test_case_61_rounding_around_zero_passes_and_a_doubled_small_tensor_does_not(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((64, 256)), random.standard_normal((256, 128)) / 16

    reference = (x @ w).astype(np.float32)
    target = to_bfloat16(to_bfloat16(x) @ to_bfloat16(w))
    benign = pair_of(tmp_path, reference, target, run={"compute_dtype": "bfloat16"})
    assert benign.difference is not None
    assert (benign.difference.max_rel or 0) > 1
    assert benign.status == "within-rounding"
    small = (random.standard_normal(1000) * 1e-6).astype(np.float32)
    wrong = pair_of(tmp_path, small, 2 * small, run={"compute_dtype": "bfloat16"})
    assert wrong.status == "suspect"


def test_case_63_a_flip_at_the_resolution_of_bfloat16_is_a_tie(tcap: Callable[..., str]) -> None:
    key = "0/@root/output.logits"
    reference = np.array([[4.0039, 4.0, 1.0], [3.0, 2.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    target = np.array([[4.0, 4.0039, 1.0], [2.25, 2.75, 0.0], [1.001, 0.0, 0.0]], np.float32)
    write_archive(Path("ref.h5"), {key: reference})
    write_archive(Path("tgt.h5"), {key: target}, run={"compute_dtype": "bfloat16"})
    output = tcap("compare", "ref.h5", "tgt.h5", status=1)
    assert (
        "  2 flips of the first choice, 1 tie among them, the first that is none at [1]; largest margin 1\n"
        in output
    )


def test_case_63_steps_after_the_first_other_token_are_not_comparable(tcap: Callable[..., str]) -> None:
    for name, tokens in (("ref.h5", (5, 9, 2, 7)), ("tgt.h5", (5, 8, 2, 1))):
        write_archive(
            Path(name), {f"{step}/@root/input.ids": np.array([token]) for step, token in enumerate(tokens)}
        )
    output = tcap("preflight", "ref.h5", "tgt.h5", status=1)
    assert (
        "  inputs 1/@root/input.ids. From step 1 on the runs were fed other inputs: later steps are not "
        "comparable.\n" in output
    )


def test_case_66_a_reference_with_dropout_does_not_repeat(tcap: Callable[..., str]) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 16)
    model = torch.nn.Sequential(*layers)
    inputs = torch.randn(8, 32)
    for name, is_training in (("a", True), ("b", True), ("c", False), ("d", False)):
        model.train(is_training)
        with tensorcap.capture(model, f"{name}.h5"), torch.no_grad():
            model(inputs)
    output = tcap("preflight", "a.h5", "a.h5", "--reference-repeat", "b.h5", status=1)
    assert "The reference is not deterministic: " in output
    assert "first 0/1/output (Dropout).\n" in output
    assert "The reference ran in training mode: dropout is random in 1 module, first 1.\n" in output
    output = tcap("preflight", "c.h5", "c.h5", "--reference-repeat", "d.h5", status=0)
    assert "\nequal        inputs, repeat, mode," in output
    assert "One run was in training mode" in tcap("compare", "c.h5", "a.h5", status=1)


def test_case_66_nothing_compared_is_no_pass(tcap: Callable[..., str]) -> None:
    write_archive(Path("ref.h5"), {f"0/{site}/output": np.ones(2) for site in "abc"})
    write_archive(Path("none.h5"), {f"0/{site}/output": np.ones(2) for site in ("model.a", "x", "y")})
    write_archive(Path("some.h5"), {f"0/{site}/output": np.ones(2) for site in "axy"})
    assert "0 of 3 reference tensors compared" in tcap("compare", "ref.h5", "none.h5", status=1)
    assert "1 of 3 reference tensors compared" in tcap("compare", "ref.h5", "some.h5", status=1)
