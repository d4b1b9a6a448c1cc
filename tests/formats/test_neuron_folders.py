"""Folders that NxDI and vllm-neuron write, made byte by byte after their documented layouts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, UnsafeFileError, UsageError
from tensorcap_formats.foreign import NeuronArchive
from tensorcap_formats.open import open_archive
from tests.support.torch_bytes import (
    Tensor,
    bfloats,
    floats,
    integers,
    write_npy,
    write_torch,
)


def capture(folder: Path, tensors: Mapping[str, Tensor], **changes: Mapping[str, Any]) -> None:
    """Files of NxDI's hook with their metadata; `changes` alter entries, by the name of the file."""
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        write_torch(folder / f"captured_tensors_{name}.pt", tensor)
        phase, _, step, rest = name.split("_", 3)
        entry = {
            "step": int(step),
            "phase": phase,
            "tensor_type": "manual" if rest.startswith("manual") else rest.rpartition("_")[2],
            "tensor_shape": list(tensor.shape),
            "tensor_dtype": f"torch.{tensor.dtype}",
            "timestamp": 1754000000.5,
        }
        if rest.startswith("manual"):
            entry["tensor_index"] = int(rest.rpartition("_")[2])
        else:
            entry["module_name"] = rest.removeprefix("module_").rpartition("_")[0]
        entries[f"captured_tensors_{name}.pt"] = {**entry, **changes.get(name, {})}
    session = {"created_at": 1754000000.0, "version": "1.0"}
    text = json.dumps({"capture_session": session, "tensors": entries}, indent=2)
    (folder / "capture_metadata.json").write_text(text)


def opened(path: Path) -> NeuronArchive:
    archive = open_archive(path)
    assert isinstance(archive, NeuronArchive)
    return archive


def keys(archive: Archive) -> list[str]:
    return [record.key.text for record in archive.records]


def value(archive: Archive, key: str) -> Any:
    record = archive.get(key)
    return decode(archive.read(record), record.dtype).tolist()


@pytest.mark.spec("NRN-70", "NRN-71")
def test_captured_tensors_become_keys_with_phases(tmp_path: Path) -> None:
    capture(
        tmp_path,
        {
            "cte_step_1_module_layers.0.mlp_output": floats(*range(6), shape=(1, 3, 2)),
            "cte_step_1_module_layers.0.mlp_input": floats(*range(6), shape=(1, 3, 2)),
            "tkg_step_2_module_layers.0.mlp_output": bfloats(1.5, -2.0, shape=(1, 1, 2)),
            "tkg_step_2_manual_tensor_0": integers(7, dtype="int64"),
        },
    )
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == [
        "0/layers.0.mlp/input.0",
        "0/layers.0.mlp/output",
        "1/layers.0.mlp/output",
        "1/probe:manual_tensor_0/value",
    ]
    assert archive.container == "neuron-captures"
    assert value(archive, "1/layers.0.mlp/output") == [[[1.5, -2.0]]]
    assert archive.info.phases == ("prefill", "decode")
    assert archive.info.framework == "neuron"
    assert archive.is_complete
    assert not archive.is_ordered
    assert "rank 0" in archive.info.notes[0]


@pytest.mark.spec("NRN-72")
def test_zeros_that_stand_for_no_tensor_are_left_out_and_said(tmp_path: Path) -> None:
    capture(
        tmp_path,
        {
            "cte_step_1_module_layers_output": bfloats(0.0),
            "cte_step_1_module_norm_output": bfloats(3.0),
            "cte_step_1_module_norm_input": bfloats(0.0),
            "cte_step_1_module_scale_output": floats(0.0),
            "cte_step_1_module_bias_output": bfloats(0.0, 1.0),
            "cte_step_1_module_mask_output": bfloats(0.0, shape=(1, 1)),
            "cte_step_1_manual_tensor_0": bfloats(0.0),
            "cte_step_1_manual_tensor_1": bfloats(float("nan")),
            "cte_step_1_module_gate_output": bfloats(float("nan")),
        },
    )
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == [
        "0/bias/output",
        "0/gate/output",
        "0/mask/output",
        "0/norm/output",
        "0/probe:manual_tensor_0/value",
        "0/scale/output",
    ]
    assert sorted(archive.uncaptured) == ["0/layers/output", "0/norm/input.0"]
    points = {(point.site, point.slots): point for point in archive.info.points}
    assert points["layers", ()].status == "not-capturable"
    assert "zeros of shape [1]" in points["layers", ()].reason
    assert points["norm", ("input.0",)].status == "not-capturable"
    assert points["norm", ()].status == "captured"
    assert "NaN of shape [1]" in archive.skipped["captured_tensors_cte_step_1_manual_tensor_1.pt"]


