"""`tcap import` and `tcap export`, and dumps where other commands take archives."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_formats.dtypes import DTYPES, bits_of, dtype_of
from tensorcap_formats.foreign import MAX_DTYPE_CODES
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

Tcap = Callable[..., Any]
Write = Callable[..., Path]

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def dumped(path: Path, array: Any) -> None:
    """A .max file of float32, made here, byte for byte."""
    label = path.stem.encode()
    size = 4 + len(label) + 2 + 4 * array.ndim + 8
    head = bytes.fromhex("93f09f94a52b2b93") + struct.pack("<IIQI", 0, 1, size, len(label)) + label
    head += bytes([81, array.ndim]) + struct.pack(f"<{array.ndim}IQ", *array.shape, 24 + size)
    path.write_bytes(head + np.ascontiguousarray(array, "<f4").tobytes())


@pytest.fixture
def dump(folder: Path) -> Path:
    path = folder / "dump"
    path.mkdir()
    dumped(path / "model.layers.layers.0-output.max", X)
    dumped(path / "model.norm(2)-input_x.max", X + 1)
    return path


@pytest.mark.spec("MXF-34")
def test_a_dump_becomes_an_archive(tcap: Tcap, dump: Path) -> None:
    result = tcap("import", "dump", "-o", "x.h5")
    assert result.output == "x.h5: 2 tensors, 48 B, execution order unknown\n"
    with open_archive("x.h5") as archive:
        assert [record.key.text for record in archive.records] == ["0/layers.0/output", "0/norm@1/input.x"]
        assert archive.read(archive.records[1]).tolist() == (X + 1).tolist()
        assert (archive.is_foreign, archive.is_complete, archive.is_ordered) == (False, True, False)
    assert "2 of 2 reference tensors compared: 2 identical\n" in tcap("compare", "x.h5", "dump").output


@pytest.mark.spec("MXF-34")
def test_labels_that_are_no_layers_are_reported_and_end_with_1(tcap: Tcap, dump: Path) -> None:
    dumped(dump / "after_rope.max", X)
    result = tcap("import", "dump", "-o", "x.h5", status=1)
    assert "note: after_rope.max is no label of a layer's input or output: it is kept as a probe.\n" in (
        result.stderr
    )
    found = json.loads(tcap("import", "dump", "-o", "x.h5", "--json", status=1).stdout)
    assert (found["records"], found["probes"], found["problems"]) == (3, ["after_rope.max"], {})


@pytest.mark.spec("MXF-33", "MXF-34")
def test_files_that_cannot_be_taken_are_reported_and_end_with_3(tcap: Tcap, dump: Path) -> None:
    (dump / "model.bad-output.max").write_bytes(b"xx")
    dumped(dump / "model.layers.0-output.max", X)
    result = tcap("import", "dump", "-o", "x.h5", status=3)
    assert "not imported: model.bad-output.max: begins with b'xx', expected" in result.stderr
    assert result.stderr.count("not imported: model.layers.") == 2
    with open_archive("x.h5") as archive:
        assert [record.key.text for record in archive.records] == ["0/norm@1/input.x"]
        assert not archive.is_complete
    for side in ("x.h5", "dump"):  # nothing compares green with what lacks tensors
        output = tcap("compare", side, side, status=1).output
        assert "is incomplete: 3 parts of it could not be read: " in output


@pytest.mark.spec("MXF-31")
def test_times_of_files_are_an_order_only_if_asked(tcap: Tcap, dump: Path) -> None:
    import os

    os.utime(dump / "model.norm(2)-input_x.max", ns=(0, 5))
    result = tcap("import", "dump", "-o", "x.h5", "--by-time")
    assert result.stdout == "x.h5: 2 tensors, 48 B, in execution order\n"
    assert "a hint at most" in result.stderr
    assert "a hint at most" in tcap("show", "x.h5").output
    with open_archive("x.h5") as archive:
        assert [record.key.text for record in archive.records] == ["0/norm@1/input.x", "0/layers.0/output"]


@pytest.mark.spec("MXF-34")
def test_raw_files_of_a_dump_are_taken_by_glob(tcap: Tcap, dump: Path) -> None:
    (dump / "model.head-output").write_bytes(X.tobytes())
    assert "model.head-output (no .max or .pt file)" in tcap("import", "dump", "-o", "x.h5").stderr
    tcap("import", "dump", "-o", "x.h5", "--raw", "*head-output:float32:2,3")
    with open_archive("x.h5") as archive:
        assert archive.read(archive.get("0/head/output")).tolist() == X.tolist()
    error = tcap("import", "dump", "-o", "x.h5", "--raw", "*:float:2,3", status=2).stderr
    assert "expected GLOB:DTYPE:SIZES" in error
    (dump.parent / "a.npy").write_bytes(b"")
    assert "about dump folders" in tcap("import", "a.npy", "-o", "x.h5", "--by-time", status=2).stderr


@pytest.mark.spec("MXF-41")
def test_two_single_tensors_are_compared_whatever_their_names(tcap: Tcap, folder: Path) -> None:
    torch.save(torch.from_numpy(X), "a.pt")
    dumped(folder / "b.max", X)
    Path("c.bin").write_bytes(X.tobytes())
    assert "execution order" not in tcap("compare", "a.pt", "b.max").output  # of one tensor there is none
    tcap("compare", "b.max", "c.bin:float32:2,3")
    dumped(folder / "b.max", X + 1)
    assert "diverged" in tcap("compare", "a.pt", "b.max", "--rtol", "0.1", status=1).output


@pytest.mark.spec("MXF-112")
def test_a_first_axis_of_one_row_is_left_out_of_two_single_tensors(tcap: Tcap, folder: Path) -> None:
    torch.save(torch.from_numpy(X)[None], "a.pt")
    dumped(folder / "b.max", X)
    assert (
        "steps unsqueeze 0: 1 of 1 reference tensors (1 by user)" in tcap("compare", "a.pt", "b.max").output
    )
    assert "steps squeeze 0: 1 of 1" in tcap("compare", "b.max", "a.pt").output
    dumped(folder / "b.max", X + 1)
    assert "diverged" in tcap("compare", "a.pt", "b.max", status=1).output
    dumped(folder / "b.max", X.T.copy())
    assert "shape-mismatch" in tcap("compare", "a.pt", "b.max", status=1).output


@pytest.mark.spec("MXF-41")
def test_the_layout_of_two_single_tensors_is_given_by_steps(tcap: Tcap, folder: Path, write: Write) -> None:
    torch.save(torch.from_numpy(X), "a.pt")
    dumped(folder / "b.max", X[None].swapaxes(1, 2))
    output = tcap("compare", "a.pt", "b.max", "--rtol", "1e-6", status=1).output
    assert "shape-mismatch" in output
    arguments = "compare", "a.pt", "b.max", "--rtol", "1e-6"
    output = tcap(*arguments, "--layout", "squeeze(0)", "--layout", "transpose 0 1").output
    assert "mapping    steps squeeze 0; transpose 0 1: 1 of 1 reference tensors (1 by user)" in output
    found = json.loads(tcap(*arguments, "--layout", "squeeze(0); transpose(0, 1)", "--json").output)
    assert found["counts"] == {"identical": 1}
    write("t.h5", {"3/norm/output": X[None], "0/other/output": X})
    tcap("compare", "a.pt::a", "t.h5::3/norm/output", "--layout", "squeeze 0", "--atol", "0")
    error = tcap("compare", "a.pt", "b.max", "--layout", "squeeze(1)", status=2).stderr
    assert error == "Error: a = b: step 'squeeze 1': axis 1 has 3 elements, expected 1\n"
    error = tcap("compare", "a.pt", "b.max", "--layout", "split 0 1; squish 0", status=2).stderr
    assert "step ' squish 0': is unknown" in error
    error = tcap("compare", "a.pt", "b.max", "--layout", "split 1 2,1", status=2).stderr
    assert "its steps give 2 tensors, expected one" in error
    assert (
        "--layout goes with two single tensors"
        in tcap("compare", "t.h5", "t.h5", "--layout", "squeeze 0", status=2).stderr
    )


def hooked(step: Path, tensors: dict[str, Any]) -> None:
    """A folder of a step as torch hooks leave it."""
    step.mkdir(parents=True)
    for label, array in tensors.items():
        torch.save(torch.from_numpy(np.ascontiguousarray(array)), step / f"{label}.pt")
    (step / "tensor_names.txt").write_text("".join(f"{label}\n" for label in tensors))


@pytest.mark.spec("MXF-24", "ALN-40")
def test_a_dump_of_torch_is_compared_with_one_of_max_as_they_are(tcap: Tcap, folder: Path) -> None:
    random = np.random.default_rng(0)
    ids = np.array([[3, 1, 2, 5]])
    hidden = [random.standard_normal((1, 4, 8)).astype(np.float32) for _ in range(3)]
    logits = random.standard_normal((1, 4, 20)).astype(np.float32)
    hooked(
        folder / "torch/0",
        {
            "model.model.embed_tokens-input_0": ids,
            "model.model.embed_tokens-output": hidden[0],
            "model.model.layers.0-output_0": hidden[1],
            "model.model.layers.1-output_0": hidden[2],
            "model.lm_head-output": logits,
        },
    )
    target = folder / "max"
    target.mkdir()
    (target / "model.embed_tokens-input_0").write_bytes(ids[0].astype("<i8").tobytes())
    dumped(target / "model.embed_tokens-output.max", hidden[0][0])
    dumped(target / "model.layers.layers.0-output.max", hidden[1][0])
    dumped(target / "model.layers.layers.1-output.max", hidden[2][0] * np.float32(1.001))
    dumped(target / "model.lm_head-output.max", logits[:, -1])
    tcap("import", "max", "-o", "t.h5", "--raw", "*-input_0:int64:4")
    tcap("import", "torch", "-o", "r.h5")
    for one, other in (("torch", "t.h5"), ("r.h5", "t.h5"), ("torch", "max")):
        result = tcap("compare", one, other, "--rtol", "1e-4", "--json", status=1)
        found = json.loads(result.stdout)
        statuses = {pair["key"]: pair["status"] for pair in found["pairs"]}
        missing = {"0/model.embed_tokens/input.0": "explained"} if other == "max" else {}  # not printed
        assert statuses == {
            "0/model.embed_tokens/input.0": "identical",
            "0/model.embed_tokens/output": "identical",
            "0/model.layers.0/output.0": "identical",
            "0/model.layers.1/output.0": "diverged",
            "0/lm_head/output": "identical",
            **missing,
        }
        assert found["first_divergence"]["module"] == "model.layers.1"
        assert any("0/lm_head/output (1 of 4 tokens)" in line for line in found["mapping"]["tokens"])


@pytest.mark.spec("MXF-22")
def test_the_two_sides_of_a_layer_verification_are_compared(tcap: Tcap, folder: Path) -> None:
    one, other = folder / "v/torch_layers", folder / "v/max_layers"
    listed = {"inputs": [{"index": 0}], "outputs": [{"index": 0}]}
    for side, names in (
        (one, ("model.layers.0.up", "model.layers.1.up")),
        (other, ("layers.0.up", "layers.1.up")),
    ):
        side.mkdir(parents=True)
        (side / "layer_metadata.json").write_text(json.dumps(dict.fromkeys(names, listed)))
    for n in range(2):
        torch.save(torch.from_numpy(X + n), one / f"model.layers.{n}.up_input_0.pt")
        torch.save(torch.from_numpy(X * (n + 2)), one / f"model.layers.{n}.up_output.pt")
        dumped(other / f"layers.{n}.up_input_0_injected.max", X + n)
        dumped(other / f"layers.{n}.up_output.max", X * (n + 2) + n)
    error = tcap("import", "v", "-o", "x.h5", status=3).stderr
    assert "holds several runs, expected one" in error
    found = json.loads(tcap("compare", str(one), str(other), "--json", status=1).stdout)
    assert found["first_divergence"]["key"] == "0/layers.1.up/output"
    assert any("The target is an injected run: 2 inputs of 2 modules" in text for text in found["warnings"])


def everything(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_archive(path) as archive:
        return {
            record.key.text: (record.dtype.name, record.shape, archive.read(record).tobytes())
            for record in archive.records
        }


KEYS = [
    "0/embed_tokens/input.0",
    "0/layers.0.mlp/output.0.1",
    "0/layers.0.mlp@1/output.0.1",
    "0/layers.10/output.last_hidden_state",
    "0/layers.2/input.hidden_states",
    "0/a%3Ab/output",
    "0/probe:after%20rope/value",
    "0/@root/output.logits",
]


@pytest.mark.spec("MXF-36")
@pytest.mark.parametrize("layout", ["max", "torch"])
@pytest.mark.parametrize("steps", [(0,), (0, 3)])
def test_an_export_read_back_is_the_same(
    tcap: Tcap, folder: Path, layout: str, steps: tuple[int, ...]
) -> None:
    writer = Writer(folder / "x.h5")
    codes = [name for name in MAX_DTYPE_CODES if hasattr(torch, name) or layout == "max"]
    for step in steps:
        for n, text in enumerate(KEYS):
            logical = DTYPES[codes[n % len(codes)]]
            bits = (np.arange(6 * logical.itemsize, dtype="u1") + n).view(logical.storage)
            if logical.name == "bool":
                bits = bits.view("u1") % 2 == 0
            key = Key.parse(text.replace("0/", f"{step}/", 1))
            writer.add(key, bits.reshape(2, 3), logical, (2, 3))
        scalar = np.float32(2.5)
        writer.add(Key("scale", "output", step), bits_of(np.array(scalar)), dtype_of(np.array(scalar)), ())
    writer.close()
    output = tcap("export", "x.h5", "out", "--format", layout).output
    assert output.startswith(f"out: {9 * len(steps)} tensors, ")
    is_flat = layout == "max" and len(steps) == 1
    assert is_flat == (folder / "out/model.layers.0.mlp(2)-output_0_1.max").is_file()
    if layout == "torch":
        names = (folder / "out/0/tensor_names.txt").read_text().splitlines()
        assert names[0] == "model.embed_tokens-input_0"
        assert names[-2:] == ["model-output_logits", "model.scale-output"]
        assert torch.load(folder / "out/0/model.scale-output.pt", weights_only=True).item() == 2.5
        with open_archive("x.h5") as one, open_archive("out") as other:
            assert [r.key for r in one.records] == [r.key for r in other.records]
    assert everything(folder / "out") == everything(folder / "x.h5")


@pytest.mark.spec("MXF-37")
def test_what_a_layout_has_no_place_for_is_refused_before_anything_is_written(
    tcap: Tcap, folder: Path, write: Write
) -> None:
    write("c.h5", {"0/a/output": np.ones(2, np.complex64)})
    assert (
        ".max files have no dtype 'complex64'"
        in tcap("export", "c.h5", "out", "--format", "max", status=2).stderr
    )
    write("r.h5", {"rank1/0/a/output": X, "0/a/output": X})
    assert "is of rank 1" in tcap("export", "r.h5", "out", "--format", "max", status=2).stderr
    write("l.h5", {"0/a_b/output": X, "0/a%2Fb/output": X})
    assert (
        "have one label, 'model.a_b-output'"
        in tcap("export", "l.h5", "out", "--format", "max", status=2).stderr
    )
    assert not (folder / "out").exists()
    (folder / "out").mkdir()
    tcap("export", "r.h5", "out", "--format", "torch", "--exclude", "rank*")
    error = tcap("export", "r.h5", "out", "--format", "max", "--exclude", "rank*", status=1).stderr
    assert error.startswith("Error: out: is there and is not empty, expected a new folder\n")
    assert sorted(path.name for path in folder.iterdir()) == ["c.h5", "l.h5", "out", "r.h5"]


def test_a_missing_torch_is_reported_in_one_line(
    tcap: Tcap, folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("x.h5", {"0/a/output": X})
    monkeypatch.setitem(__import__("sys").modules, "tensorcap.adapters.torch.tensors", None)
    error = tcap("export", "x.h5", "out", "--format", "torch", status=2).stderr
    assert error.startswith("Error: writing .pt files needs the package 'torch', which is not installed\n")
    assert not (folder / "out").exists()


class Net(torch.nn.Module):
    """A linear layer, in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(2, 3) to twice (2, 2)."""
        first, second = self.up(x).split(2, -1)
        return first, second


def captured(folder: Path, **options: Any) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own programs
        capture_workload(
            tensorcap.Workload(Net(), {"x": torch.from_numpy(X)}),
            folder / "ref.h5",
            level="export",
            **options,
        )


@pytest.mark.spec("AIM-42", "AIM-43", "AIM-44", "AIM-47")
def test_a_captured_graph_becomes_a_folder_of_intermediates(tcap: Tcap, folder: Path) -> None:
    captured(folder, params=True)
    output = tcap("export", "ref.h5", "ref.aimodelintermediates").output
    assert output == "ref.aimodelintermediates: 8 values of the graph, 184 B\n"
    entries = json.loads((folder / "ref.aimodelintermediates/metadata.json").read_text())
    assert [*entries["inputs"], *entries["outputs"], *entries["intermediates"]] == [
        *("x", "getitem", "getitem_1", "up_weight", "up_bias", "linear", "split", "split.1")
    ]
    assert "No divergence.\n" in tcap("compare", "ref.h5", "ref.aimodelintermediates").output
    assert "No divergence.\n" in tcap("compare", "ref.aimodelintermediates", "ref.h5").output
    some = json.loads(
        tcap("export", "ref.h5", "y.aimodelintermediates", "--only", "*:linear", "--json").stdout
    )
    assert some == {"path": "y.aimodelintermediates", "values": 1, "bytes": 32, "left_out": {}}


@pytest.mark.spec("AIM-44", "AIM-45")
def test_what_a_folder_of_intermediates_lacks_is_told(tcap: Tcap, folder: Path, write: Write) -> None:
    captured(folder)
    result = tcap("export", "ref.h5", "ref.aimodelintermediates")
    assert result.stdout == "ref.aimodelintermediates: 6 values of the graph, 120 B\n"
    assert result.stderr.endswith(
        "note: 2 values left out: weights, or views of them: "
        "the capture did not record parameters (--params)\n"
    )
    error = tcap("export", "ref.h5", "ref.aimodelintermediates", status=1).stderr
    assert error.startswith("Error: ref.aimodelintermediates: is there already, expected a new folder\n")
    write("x.h5", {"0/a/output": X})
    error = tcap("export", "x.h5", "x.aimodelintermediates", status=2).stderr
    assert error == (
        "Error: x.h5: holds no nodes of an exported graph, expected a capture at level export\n"
        "Hint: Capture the model with: tcap capture torch MODEL --coreai -o ARCHIVE\n"
    )
    assert (
        "Missing option '--format', or a DIR that ends in" in tcap("export", "x.h5", "out", status=2).stderr
    )
    assert sorted(path.name for path in folder.iterdir()) == ["ref.aimodelintermediates", "ref.h5", "x.h5"]
