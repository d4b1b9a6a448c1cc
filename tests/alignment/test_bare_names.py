"""Results that another runtime saved under bare names, held against a run that has steps, sites and slots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Aligned, align
from tensorcap.alignment.names import names_results
from tensorcap.comparison import compare
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

DRAWN = np.random.default_rng(7).standard_normal((8, 4, 16)).astype(np.float32)
SITES = ("encoder.layers.0.conv", "encoder.layers.0.relu", "encoder.layers.1.conv", "zoom", "head")
RESULTS = dict(zip(SITES, DRAWN, strict=False))


def run_of(path: Path, results: Mapping[str, Array] = RESULTS) -> Archive:
    """A capture: keys with step, site and slot, in the order of execution."""
    modules = dict.fromkeys(key.split("/")[1] if "/" in key else key for key in results)
    return new_archive(
        path,
        {key if "/" in key else f"0/{key}/output": value for key, value in results.items()},
        run={"modules": [{"path": site, "class": "torch.nn.Linear"} for site in modules]},
    )


def dump_of(path: Path, results: Mapping[str, Array]) -> Archive:
    np.savez(path, **results)  # type: ignore[arg-type]  # names are keywords
    return open_archive(path)


def targets(aligned: Aligned) -> dict[str, str]:
    """The keys of the target by those of the reference."""
    return {text: link.target[0].key.text for text, link in aligned.target.links.items()}


PLAIN = {site: site for site in SITES}
NAMES: dict[str, dict[str, str]] = {  # of the dump, by site
    "sites": PLAIN,
    "onnx": {
        "encoder.layers.0.conv": "/encoder/layers.0/conv/Conv_output_0",
        "encoder.layers.0.relu": "/encoder/layers.0/relu/Relu_output_0",
        "encoder.layers.1.conv": "/encoder/layers.1/conv/Conv_1_output_0",
        "zoom": "/zoom/MatMul_output_0",
        "head": "/head/Gemm_output_0",
    },
    "tensorflow": {site: f"net/model/{site.replace('.', '/')}/BiasAdd:0" for site in SITES},
    "within-a-wrapper": {site: f"wrapper.{site}" for site in SITES},
    "unlike": dict(zip(SITES, ("c0", "r0", "c1", "z", "logits"), strict=True)),
}


@pytest.mark.spec("ALN-46", "ALN-47", "CMP-20")
@pytest.mark.parametrize("kind", list(NAMES))
@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_dump_by_names_of_layers_pairs_with_results(kind: str, side: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run.h5")
    dump = dump_of(tmp_path / "dump.npz", {NAMES[kind][site]: value for site, value in RESULTS.items()})
    pair = (dump, run) if side == "reference" else (run, dump)
    expected = {(NAMES[kind][site], f"0/{site}/output") for site in SITES}
    assert set(targets(align(*pair)).items()) == (
        expected if side == "reference" else {(key, name) for name, key in expected}
    )
    comparison = compare(*pair)
    assert (comparison.counts, comparison.exit_status) == ({"identical": 5}, 0)


@pytest.mark.spec("CMP-40")
@pytest.mark.parametrize("kind", list(NAMES))
def test_the_first_divergence_is_the_first_in_the_order_that_the_run_has(kind: str, tmp_path: Path) -> None:
    wrong = {site: value * np.float32(1.5 if n > 1 else 1) for n, (site, value) in enumerate(RESULTS.items())}
    dump = dump_of(tmp_path / "dump.npz", {NAMES[kind][site]: value for site, value in wrong.items()})
    comparison = compare(dump, run_of(tmp_path / "run.h5"))
    assert comparison.exit_status == 1
    if kind != "unlike":
        assert comparison.divergence is not None
        assert comparison.divergence.pair.key == NAMES[kind]["encoder.layers.1.conv"]
        assert comparison.warnings[0] == "The reference has no execution order: the target's is used instead."


def test_a_wrong_result_is_red_from_the_first_pair_on(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "dump.npz", {site: value * np.float32(1.5) for site, value in RESULTS.items()})
    comparison = compare(dump, run_of(tmp_path / "run.h5"))
    assert (comparison.counts, comparison.exit_status) == ({"diverged": 5}, 1)


def test_exchanged_results_are_not_paired_by_their_values(tmp_path: Path) -> None:
    exchanged = {**RESULTS, "zoom": RESULTS["head"], "head": RESULTS["zoom"]}
    comparison = compare(dump_of(tmp_path / "dump.npz", exchanged), run_of(tmp_path / "run.h5"))
    assert comparison.exit_status == 1
    assert comparison.counts["diverged"] == 2


@pytest.mark.spec("ALN-46")
def test_any_step_call_and_slot_may_be_meant_and_values_say_which(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run.h5",
        {
            "0/head/input.x": DRAWN[0],
            "0/head/output": DRAWN[1],
            "1/head/output": DRAWN[2],
            "2/head/output": DRAWN[3],
            "0/gru/output.0": DRAWN[4],
            "0/gru/output.1": DRAWN[5][:1],
            "0/tied/output": DRAWN[6],
            "0/tied@1/output": DRAWN[7],
        },
    )
    nearly = DRAWN[3] * np.float32(1.001)
    dump = dump_of(tmp_path / "a.npz", {"head": nearly, "gru": DRAWN[5][:1], "tied": DRAWN[7]})
    assert targets(align(dump, run)) == {
        "head": "2/head/output",
        "gru": "0/gru/output.1",
        "tied": "0/tied@1/output",
    }
    wrong = dump_of(tmp_path / "b.npz", {"head": DRAWN[0] * 3, "gru": DRAWN[0], "tied": DRAWN[0]})
    assert targets(align(wrong, run)) == {
        "head": "0/head/output",
        "gru": "0/gru/output.0",
        "tied": "0/tied/output",
    }


def test_weights_of_unlike_names_are_not_paired_by_values(tmp_path: Path) -> None:
    weights = {"a.weight": DRAWN[0], "b.weight": DRAWN[1], "b.bias": DRAWN[2]}
    run = run_of(tmp_path / "run.h5", {"0/x/param.weight": DRAWN[0], "0/y/param.weight": DRAWN[1]})
    comparison = compare(dump_of(tmp_path / "w.npz", weights), run)
    assert (comparison.compared, comparison.exit_status) == (0, 1)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["stem", "act", "head"], True, id="layers"),
        pytest.param(["/block/conv/Conv_output_0", "logits"], True, id="onnx"),
        pytest.param(["a.weight", "a.bias", "logit_scale"], False, id="checkpoint"),
        pytest.param(["a.qweight", "a.qzeros", "a.scales", "a.g_idx"], False, id="gptq"),
        pytest.param(["layers/dense/vars/0", "layers/gru/cell/vars/1"], False, id="keras"),
        pytest.param(["dense/kernel:0", "norm/gamma:0"], False, id="tensorflow-variables"),
        pytest.param(["0/stem/output"], False, id="keys"),
    ],
)
def test_files_of_parameters_are_told_from_files_of_results(
    names: list[str], expected: bool, tmp_path: Path
) -> None:
    assert names_results(dump_of(tmp_path / "dump.npz", dict.fromkeys(names, DRAWN[0]))) is expected


def linears(count: int, *, without_bias: int = -1) -> tuple[dict[str, Array], dict[str, Array]]:
    """Results of a stack of linear modules by site, and those of an ONNX graph, whose ops are finer."""
    results: dict[str, Array] = {}
    ops: dict[str, Array] = {}
    draw = np.random.default_rng(11)
    x = DRAWN[0]
    for number in range(count):
        product, bias = x @ draw.standard_normal((16, 16)) / 4, draw.standard_normal(16)
        x = (product + bias * (number != without_bias)).astype(np.float32)
        results[f"layers.{number}.proj"] = x
        ops[f"/layers.{number}/proj/MatMul_output_0"] = product.astype(np.float32)
        ops[f"/layers.{number}/proj/Add_output_0"] = x
        ops[f"/layers.{number}/proj/Shape_output_0"] = np.array([4, 16])
    results["@root"] = x
    ops["logits"] = ops.pop(f"/layers.{count - 1}/proj/Add_output_0")  # an output has no name of a module
    return results, ops


@pytest.mark.spec("ALN-47")
@pytest.mark.parametrize("side", ["reference", "target"])
def test_of_several_ops_of_a_module_its_result_is_compared(side: str, tmp_path: Path) -> None:
    results, ops = linears(4)
    run, dump = run_of(tmp_path / "run.h5", results), dump_of(tmp_path / "dump.npz", ops)
    pair = (dump, run) if side == "reference" else (run, dump)
    expected = {f"0/layers.{n}.proj/output": f"/layers.{n}/proj/Add_output_0" for n in range(3)}
    expected["0/@root/output"] = "logits"
    assert targets(align(*pair)) == (
        expected if side == "target" else {name: key for key, name in expected.items()}
    )
    comparison = compare(*pair)
    assert comparison.exit_status == 0
    assert comparison.counts["identical"] == 4


@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_bias_that_one_side_lacks_is_red_in_any_module(side: str, tmp_path: Path) -> None:
    for number in range(4):
        run = run_of(tmp_path / f"run{number}.h5", linears(4)[0])
        dump = dump_of(tmp_path / f"dump{number}.npz", linears(4, without_bias=number)[1])
        comparison = compare(dump, run) if side == "reference" else compare(run, dump)
        assert comparison.exit_status == 1
        assert comparison.counts["diverged"] >= 4 - number


def test_ops_of_the_last_module_are_not_explained_if_nothing_is_the_result_of_the_model(
    tmp_path: Path,
) -> None:
    results, ops = linears(2)
    ops["/layers.1/proj/Add_output_0"] = ops.pop("logits")
    run = run_of(
        tmp_path / "biasless.h5",
        {
            "layers.0.proj": results["layers.0.proj"],
            "layers.1.proj": ops["/layers.1/proj/MatMul_output_0"],
            "@root": ops["/layers.1/proj/MatMul_output_0"],
        },
    )
    assert compare(dump_of(tmp_path / "dump.npz", ops), run).exit_status == 1


ROUND = np.array([0, 1, 0.5], np.float32)
BIAS = np.array([0.1257302, -0.1321049, 0.6404227], np.float32)


@pytest.mark.spec("ALN-160")
@pytest.mark.parametrize(
    ("ours", "theirs", "further", "is_paired"),
    [
        pytest.param(BIAS, BIAS, None, True, id="equal"),
        pytest.param(BIAS, BIAS[::-1], None, False, id="another-order"),
        pytest.param(BIAS, np.nextafter(BIAS, np.float32(2)), None, False, id="another-last-bit"),
        pytest.param(BIAS, BIAS, BIAS, False, id="twice-on-one-side"),
        pytest.param(ROUND, ROUND, None, False, id="round-numbers"),
        pytest.param(BIAS[:2], BIAS[:2], None, False, id="two-numbers"),
    ],
)
def test_a_few_numbers_that_are_equal_bit_for_bit_are_paired(
    tmp_path: Path, ours: Array, theirs: Array, further: Array | None, *, is_paired: bool
) -> None:
    weights = {"layers/gru/vars/0": DRAWN[0], "layers/dense/vars/1": ours}
    port = {"gru.weight": DRAWN[0].T, "head.bias": theirs}
    if further is not None:
        port["tail.bias"] = further
    pairs = targets(align(dump_of(tmp_path / "ref.npz", weights), dump_of(tmp_path / "tgt.npz", port)))
    assert pairs.get("layers/dense/vars/1") == ("head.bias" if is_paired else None)


@pytest.mark.spec("CMP-20")
def test_what_is_said_of_results_is_not_said_of_arguments(tmp_path: Path) -> None:
    of_model = {"@root": DRAWN[2], "body": DRAWN[1], "head": DRAWN[2]}
    inputs = {"0/@root/input.x": DRAWN[0]}
    run = run_of(tmp_path / "run.h5", {**inputs, **of_model})
    dump = dump_of(tmp_path / "dump.npz", {"body": DRAWN[1], "head": DRAWN[2]})
    reasons = {pair.key: pair.reason for pair in compare(run, dump).pairs}
    assert reasons["0/@root/output"] == "it has the values of head, which has a counterpart"
    assert (
        reasons["0/@root/input.x"]
        == "an argument of @root, which has the values of head, which has a counterpart"
    )
