"""Folders of print hooks and layer verifications, opened as archives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.errors import NotAnArchiveError
from tensorcap_formats.foreign import DumpArchive, RawSpec, label_of, open_dump, parse_label, write_max
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "dump"
    path.mkdir()
    return path


def print_max(folder: Path, *labels: str) -> None:
    """Files as MAX prints them; the n-th holds n."""
    folder.mkdir(exist_ok=True)
    for n, label in enumerate(labels):
        array = np.array([n], np.float32)
        write_max(folder / f"{label}.max", label, dtype_of(array), array.shape, [bits_of(array)])


def hook_torch(folder: Path, labels: Mapping[str, Any], *, names: str | None = None) -> None:
    """Files as torch hooks write them in a folder of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, value in labels.items():
        torch.save(value, folder / f"{label.replace('/', '_')}.pt")
    text = "".join(f"{label}\n" for label in labels) if names is None else names
    (folder / "tensor_names.txt").write_text(text)


def keys(archive: Archive) -> list[str]:
    return [record.key.text for record in archive.records]


def values(archive: Archive) -> dict[str, Any]:
    return {record.key.text: archive.read(record).tolist() for record in archive.records}


@pytest.mark.spec("MXF-20", "MXF-23", "MXF-24")
def test_labels_of_max_become_keys(folder: Path) -> None:
    print_max(
        folder,
        "model.embed_tokens-input_0",
        "model.layers.layers.0.self_attn(2)-output",
        "model.layers.layers.10-output_1",
        "model-output_last_hidden_state",
        "model.layers.layers.0.attn-input_kv_cache",
        "model.layers.layers.0-output_0_1",
        "model.odd-output.norm-output",
        "Linear2-output",
    )
    with open_archive(folder) as archive:
        assert values(archive) == {
            "0/@root/output.last_hidden_state": [3.0],
            "0/Linear2/output": [7.0],
            "0/embed_tokens/input.0": [0.0],
            "0/layers.0.attn/input.kv_cache": [4.0],
            "0/layers.0.self_attn@1/output": [1.0],
            "0/layers.0/output.0.1": [5.0],
            "0/layers.10/output.1": [2.0],
            "0/odd-output.norm/output": [6.0],
        }
        assert archive.container == "dump-folder"
        assert archive.is_complete


@pytest.mark.spec("MXF-23")
def test_only_names_that_a_list_doubles_are_said_once(folder: Path) -> None:
    print_max(folder, "model.mlp.mlp.act-output", "model.players.layers.0-output", "model.0.0-output")
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/0.0/output", "0/mlp.mlp.act/output", "0/players.layers.0/output"]
    hook_torch(folder.parent / "torch", {"model.layers.layers.0-output": torch.zeros(1)})
    with open_archive(folder.parent / "torch") as archive:
        assert keys(archive) == ["0/layers.layers.0/output"]


@pytest.mark.spec("MXF-24")
def test_the_name_of_the_whole_model_stays_if_a_label_lacks_it(folder: Path) -> None:
    print_max(folder, "model.norm-output", "models.head-output")
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/model.norm/output", "0/models.head/output"]


@pytest.mark.spec("MXF-24")
def test_one_model_of_a_head_and_a_body_loses_one_name(folder: Path) -> None:
    hook_torch(folder, {"model.model.norm-output": torch.zeros(1), "model.lm_head-output": torch.ones(1)})
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/model.norm/output", "0/lm_head/output"]


@pytest.mark.spec("MXF-21")
def test_a_label_that_is_no_layers_is_a_probe_and_told(folder: Path) -> None:
    print_max(folder, "after_rope", "model.norm-output", "model.norm-outputs", "x y")
    with open_archive(folder) as archive:
        assert isinstance(archive, DumpArchive)
        assert set(keys(archive)) == {
            "0/norm/output",
            "0/probe:after_rope/value",
            "0/probe:model.norm-outputs/value",
            "0/probe:x%20y/value",
        }
        assert archive.probes == ("after_rope.max", "model.norm-outputs.max", "x y.max")
        assert archive.run["notes"] == [
            "after_rope.max, model.norm-outputs.max, x y.max are no labels of layers' inputs or outputs: "
            "they are kept as probes."
        ]


@pytest.mark.spec("MXF-30", "MXF-31")
def test_folders_of_steps_keep_the_order_of_their_lists(folder: Path) -> None:
    hook_torch(folder / "0", {"model.z-output": torch.tensor([1.0]), "model.a-output": torch.tensor([2.0])})
    hook_torch(folder / "10", {"model.a-output": torch.tensor([4.0])})
    hook_torch(folder / "2", {"model.a-output": torch.tensor([3.0])})
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/z/output", "0/a/output", "2/a/output", "10/a/output"]
        assert [archive.read(r).tolist() for r in archive.records] == [[1.0], [2.0], [3.0], [4.0]]
        assert archive.is_ordered
    with open_archive(folder / "10") as archive:
        assert keys(archive) == ["0/a/output"]