@pytest.mark.spec("NRN-73")
def test_a_second_prompt_is_a_prefill_though_it_is_named_token_generation(tmp_path: Path) -> None:
    shapes = {1: (1, 4, 2), 2: (1, 1, 2), 3: (1, 4, 2), 4: (1, 1, 2)}
    tensors = {
        f"{'cte' if step == 1 else 'tkg'}_step_{step}_module_norm_output": floats(
            *range(shape[1] * 2), shape=shape
        )
        for step, shape in shapes.items()
    }
    capture(tmp_path, tensors)
    archive = opened(tmp_path)
    assert archive.info.phases == ("prefill", "decode", "prefill", "decode")
    assert any(note.startswith("Step 2 is named token generation") for note in archive.info.notes)


@pytest.mark.spec("NRN-73")
def test_a_prompt_of_one_token_is_no_second_prompt(tmp_path: Path) -> None:
    names = ("cte_step_1_module_norm_output", "tkg_step_2_module_norm_output")
    capture(tmp_path, {name: floats(1, 2, shape=(1, 1, 2)) for name in names})
    assert opened(tmp_path).info.phases == ("prefill", "decode")


@pytest.mark.spec("NRN-71")
def test_files_that_contradict_the_metadata_are_left_out(tmp_path: Path) -> None:
    good, wide, long = (f"cte_step_1_module_{name}_output" for name in ("good", "wide", "long"))
    changes: dict[str, dict[str, Any]] = {
        wide: {"tensor_dtype": "torch.bfloat16"},
        long: {"tensor_shape": [2]},
    }
    capture(tmp_path, {good: floats(1), wide: floats(1), long: floats(1)}, **changes)
    entries = json.loads((tmp_path / "capture_metadata.json").read_text())
    entries["tensors"]["captured_tensors_cte_step_1_module_gone_output.pt"] = {"step": 1}
    (tmp_path / "capture_metadata.json").write_text(json.dumps(entries))
    write_torch(tmp_path / "captured_tensors_cte_step_1_module_extra_output.pt", floats(2))
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == ["0/extra/output", "0/good/output"]
    assert not archive.is_complete
    problems = {name.split("_module_")[1]: reason for name, reason in archive.problems.items()}
    assert problems["wide_output.pt"].startswith("is float32 of shape [1], expected bfloat16 of [1]")
    assert problems["long_output.pt"].startswith("is float32 of shape [1], expected float32 of [2]")
    assert problems["gone_output.pt"] == "capture_metadata.json names it and there is no such file"
    assert any("does not name" in note for note in archive.info.notes)


@pytest.mark.spec("NRN-71")
@pytest.mark.parametrize("content", ["[]", "{", '{"tensors": []}', '{"tensors": {"a": 1}}'])
def test_metadata_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    write_torch(tmp_path / "captured_tensors_cte_step_1_module_a_output.pt", floats(1))
    (tmp_path / "capture_metadata.json").write_text(content)
    with pytest.raises(CorruptArchiveError, match=r"capture_metadata\.json: (is|has) "):
        open_archive(tmp_path)


@pytest.mark.spec("NRN-74")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layers.0.mlp_output", "0/layers.0.mlp/output"),
        ("layers.0.self_attn_output_0", "0/layers.0.self_attn/output.0"),
        ("layers.0_output_0_1", "0/layers.0/output.0.1"),
        ("norm_output_last_hidden_state", "0/norm/output.last_hidden_state"),
        ("layers.0.mlp_inputs_0", "0/layers.0.mlp/input.0"),
        ("layers.0_inputs_kwargs_attention_mask", "0/layers.0/input.attention_mask"),
        ("layers.0_inputs_kwargs_position_embeddings_1", "0/layers.0/input.position_embeddings.1"),
        ("layers.0_inputs_kwargs_x2", "0/layers.0/input.x2"),
        ("layers.0.attention.output_output", "0/layers.0.attention.output/output"),
        ("layers.0.attn_output_output", "0/layers.0.attn_output/output"),
    ],
)
def test_files_of_eager_captures_become_keys(tmp_path: Path, name: str, key: str) -> None:
    write_torch(tmp_path / f"captured_tensors_cte_step_1_module_{name}.pt", floats(1, 2))
    archive = opened(tmp_path)
    assert keys(archive) == [key]
    assert archive.info.framework == "torch"
    assert archive.info.phases == ("prefill",)


