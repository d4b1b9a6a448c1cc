"""Stages 0, 2, 3 and 4 on a port of parallel layers, on one rank and on two, right and with mistakes.

The port is `tests/neuron/lookalike`; each mistake of it is in one module that its function names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tensorcap.equivalence import (
    FILE,
    Experiment,
    StageState,
    new_settings,
    run_stage,
    run_stages,
    stage_named,
    write_settings,
)
from tensorcap.equivalence.parallel_modules import extra_roundings
from tensorcap_formats.run_info import ModuleInfo, TensorInfo

ROOT = Path(__file__).parents[2]
LOOKALIKE = ROOT / "tests" / "neuron" / "lookalike"
SCHEMAS = json.loads((ROOT / "specs" / "equivalence.schema.json").read_text())
MISTAKES = {  # on one rank: the primary fault, and its cause
    "missing_activation": ("model.layers.1.mlp.act_fn", "missing_algorithm"),
    "wrong_theta": ("model.rotary_emb", "missing_algorithm"),
    "low_variance": ("model.layers.1.post_attention_layernorm", "precision_ordering"),
    "doubled_residual": ("model.layers.0", "missing_algorithm"),
    "not_finite": ("model.norm", "missing_algorithm"),
}
PATCH = '''
def apply_activation_patch():
    """The activation that is missing."""
    from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaMLP
    from torch.nn import functional

    if getattr(NeuronLlamaMLP, "_patched", False):
        return

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)

    NeuronLlamaMLP.forward = forward
    NeuronLlamaMLP._patched = True
'''


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """Processes that a stage starts import the same code."""
    paths = [*(str(ROOT / part) for part in (".", "formats", "cli")), str(LOOKALIKE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.syspath_prepend(str(LOOKALIKE))
        yield


def validate(value: Any, kind: str) -> None:
    """Hold a file against its schema."""
    jsonschema.validate(value, {**SCHEMAS, "$ref": f"#/$defs/{kind}"})


def make(
    folder: Path, function: str, *, file: str = "port.py", source: str = "reference", **run: Any
) -> Experiment:
    """An experiment on the port."""
    folder.mkdir()
    parameters = {
        "source_model_path": f"{LOOKALIKE / 'port.py'}:{source}",
        "target_modeling_file": str(LOOKALIKE / file),
        "target_causal_class": function,
    }
    settings = {"target_framework": "neuron", "plots": False, **run}
    write_settings(folder / FILE, new_settings(folder, parameters, settings))
    return Experiment.open(folder)


def localized(experiment: Experiment) -> tuple[StageState, Any]:
    """The state of stage 2, and the content of the stage 3 file."""
    state = run_stage(experiment, stage_named("components"))
    run_stage(experiment, stage_named("localize"))
    return state, json.loads((experiment.folder / "results/stage3.json").read_text())


def content(experiment: Experiment, name: str) -> Any:
    """The content of a JSON file of an experiment."""
    return json.loads((experiment.folder / name).read_text())


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The right port on one rank, through stages 0, 2 and 3."""
    experiment = make(tmp_path_factory.mktemp("right") / "exp", "port", num_tokens=8)
    for name in ("tree", "map", "class-divergence", "components", "localize"):
        run_stage(experiment, stage_named(name))
    return experiment


@pytest.mark.slow
@pytest.mark.spec("EQV-20", "EQV-21", "EQV-22", "EQV-41")
def test_stage_0_writes_trees_the_mapping_and_the_report(right: Experiment) -> None:
    tree = content(right, "model_tree/model_tree_target.json")
    validate(tree, "compressed_tree")
    full = content(right, "model_tree/model_tree_source_full.json")
    validate(full, "full_tree")
    assert (full["name"], full["type"]) == ("model", "LlamaForCausalLM")
    paths = (right.folder / "model_tree/model_tree_target_paths.txt").read_text().splitlines()
    assert paths[:3] == ["embed_tokens", "layers", "layers.0"]
    mapping = content(right, "component_mapping.json")
    validate(mapping, "component_mapping")
    assert [["model.layers.{i}.mlp.down_proj"], ["layers.{i}.mlp.down_proj"]] in mapping["component_mapping"]
    assert mapping["variables"]["i"] == ["0", "1"]
    assert "the same name" in mapping["reasoning"]["ref"]["model.layers.{i}.mlp.down_proj"]
    report = content(right, "class_divergence_report.json")
    validate(report, "class_divergence_report")