@pytest.mark.spec("MXF-30")
def test_torch_files_with_labels_are_a_dump_and_others_are_not(folder: Path) -> None:
    torch.save(torch.zeros(1), folder / "model.norm-output.pt")
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/norm/output"]
    torch.save(torch.zeros(1), folder / "logits.pt")
    with open_archive(folder) as archive:
        assert (archive.container, keys(archive)) == ("pt-folder", ["logits", "model.norm-output"])


@pytest.mark.spec("MXF-31")
def test_files_beside_each_other_have_no_order_unless_their_times_are_asked_for(folder: Path) -> None:
    print_max(folder, "model.a-output", "model.b-output", "model.c-output")
    for seconds, name in enumerate("cab"):
        os.utime(folder / f"model.{name}-output.max", ns=(0, seconds * 1000))
    with open_archive(folder) as archive:
        assert (archive.is_ordered, keys(archive)) == (False, ["0/a/output", "0/b/output", "0/c/output"])
    with open_dump(folder, by_time=True) as archive:
        assert (archive.is_ordered, keys(archive)) == (True, ["0/c/output", "0/a/output", "0/b/output"])
        assert "a hint at most" in archive.run["notes"][0]
    os.utime(folder / "model.a-output.max", ns=(0, 0))
    with open_dump(folder, by_time=True) as archive:
        assert not archive.is_ordered
        assert archive.run["notes"] == ["The order is unknown: some files were written at the same time."]


@pytest.mark.spec("MXF-31")
def test_files_that_no_list_names_come_last_and_are_told(folder: Path) -> None:
    tensors = {"model.a-output": torch.zeros(1), "model.b/c-output": torch.zeros(1)}
    hook_torch(folder / "0", tensors, names="model.b/c-output\r\n")
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/b_c/output", "0/a/output"]
        assert archive.run["notes"] == ["0/model.a-output.pt is in no list of names, and last in order."]
        assert archive.is_complete


@pytest.mark.spec("MXF-33")
def test_what_cannot_be_taken_is_reported_and_the_archive_incomplete(folder: Path) -> None:
    print_max(folder, "model.layers.0-output", "model.layers.layers.0-output", "model.good-output")
    (folder / "model.bad-output.max").write_bytes(b"\x93\xf0\x9f\x94\xa5\x2b\x2b\x93\0")
    (folder / "readme.txt").write_text("x")
    (folder / "plots").mkdir()
    with open_archive(folder) as archive:
        assert keys(archive) == ["0/good/output"]
        assert not archive.is_complete
        assert archive.run["error"]["message"].startswith("3 parts of it could not be read: ")
        one, other = "model.layers.0-output.max", "model.layers.layers.0-output.max"
        assert archive.skipped == {
            one: f"means 0/layers.0/output, and so does {other}",
            other: f"means 0/layers.0/output, and so does {one}",
            "model.bad-output.max": "has 9 bytes, expected at least 28 (MXF-1)",
            "plots/": "a folder that is no step",
            "readme.txt": "no .max or .pt file",
        }


@pytest.mark.spec("MXF-33")
def test_names_in_a_list_without_a_file_or_twice_are_told(folder: Path) -> None:
    names = "model.a-output\nmodel.gone-output\nmodel.a-output\n"
    hook_torch(folder / "0", {"model.a-output": torch.zeros(1)}, names=names)
    with open_archive(folder) as archive:
        assert not archive.is_complete
        assert archive.skipped == {
            "0/model.a-output": "tensor_names.txt names it 2 times: one tensor was written over another",
            "0/model.gone-output": "tensor_names.txt names it and there is no such file",
        }


@pytest.mark.spec("MXF-25")
def test_structures_in_a_torch_file_have_a_record_for_each_tensor(folder: Path) -> None:
    hook_torch(folder, {"model.a-output": (torch.tensor([1.0]), {"k/v": torch.tensor([2.0])}, None, 3)})
    with open_archive(folder) as archive:
        assert values(archive) == {"0/a/output.0": [1.0], "0/a/output.1.k%2Fv": [2.0]}
        assert archive.values == {"0/a/output.2": None, "0/a/output.3": 3}


@pytest.mark.spec("MXF-34")
def test_raw_files_are_taken_with_dtype_and_shape_by_glob(folder: Path) -> None:
    (folder / "model.layers.layers.0-output").write_bytes(np.arange(6, dtype="<f4").tobytes())
    (folder / "model.ids-input_0.bin").write_bytes(np.arange(3, dtype="<i8").tobytes())
    specs = [RawSpec.parse(text) for text in ("*-output:float32:2,3", "*-input*:int64:3")]
    with open_dump(folder, raw=[spec for spec in specs if spec]) as archive:
        assert values(archive) == {
            "0/ids/input.0": [0, 1, 2],
            "0/layers.0/output": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        }
        assert archive.is_complete


