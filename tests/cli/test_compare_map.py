"""`tcap compare --map`: pairs of unlike names, tensors of unlike layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main
from tests.support.archives import write_archive

_MAP = """
[[pair]]
reference = ["layers.{i}.q", "layers.{i}.k"]
target = "h.{i+1}.qk"
i = "0-1"
steps = ["split -1 4,2"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    drawn = np.random.default_rng(0).standard_normal((2, 3, 6)).astype(np.float32)
    ones = {f"0/layers.{i}.q/output": drawn[i, :, :4] for i in (0, 1)}
    ones |= {f"0/layers.{i}.k/output": drawn[i, :, 4:] for i in (0, 1)}
    write_archive(tmp_path / "ref.h5", {**ones, "0/norm/output": drawn[0]})
    write_archive(
        tmp_path / "tgt.h5",
        {"0/h.1.qk/output": drawn[0], "0/h.2.qk/output": drawn[1], "0/norm/output": drawn[0]},
    )
    (tmp_path / "map.toml").write_text(_MAP)
    return tmp_path


def test_mapped_pairs_have_the_references_keys_and_others_pair_by_equal_keys(folder: Path) -> None:
    found = CliRunner().invoke(main, ["compare", "ref.h5", "tgt.h5", "--map", "map.toml"])
    assert found.exit_code == 0, found.output
    assert "5 of 5 reference tensors compared" in found.output


def test_a_wrong_part_of_a_fused_tensor_is_found_where_the_reference_has_it(folder: Path) -> None:
    wrong = np.random.default_rng(0).standard_normal((2, 3, 6)).astype(np.float32)
    norm = wrong[0].copy()
    (folder / "tgt.h5").unlink()
    wrong[1, 2, 5] += 1
    write_archive(
        folder / "tgt.h5",
        {"0/h.1.qk/output": wrong[0], "0/h.2.qk/output": wrong[1], "0/norm/output": norm},
    )
    found = CliRunner().invoke(
        main, ["compare", "ref.h5", "tgt.h5", "--map", "map.toml", "--rtol", "1e-5", "--atol", "1e-6"]
    )
    assert found.exit_code == 1
    assert "FIRST DIVERGENCE  0/layers.1.k/output" in found.output


def test_a_map_that_does_not_fit_is_refused_with_its_line(folder: Path) -> None:
    (folder / "map.toml").write_text(_MAP.replace("4,2", "4,3"))
    found = CliRunner().invoke(main, ["compare", "ref.h5", "tgt.h5", "--map", "map.toml"])
    assert found.exit_code == 2
    assert "Error: map.toml:2: " in found.output
    assert "axis -1 has 6 elements, the parts 7" in found.output
