"""Which points a device can capture, and under which module; modules are look-alikes of NxDI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.capture_plan import CapturePlan, PlannedPoint, plan, read_modules, read_points
from tensorcap_formats.errors import NotAnArchiveError, ReadError, UsageError
from tests.support.archives import write_archive

LAYER = """\
layers.N: DemoDecoderLayer
layers.N.self_attn: DemoAttention
layers.N.self_attn.rank_util: SPMDRank
layers.N.self_attn.rotary_emb: RotaryEmbedding
layers.N.self_attn.qkv_proj: GroupQueryAttention_QKV
layers.N.self_attn.qkv_proj.q_proj: ColumnParallelLinear
layers.N.self_attn.o_proj: GroupQueryAttention_O
layers.N.self_attn.o_proj.o_proj: RowParallelLinear
layers.N.mlp: DemoMLP
layers.N.mlp.act_fn: SiLU
layers.N.mlp.up_proj: ColumnParallelLinear
layers.N.mlp.down_proj: RowParallelLinear
layers.N.input_layernorm: DemoRMSNorm
layers.N.post_attention_layernorm: DemoRMSNorm
"""
MODULES = (
    "rank_util: SPMDRank\nembed_tokens: ParallelEmbedding\nlayers: ModuleList\n"
    + LAYER.replace("N", "0")
    + LAYER.replace("N", "1")
    + "norm: DemoRMSNorm\nlm_head: ColumnParallelLinear\nkv_mgr: KVCacheManager\n"
)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    path = tmp_path / "modules.txt"
    path.write_text(MODULES)
    return path


def one(modules: Path, point: str, **settings: Any) -> PlannedPoint:
    (planned,) = plan(modules, points=[point], neuron_config=settings or None).points
    return planned


@pytest.mark.spec("NRN-60")
def test_an_attention_is_captured_at_its_output_projection(modules: Path) -> None:
    planned = one(modules, "layers.1.self_attn")
    assert (planned.status, planned.module) == ("replaced", "layers.1.self_attn.o_proj")
    assert "cos_cache" in planned.reason


@pytest.mark.spec("NRN-60")
def test_an_attention_without_an_output_projection_cannot_be_captured(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("layers.0.attn: DemoAttention\n")
    planned = one(tmp_path / "a.txt", "layers.0.attn")
    assert planned.status == "not-capturable"
    assert "dataclass" in planned.reason


@pytest.mark.spec("NRN-61")
@pytest.mark.parametrize(
    ("point", "reason"),
    [
        pytest.param("layers", "container", id="container"),
        pytest.param("kv_mgr", "asks it for the cache", id="cache"),
        pytest.param("rank_util", "read by a method", id="rank"),
        pytest.param("layers.1.self_attn.rotary_emb", "layer 0 computes", id="later-rotary"),
        pytest.param("layers.2.mlp", "no such module", id="absent"),
        pytest.param("@root", "logits are an output", id="root"),
        pytest.param("0/norm/param.weight", "neither a result nor an argument", id="parameter"),
        pytest.param("layers.0/output.1", "the first result", id="second-result"),
        pytest.param("layers.0.mlp/input.1", "the first argument", id="second-argument"),
    ],
)
def test_what_cannot_be_captured_is_said_with_the_reason(modules: Path, point: str, reason: str) -> None:
    result = plan(modules, points=[point])
    assert result.points[0].status == "not-capturable"
    assert reason in result.points[0].reason
    assert result.modules == []
    assert result.exit_status == 1


@pytest.mark.spec("NRN-61")
def test_zeros_that_would_stand_for_a_module_are_named(modules: Path) -> None:
    assert "zeros of shape [1]" in one(modules, "layers").reason
    assert one(modules, "layers.0.self_attn.rotary_emb").status == "captured"


@pytest.mark.spec("NRN-62")
@pytest.mark.parametrize(
    ("point", "flag"),
    [
        ("layers.0.mlp.up_proj", "mlp_kernel_enabled"),
        ("layers.0.mlp.act_fn", "quantized_mlp_kernel_enabled"),
        ("layers.0.self_attn.qkv_proj.q_proj", "qkv_nki_kernel_enabled"),
        ("layers.0.self_attn.o_proj.o_proj", "out_proj_kernel_enabled"),
        ("layers.0.self_attn.o_proj.o_proj", "attn_block_cte_nki_kernel_enabled"),
    ],
)
def test_what_a_kernel_computes_is_not_called(modules: Path, point: str, flag: str) -> None:
    planned = one(modules, point, **{flag: True})
    assert planned.status == "not-capturable"
    assert "without calling it" in planned.reason
    assert one(modules, point, **{flag: False}).status == "captured"
    assert any("not called if" in remark for remark in one(modules, point).remarks)


@pytest.mark.spec("NRN-62")
@pytest.mark.parametrize(
    ("point", "flag"),
    [
        ("layers.0.post_attention_layernorm", "mlp_kernel_enabled"),
        ("layers.0.input_layernorm", "qkv_kernel_enabled"),
    ],
)
def test_a_norm_that_a_kernel_may_compute_is_captured_with_a_remark(
    modules: Path, point: str, flag: str
) -> None:
    planned = one(modules, point, **{flag: True})
    assert planned.status == "captured"
    assert any("zeros of shape [1] if the kernel computes it too" in remark for remark in planned.remarks)


@pytest.mark.spec("NRN-62")
def test_norms_are_called_beside_kernels_if_sequences_are_parallel(modules: Path) -> None:
    settings = {"mlp_kernel_enabled": True, "sequence_parallel_enabled": True}
    planned = one(modules, "layers.0.post_attention_layernorm", **settings)
    assert planned.status == "captured"
    assert any("part of the tokens" in remark for remark in planned.remarks)
    assert not any("if the kernel computes it" in remark for remark in planned.remarks)


@pytest.mark.spec("NRN-62")
def test_a_kernel_of_token_generation_leaves_context_encoding(modules: Path) -> None:
    planned = one(modules, "layers.0.self_attn", attn_block_tkg_nki_kernel_enabled=True, tp_degree=1)
    assert (planned.status, planned.module) == ("replaced", "layers.0.self_attn.o_proj")
    assert [remark for remark in planned.remarks if "zeros of shape [1] in token generation" in remark]


@pytest.mark.spec("NRN-63")
@pytest.mark.parametrize(
    ("point", "text"),
    [
        ("layers.0.mlp.up_proj", "rank 0's columns"),
        ("layers.0.self_attn.qkv_proj", "rank 0's heads"),
        ("layers.0.mlp.act_fn", "rank 0's heads or columns"),
    ],
)
def test_shards_are_told_unless_there_is_one_rank(modules: Path, point: str, text: str) -> None:
    assert any(text in remark for remark in one(modules, point, tp_degree=8).remarks)
    assert not any(text in remark for remark in one(modules, point, tp_degree=1).remarks)


@pytest.mark.spec("NRN-64")
def test_extra_outputs_are_counted_as_the_configuration_makes_them(modules: Path) -> None:
    result = plan(modules, points=["layers.*.mlp", "layers.0.self_attn", "layers.0.self_attn.o_proj"])
    assert result.config()["tensor_capture_config"] == {
        "modules_to_capture": ["layers.0.mlp", "layers.1.mlp", "layers.0.self_attn.o_proj"],
        "max_intermediate_tensors": None,
        "capture_inputs": False,
    }
    assert (result.extra_outputs, result.exit_status) == (3, 0)
    result = plan(modules, points=["layers.0.mlp", "norm/input.hidden_states", "0/layers.0.mlp:gate/value"])
    assert result.config()["tensor_capture_config"] == {
        "modules_to_capture": ["layers.0.mlp", "norm"],
        "max_intermediate_tensors": 1,
        "capture_inputs": True,
    }
    assert result.extra_outputs == 5  # two results, two arguments, one by hand
    assert "register_tensor('gate'" in result.points[2].reason


@pytest.mark.spec("NRN-64")
def test_points_of_a_mapping_are_those_of_the_target(modules: Path, tmp_path: Path) -> None:
    mapping = {
        "mapping_size": 2,
        "component_mapping": [
            [["model.layers.{i}.mlp"], ["layers.{i}.mlp"]],
            [["model.layers.{i}.self_attn"], ["layers.{i}.self_attn"]],
        ],
        "variables": {"i": ["0", "1"]},
        "reasoning": {"HF": {}, "port": {}},
    }
    (tmp_path / "component_mapping.json").write_text(json.dumps(mapping))
    assert plan(modules, mapping=tmp_path / "component_mapping.json").modules == [
        "layers.0.mlp",
        "layers.1.mlp",
        "layers.0.self_attn.o_proj",
        "layers.1.self_attn.o_proj",
    ]


@pytest.mark.spec("NRN-64")
def test_without_points_all_modules_are_taken_that_each_rank_has_whole(modules: Path) -> None:
    assert plan(modules).modules == [
        "embed_tokens",
        *(
            f"layers.{i}{below}"
            for i in (0, 1)
            for below in (
                "",
                ".self_attn.o_proj",
                ".mlp",
                ".mlp.down_proj",
                ".input_layernorm",
                ".post_attention_layernorm",
            )
        ),
        "norm",
        "lm_head",
    ]
    configured = {"tensor_capture_config": {"modules_to_capture": ["norm", "layers.0.self_attn"]}}
    assert [point.status for point in plan(modules, neuron_config=configured).points] == [
        "captured",
        "replaced",
    ]


@pytest.mark.spec("NRN-64")
def test_patterns_of_vllm_neuron_name_modules_as_well(modules: Path) -> None:
    patterns = {"tensor_capture": {"modules": ["layers.0-1.mlp", r".*o_proj\.o_proj", "norm", "absent"]}}
    result = plan(modules, neuron_config=patterns)
    assert [point.point for point in result.points] == [
        "layers.0.mlp",
        "layers.1.mlp",
        "layers.0.self_attn.o_proj.o_proj",
        "layers.1.self_attn.o_proj.o_proj",
        "norm",
        "absent",
    ]
    assert result.points[-1].status == "not-capturable"


@pytest.mark.spec("NRN-64")
def test_a_plan_says_what_nxdi_requires(modules: Path) -> None:
    notes = plan(modules).notes
    assert any("not run on a device" in note for note in notes)
    assert any("on_device_sampling_config" in note for note in notes)
    notes = plan(modules, neuron_config={"on_device_sampling_config": {"top_k": 1}}).notes
    assert not any("on_device_sampling_config" in note for note in notes)


@pytest.mark.spec("NRN-65")
def test_an_archive_of_a_run_says_what_was_called_and_returned(tmp_path: Path) -> None:
    tensors = {
        "0/norm/input.x": np.zeros(2, "f4"),
        "0/norm/input.residual": np.zeros(2, "f4"),
        "0/norm/output": np.zeros(2, "f4"),
        "0/block/output.hidden": np.zeros(2, "f4"),
        "0/block/output.aux": np.zeros(2, "f4"),
    }
    run = {
        "modules": [{"path": "", "class": "demo.Net"}, {"path": "norm", "class": "demo.Norm"}],
        "points": [{"site": "norm", "status": "captured"}, {"site": "idle", "status": "never-called"}],
    }
    run["modules"] += [{"path": path, "class": f"demo.{path.title()}"} for path in ("block", "idle")]
    path = write_archive(tmp_path / "a.h5", tensors, run=run)
    result: CapturePlan = plan(path, points=["norm/input.x", "norm/input.residual", "block", "idle"])
    first, second, block, idle = result.points
    assert (first.status, first.is_input) == ("captured", True)
    assert second.status == "not-capturable"
    assert any("output.aux" in remark for remark in block.remarks)
    assert "never called it" in idle.reason


@pytest.mark.spec("NRN-65")
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("# modules\nmlp\n\nmlp.up : demo.Linear\n", id="lines"),
        pytest.param('["mlp", "mlp.up"]', id="list"),
        pytest.param('{"mlp": "MLP", "mlp.up": "<class \'demo.Linear\'>"}', id="classes"),
        pytest.param('{"cte": ["mlp"], "tkg": ["mlp", "mlp.up"]}', id="by-submodel"),
        pytest.param(
            '{"name": "model", "type": "Net", "children": [{"name": "mlp", "type": "MLP", "children": '
            '[{"name": "up", "type": "Linear", "children": []}]}]}',
            id="tree",
        ),
        pytest.param(
            '{"type": "Net", "children": [{"names": ["mlp"], "type": "MLP", "children": '
            '[{"names": ["up"], "type": "Linear", "children": []}]}]}',
            id="compressed-tree",
        ),
    ],
)
def test_lists_of_modules_are_read_in_all_forms(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules").write_text(content)
    modules = read_modules(tmp_path / "modules")
    assert list(modules.classes) == ["mlp", "mlp.up"]
    assert modules.classes["mlp.up"] in ("Linear", "")


@pytest.mark.spec("NRN-65")
@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        pytest.param("a b c d\n: x\n", ReadError, r"modules:2: found ': x'", id="line"),
        pytest.param("# nothing\n", UsageError, "lists no module", id="empty"),
        pytest.param("[1, 2]", ReadError, "is no list of modules", id="numbers"),
        pytest.param("{", ReadError, "is no JSON", id="json"),
    ],
)
def test_a_list_that_is_none_is_refused(
    tmp_path: Path, content: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "modules").write_text(content)
    with pytest.raises(error, match=message):
        read_modules(tmp_path / "modules")


@pytest.mark.spec("NRN-65")
def test_other_bad_input_is_named(modules: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"layers\.\*\.moe: matches none of 34 modules"):
        plan(modules, points=["layers.*.moe"])
    with pytest.raises(NotAnArchiveError, match="absent: cannot be read"):
        plan(tmp_path / "absent")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ReadError, match=r"config\.json: is no JSON object"):
        plan(modules, neuron_config=tmp_path / "config.json")
    (tmp_path / "points").write_text("norm  # last\n\nlayers.*\n")
    assert read_points(tmp_path / "points") == ["norm", "layers.*"]


@pytest.mark.spec("NRN-65")
def test_settings_are_read_with_and_without_their_name(modules: Path, tmp_path: Path) -> None:
    for content in ({"mlp_kernel_enabled": True}, {"neuron_config": {"mlp_kernel_enabled": True}}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        (planned,) = plan(
            modules, points=["layers.0.mlp.up_proj"], neuron_config=tmp_path / "config.json"
        ).points
        assert planned.status == "not-capturable"