@pytest.mark.spec("NRN-70")
def test_a_link_out_of_the_folder_is_refused_and_other_files_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    write_torch(folder / "captured_tensors_cte_step_1_module_a_output.pt", floats(1))
    (folder / "README").write_text("hello")
    assert opened(folder).skipped == {"README": "no tensor of a capture, by its name"}
    write_torch(tmp_path / "b.pt", floats(1))
    (folder / "captured_tensors_cte_step_1_module_b_output.pt").symlink_to(tmp_path / "b.pt")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside"):
        open_archive(folder)


@pytest.mark.spec("NRN-75")
def test_saved_inputs_are_named_arguments_of_prefill_and_decode(tmp_path: Path) -> None:
    context = (
        integers(5, 6, 0, shape=(1, 3)),
        integers(1, 1, 0, shape=(1, 3)),
        integers(0, 1, 2, shape=(1, 3)),
    )
    token = (
        integers(7, shape=(1, 1)),
        integers(1, 1, 1, shape=(1, 3)),
        integers(2, shape=(1, 1)),
        integers(0),
    )
    cache = bfloats(1.0, 2.0, shape=(1, 1, 1, 2))
    write_torch(
        tmp_path / "saved_inputs_cte_output_0.pt", (*context, integers(0), Tensor("float32", (0,), b""))
    )
    write_torch(tmp_path / "saved_inputs_tkg_without_kv_cache_output_1.pt", token)
    write_torch(tmp_path / "saved_inputs_tkg_with_kv_cache_output_1.pt", (*token, cache, cache))
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == [
        "0/@root/input.attention_mask",
        "0/@root/input.input_ids",
        "0/@root/input.position_ids",
        "0/@root/input.seq_ids",
        "1/@root/given.kv_cache.0",
        "1/@root/given.kv_cache.1",
        "1/@root/input.attention_mask",
        "1/@root/input.input_ids",
        "1/@root/input.position_ids",
        "1/@root/input.seq_ids",
    ]
    assert value(archive, "0/@root/input.input_ids") == [[5, 6, 0]]
    assert archive.info.phases == ("prefill", "decode")
    assert "an empty tensor" in archive.skipped["saved_inputs_cte_output_0.pt: 4"]
    assert "the same inputs" in archive.skipped["saved_inputs_tkg_without_kv_cache_output_1.pt"]


@pytest.mark.spec("NRN-75")
def test_inputs_that_were_saved_beside_captured_tensors_are_of_the_same_steps(tmp_path: Path) -> None:
    capture(
        tmp_path,
        {
            "cte_step_1_module_norm_output": floats(*range(6), shape=(1, 3, 2)),
            "tkg_step_2_module_norm_output": floats(1, 2, shape=(1, 1, 2)),
        },
    )
    write_torch(tmp_path / "saved_inputs_cte_output_0.pt", (integers(5, 6, 0, shape=(1, 3)),))
    write_torch(tmp_path / "saved_inputs_tkg_without_kv_cache_output_1.pt", (integers(7, shape=(1, 1)),))
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == [
        "0/@root/input.input_ids",
        "0/norm/output",
        "1/@root/input.input_ids",
        "1/norm/output",
    ]
    assert archive.info.phases == ("prefill", "decode")
    assert archive.container == "neuron-captures"
    assert archive.skipped == {}


@pytest.mark.spec("NRN-75")
def test_saved_inputs_of_something_else_are_a_problem(tmp_path: Path) -> None:
    write_torch(tmp_path / "saved_inputs_cte_output_0.pt", floats(1))
    archive = opened(tmp_path)
    assert "expected the arguments of a call" in archive.problems["saved_inputs_cte_output_0.pt"]
    assert not archive.is_complete