def verification(folder: Path, *, is_injected: bool) -> None:
    end = "_injected" if is_injected else ""
    print_max(
        folder,
        f"layers.0.mlp.up_proj_input_0{end}",
        "layers.0.mlp.up_proj_output",
        f"embed_tokens_input_0{end}",
        "embed_tokens_output_0",
        "embed_tokens_output_1",
    )
    one = {"index": 0, "shape": [1], "dtype": "float32", "name": "x", "injected": is_injected}
    listed = {
        "embed_tokens": {
            "layer_name": "embed_tokens",
            "inputs": [one],
            "outputs": [one, {**one, "index": 1}],
        },
        "layers.0.mlp.up_proj": {"inputs": [one], "outputs": [one]},
    }
    (folder / "layer_metadata.json").write_text(json.dumps(listed))


@pytest.mark.spec("MXF-22", "MXF-32")
def test_a_side_of_a_layer_verification_is_in_the_order_of_its_layers(folder: Path) -> None:
    verification(folder, is_injected=False)
    with open_archive(folder) as archive:
        assert archive.is_ordered
        assert keys(archive) == [
            "0/embed_tokens/input.0",
            "0/embed_tokens/output.0",
            "0/embed_tokens/output.1",
            "0/layers.0.mlp.up_proj/input.0",
            "0/layers.0.mlp.up_proj/output",
        ]
        assert "injected" not in archive.run
        assert archive.is_complete
        assert not archive.skipped


@pytest.mark.spec("MXF-32")
def test_the_one_output_of_a_layer_may_have_a_number(folder: Path) -> None:
    verification(folder, is_injected=False)
    (folder / "layers.0.mlp.up_proj_output.max").rename(folder / "layers.0.mlp.up_proj_output_0.max")
    with open_archive(folder) as archive:
        assert keys(archive)[-1] == "0/layers.0.mlp.up_proj/output.0"
        assert archive.is_complete
        assert "notes" not in archive.run


@pytest.mark.spec("MXF-22")
def test_a_verification_with_injection_is_an_injected_run(folder: Path) -> None:
    verification(folder, is_injected=True)
    print_max(folder, "layers.0.mlp.up_proj_input_0")  # the model's own value, beside what went in
    with open_archive(folder) as archive:
        assert [(s["site"], s["slot"], s["status"]) for s in archive.run["injected"]["slots"]] == [
            ("embed_tokens", "input.0", "injected"),
            ("layers.0.mlp.up_proj", "input.0", "injected"),
        ]
        assert values(archive)["0/layers.0.mlp.up_proj/input.0"] == [0.0]
        assert archive.is_complete


@pytest.mark.spec("MXF-32")
def test_layers_of_a_verification_without_files_are_told(folder: Path) -> None:
    verification(folder, is_injected=False)
    (folder / "layers.0.mlp.up_proj_output.max").unlink()
    with open_archive(folder) as archive:
        assert archive.skipped == {
            "layers.0.mlp.up_proj_output": "layer_metadata.json names it and there is no such file"
        }
        assert not archive.is_complete
    (folder / "layer_metadata.json").write_text('{"a": 3}')
    with pytest.raises(OSError, match="'a' has no list of objects 'inputs'"):
        open_archive(folder)


@pytest.mark.spec("MXF-35")
@pytest.mark.parametrize("names", [("max_layers", "torch_layers"), ("with_injection", "without_injection")])
def test_a_folder_of_several_runs_is_refused_and_they_are_named(folder: Path, names: tuple[str, str]) -> None:
    for name in names:
        (folder / name).mkdir()
    with pytest.raises(NotAnArchiveError, match="holds several runs, expected one") as caught:
        open_archive(folder)
    assert all(str(folder / name) in str(caught.value.hint) for name in names)


@pytest.mark.spec("MXF-20")
@pytest.mark.parametrize(
    ("key", "label"),
    [
        (Key("layers.0.mlp", "output"), "model.layers.0.mlp-output"),
        (Key("layers.0.mlp", "input.hidden_states", call=1), "model.layers.0.mlp(2)-input_hidden_states"),
        (Key("@root", "output.logits"), "model-output_logits"),
        (Key("a", "output.0.1"), "model.a-output_0_1"),
        (Key("a", "output.1.key"), "model.a-output_1.key"),
        (Key("a%3Ab", "output"), "model.a:b-output"),
    ],
)
def test_a_key_and_its_label_are_one_for_the_other(key: Key, label: str) -> None:
    assert label_of(key) == label
    parsed = parse_label(label)
    assert parsed is not None
    site = parsed.key(0).site
    assert site in (f"model.{key.site}", "model")
    assert (parsed.key(0).slot, parsed.call) == (key.slot, key.call)


@pytest.mark.parametrize("text", ["", "-output", "model-outputs", "model_output", "input", "(2)"])
def test_other_texts_are_no_labels(text: str) -> None:
    assert parse_label(text) is None