@pytest.mark.slow
@pytest.mark.spec("EQV-31", "EQV-32", "EQV-33", "EQV-41")
def test_the_right_port_passes_component_by_component(right: Experiment) -> None:
    assert run_stage(right, stage_named("components")).state == "passed"
    stage2 = content(right, "results/stage2.json")
    validate(stage2, "stage2")
    validate(content(right, "results/stage3.json"), "stage3")
    results = {one["component"]: one for one in stage2["results"]}
    kinds = [one["kind"] for one in stage2["results"]]
    assert list(dict.fromkeys(kinds)) == [
        "norm",
        "embedding",
        "activation",
        "linear",
        "rotary",
        "mlp",
        "attention",
        "head",
        "layer",
        "model",
    ]
    assert stage2["total"] == stage2["passed"] == 32
    assert results["model.layers.1.input_layernorm"]["r_ratio"] == 1.0
    test = (right.folder / "tests/test_06_mlp.py").read_text()
    assert "def test_model_layers_0_mlp(component):" in test
    assert '"""LlamaMLP of the source: 2x12x64."""' in test


@pytest.mark.slow
@pytest.mark.spec("EQV-3", "EQV-4")
def test_an_edited_test_counts_and_nothing_else_is_done_again(right: Experiment) -> None:
    captured = (right.folder / "captures/target.h5").stat().st_mtime_ns
    test = right.folder / "tests/test_00_norm.py"
    text = test.read_text()
    line = "    model_norm.compare(model_norm.tensors('0/model.norm/output'))\n"
    assert line in text
    edited = (
        "    three = model_norm.tensors('0/model.norm/output')\n"
        "    model_norm.compare(three._replace(port=1.01 * three.port))\n"
    )
    try:
        test.write_text(text.replace(line, edited))
        state, stage3 = localized(right)
        assert state.state == "failed"
        assert stage3["primary_fault"]["component"] == "model.norm"
        test.write_text(text.replace(line, "    raise OSError('no tensor')\n"))
        state, stage3 = localized(right)
        assert stage3["primary_fault"]["description"] == "OSError: no tensor."
        assert run_stage(right, stage_named("component-tests")).edited == ("tests/test_00_norm.py",)
    finally:
        test.write_text(text)
    assert localized(right)[0].state == "passed"
    assert (right.folder / "captures/target.h5").stat().st_mtime_ns == captured


@pytest.mark.slow
@pytest.mark.spec("EQV-31", "EQV-32", "EQV-40")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_at_stage_2_and_is_named(tmp_path: Path, name: str) -> None:
    component, cause = MISTAKES[name]
    state, stage3 = localized(make(tmp_path / "exp", name, file="one_rank_mistakes.py"))
    assert state.state == "failed"
    primary = stage3["primary_fault"]
    assert (primary["component"], primary["root_cause"]) == (component, cause)
    assert stage3["num_faults"] == 1  # what it lies within is explained by it


@pytest.mark.slow
@pytest.mark.spec("EQV-32")
@pytest.mark.parametrize("name", ["padded", "padding"])
def test_padding_is_compared_by_nobody(tmp_path: Path, name: str) -> None:
    state, stage3 = localized(make(tmp_path / "exp", name, source="padded_reference"))
    assert state.state == ("passed" if name == "padded" else "failed")
    assert [one["component"] for one in stage3["faults"]] == ["model.layers.1.self_attn"] * (
        name == "padding"
    )


@pytest.mark.slow
@pytest.mark.spec("EQV-31")
def test_a_small_mistake_shows_in_a_wide_precision(tmp_path: Path) -> None:
    experiment = make(tmp_path / "exp", "epsilon", dtype="float32", reference_dtype="float64")
    _, stage3 = localized(experiment)
    assert stage3["primary_fault"]["component"] == "model.layers.0.input_layernorm"