@pytest.mark.spec("NRN-76")
def test_snapshots_have_a_step_for_each_graph_and_bits_without_a_dtype(tmp_path: Path) -> None:
    context = tmp_path / "context_encoding_model/_tp0_bk1/request0/rank0"
    write_npy(context / "input0.npy", "<i4", (1, 2), struct.pack("<2i", 5, 6))
    write_npy(context / "input10.npy", "|V1", (2,), b"\x38\xc0")  # 1 and -2 in e4m3fn
    write_npy(context / "input2.npy", "|V2", (2,), struct.pack("<2H", 0x3F80, 0xC000))  # 1 and -2
    for token in (10, 9):
        folder = tmp_path / f"token_generation_model/_tp0_bk0/request1/batch0_token{token}/rank0"
        write_npy(folder / "input0.npy", "<i4", (1,), struct.pack("<i", token))
    archive = opened(tmp_path)
    assert keys(archive) == [
        "0/@root/input.0",
        "0/@root/input.2",
        "0/@root/input.10",
        "1/@root/input.0",
        "2/@root/input.0",
    ]
    assert archive.get("0/@root/input.2").dtype.name == "bfloat16"
    assert value(archive, "0/@root/input.2") == [1.0, -2.0]
    assert archive.get("0/@root/input.10").dtype.name == "float8_e4m3fn"
    assert value(archive, "0/@root/input.10") == [1.0, -2.0]
    assert (value(archive, "1/@root/input.0"), value(archive, "2/@root/input.0")) == ([9], [10])
    assert archive.info.phases == ("prefill", "decode", "decode")
    assert "Step 0 is context_encoding_model/_tp0_bk1/request0." in archive.info.notes
    assert keys(opened(tmp_path / "token_generation_model")) == ["0/@root/input.0", "1/@root/input.0"]


@pytest.mark.spec("NRN-76")
def test_snapshots_in_pickles_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "token_generation_model/_tp0_bk0/request0"
    write_npy(folder / "rank0/input0.npy", "<f4", (1,), struct.pack("<f", 1))
    (folder / "inp-001.p").write_bytes(b"\x80\x04.")
    archive = opened(tmp_path)
    assert (
        "take snapshots as NUMPY_IMAGES"
        in archive.problems["token_generation_model/_tp0_bk0/request0/inp-001.p"]
    )
    assert keys(archive) == ["0/@root/input.0"]


@pytest.mark.spec("NRN-76")
def test_bits_without_a_dtype_elsewhere_stay_unread(tmp_path: Path) -> None:
    write_npy(tmp_path / "a/x.npy", "|V2", (1,), b"\x80\x3f")
    with (
        open_archive(tmp_path / "a") as archive,
        pytest.raises(Exception, match="does not tell what its bytes"),
    ):
        archive.read(archive.records[0])


def write_tree(folder: Path, *, metadata: bool) -> None:
    """Two ranks, two requests one after the other; numbers of decode steps count on over requests."""
    steps = {
        "prefill_s4_0": (["a"], [0, 1, 2, 0]),
        "decode_b1_0": (["a"], [3]),
        "decode_b1_1": (["a"], [4]),
        "prefill_s4_1": (["b"], [0, 1, 0, 0]),
        "decode_b1_2": (["b"], [2]),
    }
    for number, (name, (requests, positions)) in enumerate(steps.items()):
        for rank in (0, 1):
            write_torch(folder / name / "model.layers.0.mlp" / f"rank{rank}.pt", floats(number, rank))
            write_torch(folder / name / "manual.gate" / f"rank{rank}.pt", floats(number))
        if metadata:
            content = {"req_ids": requests, "positions": positions, "dp_rank": 0}
            (folder / name / f"{name}_meta.json").write_text(json.dumps(content, indent=2))


@pytest.mark.spec("NRN-77")
@pytest.mark.parametrize(
    ("metadata", "order", "phases"),
    [
        (True, [0, 1, 2, 3, 4], ("prefill", "decode", "decode", "prefill", "decode")),
        (False, [0, 3, 1, 2, 4], ("prefill", "prefill", "decode", "decode", "decode")),
    ],
)
def test_trees_of_ranks_have_ranks_and_steps(
    tmp_path: Path, metadata: bool, order: list[int], phases: tuple[str, ...]
) -> None:
    write_tree(tmp_path / "dp0", metadata=metadata)
    archive = opened(tmp_path)
    assert archive.ranks == (0, 1)
    assert sorted(keys(archive)) == sorted(
        f"{rank}{step}/{rest}"
        for rank in ("", "rank1/")
        for step in range(5)
        for rest in ("model.layers.0.mlp/output", "probe:gate/value")
    )
    assert [value(archive, f"{step}/model.layers.0.mlp/output")[0] for step in range(5)] == order
    assert archive.info.phases == phases
    assert "Step 0 is dp0/prefill_s4_0." in archive.info.notes
    assert archive.skipped == {}


