"""Files of torch.save, read without torch."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorcap_formats.foreign import open_torch_file, open_torch_folder, strided
from tensorcap_formats.open import open_archive


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.pt"


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize(
    "name",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_comes_back_bit_for_bit(path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1] if name == "bool" else range(100, 100 + 6 * dtype.itemsize))
    tensor = raw[: 6 * dtype.itemsize].to(torch.uint8).view(dtype).reshape(2, 3)
    torch.save(tensor, path)
    with open_torch_file(path) as archive:
        (record,) = archive.records
        assert (record.key.text, record.dtype.name, record.shape) == ("x", name, (2, 3))
        assert archive.read(record).tobytes() == bits(tensor)
    assert archive.container == "pt"


def test_nested_values_are_named_by_their_path(path: Path) -> None:
    shared = torch.arange(6.0)
    torch.save(
        {
            "state": OrderedDict([("layers.10.w", shared), ("layers.2.w", shared[2:4])]),
            "list": [torch.tensor(7), {"deep": (torch.ones(1), "text", None, 1.5, float("inf"))}],
            "parameter": torch.nn.Parameter(torch.zeros(2)),
            "size": torch.Size([3, 4]),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "set": {5},
            3: True,
            "raw": b"bytes",
        },
        path,
    )
    with open_archive(path) as archive:
        assert {r.key.text: archive.load(r).tolist() for r in archive.records} == {
            "list.0": 7,
            "list.1.deep.0": [1.0],
            "parameter": [0.0, 0.0],
            "state.layers.2.w": [2.0, 3.0],
            "state.layers.10.w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        }
        assert [r.key.text for r in archive.records][-2:] == ["state.layers.2.w", "state.layers.10.w"]
        assert archive.values == {
            "list.1.deep.1": "text",
            "list.1.deep.2": None,
            "list.1.deep.3": 1.5,
            "list.1.deep.4": "inf",
            "size.0": 3,
            "size.1": 4,
            "dtype": "torch.bfloat16",
            "device": "cpu:0",
            "set.0": 5,
            "3": True,
        }
        assert archive.skipped == {"raw": "a bytes that is no tensor"}


def test_a_state_dict_with_its_metadata_opens(path: Path) -> None:
    linear = torch.nn.Linear(2, 3)
    module = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
    torch.save(module.state_dict(), path)
    with open_torch_file(path) as archive:
        assert [r.key.text for r in archive.records] == [
            "0.bias",
            "0.weight",
            "1.bias",
            "1.num_batches_tracked",
            "1.running_mean",
            "1.running_var",
            "1.weight",
        ]
        assert archive.load(archive.get("0.weight")).tolist() == linear.weight.detach().tolist()


VIEWS = {
    "transposed": lambda t: t.T,
    "permuted": lambda t: t.reshape(4, 5, 6).permute(2, 0, 1),
    "offset": lambda t: t[3:, 2:7],
    "steps": lambda t: t[::3, ::2],
    "expanded": lambda t: t[:1].expand(7, 12),
    "overlapping": lambda t: t.reshape(-1).unfold(0, 5, 2),
    "diagonal": lambda t: t.diagonal(),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[4, 4],
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("small", [False, True], ids=["at-once", "split"])
def test_views_are_read_in_c_order(
    path: Path, kind: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(strided, "_SMALL_SPAN_BYTES", 8)
        monkeypatch.setattr(strided, "_SPAN_BYTES", 64)
        monkeypatch.setattr(strided, "BAND_BYTES", 200)
    view = VIEWS[kind](torch.arange(120.0).reshape(10, 12))
    torch.save(view, path)
    with open_torch_file(path) as archive:
        (record,) = archive.records
        assert record.shape == tuple(view.shape)
        assert archive.load(record).tolist() == view.tolist()
        blocks = [b.tolist() for b in archive.blocks(record, block_bytes=28)]
        assert [x for block in blocks for x in block] == view.reshape(-1).tolist()


def test_a_row_that_is_larger_than_a_band_is_gathered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "BAND_BYTES", 16)
    view = torch.arange(24.0).reshape(2, 3, 4).permute(0, 2, 1)
    torch.save(view, path)
    with open_torch_file(path) as archive:
        blocks = [b.tolist() for b in archive.blocks(archive.records[0], block_bytes=20)]
    assert [x for block in blocks for x in block] == view.reshape(-1).tolist()


def test_a_folder_has_names_that_begin_with_the_files(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "layers.10.pt")
    torch.save({"hidden": torch.ones(2), "scale": 2}, tmp_path / "layers.2.pth")
    (tmp_path / "log.txt").write_text("done")
    with open_archive(tmp_path) as archive:
        assert [r.key.text for r in archive.records] == ["layers.2/hidden", "layers.10"]
        assert archive.values == {"layers.2/scale": 2}
        assert archive.skipped == {"log.txt": "no .pt file"}
        assert archive.container == "pt-folder"


def test_parts_of_a_checkpoint_share_one_space_of_names(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02cos\nsystem\n.")
    with open_torch_folder(tmp_path) as archive:
        assert [r.key.text for r in archive.records] == ["a.weight", "b.weight"]
        assert archive.skipped == {"training_args.bin": "no part of the checkpoint"}


def test_torch_is_not_needed(path: Path) -> None:
    torch.save({"a": torch.arange(3)}, path)
    code = (
        "import sys; from tensorcap_formats.open import open_archive; "
        f"a = open_archive({str(path)!r}); print(a.load(a.records[0]).tolist(), 'torch' in sys.modules)"
    )
    formats = str(Path(strided.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": formats}
    )
    assert done.stdout == "[0, 1, 2] False\n"


def test_older_pickle_protocols_and_newer_ones_open(path: Path) -> None:
    for protocol in (2, 3, 4, 5):
        torch.save({"a": torch.arange(3), "l": [1, "x"]}, path, pickle_protocol=protocol)
        with open_torch_file(path) as archive:
            assert archive.load(archive.records[0]).tolist() == [0, 1, 2]
            assert archive.values == {"l.0": 1, "l.1": "x"}


def test_values_of_numpy_are_equal_to_those_of_torch(path: Path) -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32))
    torch.save({"x": tensor.to(torch.bfloat16)}, path)
    with open_torch_file(path) as archive:
        assert archive.load(archive.records[0]).tolist() == tensor.to(torch.bfloat16).float().tolist()