@pytest.mark.slow
@pytest.mark.spec("EQV-34")
def test_without_a_wide_precision_arguments_that_are_put_off_are_the_baseline(
    tmp_path: Path,
) -> None:
    state, _ = localized(make(tmp_path / "right", "port", reference_dtype=""))
    assert state.state == "passed"
    results = content(Experiment.open(tmp_path / "right"), "results/stage2.json")["results"]
    leaves = [one["r_ratio"] for one in results if one["kind"] not in ("layer", "model")]
    assert max(leaves) < 0.85  # a machine epsilon is more than a rounding


@pytest.mark.slow
@pytest.mark.spec("EQV-50", "EQV-51")
def test_a_patch_is_written_filled_in_and_shown_side_by_side(tmp_path: Path) -> None:
    experiment = make(tmp_path / "exp", "missing_activation", file="one_rank_mistakes.py")
    state = run_stage(experiment, stage_named("patch"))
    skeleton = experiment.folder / "patches/model_layers_1_mlp_act_fn.py"
    assert state.state == "failed"
    assert state.next[0] == f"Fill in {skeleton}, then tcap equivalence patch {experiment.folder}."
    assert "from torch.nn.modules.linear import Identity" in skeleton.read_text()
    compile(skeleton.read_text(), str(skeleton), "exec")
    skeleton.unlink()
    (experiment.folder / "patches/mine.py").write_text(PATCH)
    state = run_stage(experiment, stage_named("patch"))
    assert state.state == "passed"
    assert state.result is not None
    assert "Not in the patched port, and so not tested: model.layers.0.mlp.act_fn" in state.result.words[-1]
    stage4 = content(experiment, "results/stage4.json")
    validate(stage4, "stage4")
    mlp = next(one for one in stage4["results"] if one["component"] == "model.layers.1.mlp")
    assert (mlp["passed_before"], mlp["passed_after"]) == (False, True)
    assert mlp["r_ratio_before"] > 100 > 1.2 > mlp["r_ratio_after"]


@pytest.mark.slow
@pytest.mark.spec("EQV-10", "EQV-33")
def test_two_ranks_are_one_port(tmp_path: Path) -> None:
    experiment = make(tmp_path / "exp", "port", tp=2)
    state, stage3 = localized(experiment)
    run_stage(experiment, stage_named("tree"))
    assert not list((experiment.folder / "captures").glob("*rank*"))
    assert (state.state, stage3["faults"]) == ("passed", [])
    results = {one["component"]: one for one in content(experiment, "results/stage2.json")["results"]}
    assert (
        results["model.layers.1.mlp.up_proj"]["limit"]
        < 1.3
        < results["model.layers.1.mlp.down_proj"]["limit"]
    )


@pytest.mark.slow
@pytest.mark.spec("EQV-5")
def test_the_right_port_passes_all_stages(right: Experiment) -> None:
    listed = list(run_stages(right))
    assert [(one.stage.name, one.state) for one in listed] == [
        ("capture", "done"),
        ("tree", "done"),
        ("map", "done"),
        ("class-divergence", "done"),
        ("smoke", "passed"),
        ("component-tests", "done"),
        ("components", "passed"),
        ("forced", "passed"),
    ]


@pytest.mark.spec("EQV-33")
@pytest.mark.parametrize(("count", "extra"), [(1, 0.0), (2, 1.0), (4, 2.25)])
def test_sums_over_ranks_are_rounded_more_often(count: int, extra: float) -> None:
    # of four ranks: each part once, then sums of 2, 3 and 4 quarters, (2 + 3 + 4) / 4, in the place of one
    plain = ModuleInfo("mlp.down", "neuronx.RowParallelLinear")
    biased = ModuleInfo("attn.o", "neuronx.RowParallelLinear", parameters={"bias": TensorInfo()})
    modules = {"mlp.down": plain, "attn.o": biased, "attn.q": ModuleInfo("attn.q", "ColumnParallelLinear")}
    sites = ["mlp", "mlp.down", "attn.o", "attn.q", "@root"]
    assert extra_roundings(sites, modules, count) == {
        "mlp": extra,
        "mlp.down": extra,
        "attn.o": extra + 1,
        "attn.q": 0,
        "@root": 2 * extra + 1,
    }
