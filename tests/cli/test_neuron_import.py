"""`tcap import` of folders of NxDI and vllm-neuron."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorcap_formats.open import open_archive
from tests.cli.conftest import Tcap
from tests.support.torch_bytes import bfloats, floats, write_torch


@pytest.mark.spec("NRN-78")
def test_each_rank_has_an_archive_of_its_own(folder: Path, tcap_json: Callable[..., Any]) -> None:
    for rank in (0, 1):
        write_torch(folder / f"tree/dp0/decode_b1_0/norm/rank{rank}.pt", floats(rank))
    result = tcap_json("import", "tree", "-o", "tgt.h5")
    assert result["path"] == "tgt.rank0.h5, tgt.rank1.h5"
    assert not (folder / "tgt.h5").exists()
    with open_archive(folder / "tgt.rank1.h5") as archive:
        assert [record.key.text for record in archive.records] == ["0/norm/output"]
        assert archive.read(archive.records[0]).tolist() == [1.0]
        assert archive.run["ranks"] == {"rank": 1, "count": 2}
        assert archive.info.phases == ("decode",)


@pytest.mark.spec("NRN-72", "NRN-78")
def test_a_point_that_was_not_captured_is_said(folder: Path, tcap: Tcap) -> None:
    write_torch(folder / "dump/captured_tensors_cte_step_1_module_norm_output.pt", floats(1))
    write_torch(folder / "dump/captured_tensors_cte_step_1_module_layers_output.pt", bfloats(0))
    result = tcap("import", "dump", "-o", "tgt.h5", status=1)
    assert result.stdout.startswith("tgt.h5: 1 tensor, 4 B, execution order unknown")
    assert "not captured: 0/layers/output: the device handed out zeros of shape [1]" in result.stderr
    points = {point["site"]: point["status"] for point in open_archive(folder / "tgt.h5").run["points"]}
    assert points == {"norm": "captured", "layers": "not-capturable"}


@pytest.mark.spec("NRN-71", "NRN-78")
def test_what_could_not_be_taken_makes_the_archive_incomplete(folder: Path, tcap: Tcap) -> None:
    write_torch(folder / "dump/captured_tensors_cte_step_1_module_norm_output.pt", floats(1))
    metadata = {"tensors": {"captured_tensors_tkg_step_2_module_norm_output.pt": {"step": 2}}}
    (folder / "dump/capture_metadata.json").write_text(json.dumps(metadata))
    result = tcap("import", "dump", "-o", "tgt.h5", status=3)
    assert "there is no such file" in result.stderr
    assert not open_archive(folder / "tgt.h5").is_complete