@pytest.mark.spec("NRN-77")
def test_one_rank_is_an_archive_without_ranks_in_its_keys(tmp_path: Path) -> None:
    write_tree(tmp_path / "dp0", metadata=True)
    rank = opened(tmp_path).of_rank(1)
    assert {record.key.rank for record in rank.records} == {0}
    assert value(rank, "0/model.layers.0.mlp/output") == [0.0, 1.0]
    assert rank.run["ranks"] == {"rank": 1, "count": 2}
    with pytest.raises(UsageError, match="has no rank 2, expected one of 0, 1"):
        opened(tmp_path).of_rank(2)


@pytest.mark.spec("NRN-77")
def test_a_tree_of_several_runs_is_refused(tmp_path: Path) -> None:
    for run in ("dp0", "dp1", "draft/dp0"):
        write_tree(tmp_path / run, metadata=False)
    with pytest.raises(NotAnArchiveError, match="holds 3 runs, expected one") as caught:
        open_archive(tmp_path)
    assert str(tmp_path / "draft/dp0") in str(caught.value.hint)
    assert opened(tmp_path / "dp1").ranks == (0, 1)


def write_call(folder: Path, inputs: Mapping[int, tuple[str, list[int]]], **metadata: Any) -> None:
    """The `meta.json` of a call."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "hash": folder.parts[-3],
        "format": "npy",
        "global_rank": 0,
        "tp_rank": 0,
        "dp_rank": 0,
        "call_index": 0,
        "selected_by": ["call_index"],
        "inputs": [{"index": i, "dtype": dtype, "shape": shape} for i, (dtype, shape) in inputs.items()],
        "global_step": None,
        "is_prompt": None,
        "matches": [],
        "req_ids": [],
        "positions": [],
    }
    (folder / "meta.json").write_text(json.dumps(content | metadata, indent=2, sort_keys=True))


@pytest.mark.spec("NRN-79")
def test_snapshots_with_metadata_have_its_dtypes_and_steps(tmp_path: Path) -> None:
    for rank in (0, 1):
        decode = tmp_path / "aa11" / f"rank{rank}" / "call0"
        write_npy(decode / "tensor0.npy", "|V1", (2,), b"\x3c\xc0")  # 1 and -2 in e5m2
        write_npy(decode / "tensor10.npy", "|V2", (1,), b"\x80\x3f")
        inputs = {0: ("torch.float8_e5m2", [2]), 10: ("torch.bfloat16", [1])}
        write_call(decode, inputs, global_step=7, is_prompt=False)
    prompt = tmp_path / "bb22/rank0/call3"
    write_torch(prompt / "tensor0.pt", integers(5, 6))
    write_call(prompt, {0: ("torch.int32", [2])}, global_step=6, is_prompt=True, format="pt")
    archive = opened(tmp_path)
    assert sorted(keys(archive)) == [
        "0/@root/input.0",
        "1/@root/input.0",
        "1/@root/input.10",
        "rank1/1/@root/input.0",
        "rank1/1/@root/input.10",
    ]
    assert archive.get("1/@root/input.0").dtype.name == "float8_e5m2"
    assert value(archive, "rank1/1/@root/input.0") == [1.0, -2.0]
    assert value(archive, "0/@root/input.0") == [5, 6]
    assert archive.info.phases == ("prefill", "decode")
    assert "Step 1 is call 0 of aa11, of step 7 of the model." in archive.info.notes
    assert keys(opened(tmp_path / "bb22")) == ["0/@root/input.0"]


@pytest.mark.spec("NRN-79")
def test_snapshots_that_contradict_their_metadata_are_left_out(tmp_path: Path) -> None:
    call = tmp_path / "aa11/rank0/call0"
    write_npy(call / "tensor0.npy", "<f4", (2,), bytes(8))
    write_npy(call / "tensor1.npy", "<f4", (2,), bytes(8))
    write_call(call, {0: ("torch.float32", [2]), 1: ("torch.float32", [3]), 2: ("torch.float32", [1])})
    bare = tmp_path / "aa11/rank0/call1"
    write_npy(bare / "tensor0.npy", "<f4", (1,), bytes(4))
    archive = opened(tmp_path)
    assert keys(archive) == ["0/@root/input.0", "1/@root/input.0"]
    contradiction = archive.problems["aa11/rank0/call0/tensor1.npy"]
    assert contradiction.startswith("is float32 of shape [2], expected float32 of [3]")
    assert "there is no such file" in archive.problems["aa11/rank0/call0/tensor2"]
    assert "aa11/rank0/call1/meta.json" in archive.problems
    assert archive.info.phases == ("", "")
