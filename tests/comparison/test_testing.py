"""`tensorcap.testing`: an archived run as a regression test."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorcap
from tensorcap.alignment import read_mapping
from tensorcap.testing import assert_matches
from tensorcap_formats.errors import UsageError
from tests.support.archives import write_archive


def model(scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    layers: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    with torch.no_grad():
        layers[2].weight.mul_(scale)
    return layers


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    captured = model()
    with tensorcap.capture(captured, tmp_path / "ref.h5"), torch.no_grad():
        captured(torch.ones(2, 3))
    return tmp_path / "ref.h5"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(lambda: model(), id="function-of-a-model"),
        pytest.param(lambda: tensorcap.Workload(model(), (torch.ones(2, 3),)), id="function-of-a-workload"),
    ],
)
def test_a_target_that_matches_is_silent_and_leaves_nothing(
    reference: Path, temporary: Path, target: Any
) -> None:
    assert assert_matches(reference, target).counts == {"identical": 8}
    assert assert_matches(reference, target()).counts == {"identical": 8}
    assert not list(temporary.iterdir())


def test_inputs_may_be_given(reference: Path) -> None:
    assert_matches(reference, model(), (torch.ones(2, 3),))
    with pytest.raises(AssertionError, match="the two runs were fed different inputs"):
        assert_matches(reference, model(), (torch.zeros(2, 3),))


def test_a_failure_says_where_and_how_to_look_further(reference: Path, temporary: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_matches(reference, model(scale=1.5), rtol=1e-3, exclude=["*/input*"])
    lines = str(caught.value).splitlines()
    (kept,) = temporary.glob("*/target.h5")
    assert lines[0] == f"{kept} does not match {reference}"
    assert lines[1:3] == [
        "first divergence: 0/2/output (diverged)",
        "  module 2 (torch.nn.modules.linear.Linear)",
    ]
    assert "4 of 4 elements are outside rtol 0.001, atol 0" in lines[3]
    assert lines[4].startswith("  max abs ")
    assert (
        lines[-2] == "5 of 8 reference tensors compared: 2 identical, 2 diverged, 4 excluded"
        or "compared" in lines[-2]
    )
    assert shlex.split(lines[-1])[2:] == [
        "tcap", "compare", str(reference), str(kept), "--rtol", "0.001", "--exclude", "*/input*",
    ]  # fmt: skip


def test_the_command_to_look_further_names_the_map_file_by_the_option_of_compare(tmp_path: Path) -> None:
    reference = write_archive(tmp_path / "a.h5", {"0/a/output": np.ones(2)})
    target = write_archive(tmp_path / "b.h5", {"0/b/output": np.zeros(2)})
    map_file = tmp_path / "map.toml"
    map_file.write_text('[[pair]]\nreference = "a"\ntarget = "b"\n')
    with pytest.raises(AssertionError) as caught:
        assert_matches(reference, target, mapping=map_file)
    command = shlex.split(str(caught.value).splitlines()[-1])[2:]
    assert command == ["tcap", "compare", str(reference), str(target), "--map", str(map_file)]
    assert subprocess.run([sys.executable, "-m", "tensorcap_cli", *command[1:]], check=False).returncode == 1
    with pytest.raises(AssertionError) as caught:
        assert_matches(reference, target, mapping=read_mapping(map_file))
    assert shlex.split(str(caught.value).splitlines()[-1])[2:] == command[:4]  # no file that could be named


def test_two_archives_are_compared_without_a_framework(tmp_path: Path) -> None:
    reference = write_archive(tmp_path / "a.h5", {"0/a/output": np.ones(2), "0/b/output": np.ones(2)})
    target = write_archive(tmp_path / "b.h5", {"0/a/output": np.ones(2) * 1.5})
    with pytest.raises(AssertionError) as caught:
        assert_matches(reference, target, atol=1.0)
    assert "first divergence" not in str(caught.value)
    assert "missing: 0/b/output (missing-in-target)" in str(caught.value)
    assert "1 of 2 reference tensors compared: 1 match, 1 missing-in-target" in str(caught.value)
    assert_matches(reference, target, atol=1.0, only=["a"])


def test_what_the_reference_left_out_is_left_out(tmp_path: Path) -> None:
    captured = model()
    with tensorcap.capture(captured, tmp_path / "r.h5", only="2", inputs=False), torch.no_grad():
        captured(torch.ones(2, 3))
    found = assert_matches(tmp_path / "r.h5", model(), (torch.ones(2, 3),))
    assert found.records == sum(found.counts.values())  # the target has nothing more


def test_nothing_compared_is_a_failure(tmp_path: Path) -> None:
    reference = write_archive(tmp_path / "a.h5", {"0/a/output": np.ones(2)})
    target = write_archive(tmp_path / "b.h5", {"0/b/output": np.ones(2)})
    with pytest.raises(AssertionError, match="\nnothing was compared\n"):
        assert_matches(reference, target)


def test_the_archive_is_kept_where_one_says(reference: Path, tmp_path: Path, temporary: Path) -> None:
    assert_matches(reference, model(), keep=tmp_path / "kept.h5")
    assert (tmp_path / "kept.h5").exists()
    assert not list(temporary.iterdir())


def test_a_target_that_is_none_is_wrong_usage(reference: Path, temporary: Path) -> None:
    with pytest.raises(UsageError, match="no adapter for int"):
        assert_matches(reference, 3)
    assert not list(temporary.iterdir())


def test_importing_it_loads_no_framework_and_no_pytest() -> None:
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'formats')!r}]; import tensorcap.testing; "
        "print(sorted({'pytest', 'torch', 'numba', 'click', 'h5py'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
