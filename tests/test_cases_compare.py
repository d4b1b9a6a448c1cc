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
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.writer import Writer


@pytest.fixture
def tcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int) -> str:
        result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result.stdout

    return run


def write(path: str, tensors: dict[str, Array], **options: Any) -> None:
    writer = Writer(path, **options)
    for text, array in tensors.items():
        writer.add(Key.parse(text), bits_of(array), dtype_of(array), array.shape)
    writer.close()


def test_case_63_a_flip_at_the_resolution_of_bfloat16_is_a_tie(tcap: Callable[..., str]) -> None:
    key = "0/@root/output.logits"
    reference = np.array([[4.0039, 4.0, 1.0], [3.0, 2.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    target = np.array([[4.0, 4.0039, 1.0], [2.25, 2.75, 0.0], [1.001, 0.0, 0.0]], np.float32)
    write("ref.h5", {key: reference})
    write("tgt.h5", {key: target}, run={"compute_dtype": "bfloat16"})
    output = tcap("compare", "ref.h5", "tgt.h5", status=1)
    assert (
        "  2 flips of the first choice, 1 tie among them, the first that is none at [1]; largest margin 1\n"
        in output
    )


def test_case_63_steps_after_the_first_other_token_are_not_comparable(tcap: Callable[..., str]) -> None:
    for name, tokens in (("ref.h5", (5, 9, 2, 7)), ("tgt.h5", (5, 8, 2, 1))):
        write(name, {f"{step}/@root/input.ids": np.array([token]) for step, token in enumerate(tokens)})
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
    output = tcap("preflight", "a.h5", "a.h5", "--repeat", "b.h5", status=1)
    assert "The reference is not deterministic: " in output
    assert "first 0/1/output (Dropout).\n" in output
    assert "The reference ran in training mode: dropout is random in 1 modules, first 1.\n" in output
    output = tcap("preflight", "c.h5", "c.h5", "--repeat", "d.h5", status=0)
    assert "\nequal        inputs, repeat, mode," in output
    assert "One run was in training mode" in tcap("compare", "c.h5", "a.h5", status=1)


def test_case_66_nothing_compared_is_no_pass(tcap: Callable[..., str]) -> None:
    write("ref.h5", {f"0/{site}/output": np.ones(2) for site in "abc"})
    write("none.h5", {f"0/{site}/output": np.ones(2) for site in ("model.a", "x", "y")})
    write("some.h5", {f"0/{site}/output": np.ones(2) for site in "axy"})
    assert "0 of 3 reference tensors compared" in tcap("compare", "ref.h5", "none.h5", status=1)
    assert "1 of 3 reference tensors compared" in tcap("compare", "ref.h5", "some.h5", status=1)
