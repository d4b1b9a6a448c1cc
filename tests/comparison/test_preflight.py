"""What two runs differ in before any tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison.preflight import Item, Preflight, config_differences, item_text, preflight
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
Look = Callable[..., Preflight]
IDS = np.array([[5, 6, 7, 0]])


@pytest.fixture
def look(make_archive: MakeArchive) -> Look:
    """Preflight of two runs given by their metadata, or by tensors."""

    def run(reference: Any, target: Any, *, tensors: tuple[Any, Any] = ({}, {}), **options: Any) -> Preflight:
        ours, theirs = (
            make_archive(held, run=run) for run, held in zip((reference, target), tensors, strict=True)
        )
        return preflight(ours, theirs, **options)

    return run


def config(**entries: Any) -> dict[str, Any]:
    return {"model": {"config": {"hidden_size": 64, "num_attention_heads": 4, **entries}}}


def tree(*modules: tuple[str, str], **further: dict[str, Any]) -> dict[str, Any]:
    return {
        "modules": [
            {"path": path, "class": name, "training": False, **further.get(path.replace(".", "_"), {})}
            for path, name in modules
        ]
    }


def only(found: Preflight, kind: str) -> Item:
    (item,) = [item for item in found.items if item.kind == kind]
    return item


@pytest.mark.spec("PRE-2")
def test_every_kind_is_reported_or_said_to_be_unchecked(look: Look) -> None:
    found = look({}, {})
    assert set(found.equal) | set(found.unchecked) == {
        "inputs", "repeat", "mode", "config", "modules", "hyperparameters", "parameters", "attention",
        "buffers", "settings", "precision", "versions",
    }  # fmt: skip
    assert found.unchecked["repeat"] == "no second run of the reference was given"
    assert found.unchecked["config"] == "the reference has no configuration"
    assert (found.items, found.exit_status) == ((), 0)


@pytest.mark.spec("PRE-3")
@pytest.mark.parametrize(
    ("target", "text"),
    [
        pytest.param(
            np.array([[5, 9, 7, 0]]), "First at [0, 1]: 6 in the reference, 9 in the target.", id="one"
        ),
        pytest.param(
            np.array([[1, 5, 6, 7, 0]]),
            "The target's begin with one token more, as by a BOS token.",
            id="bos",
        ),
        pytest.param(
            np.array([[6, 7, 0]]),
            "The reference's begin with one token more, as by a BOS token.",
            id="no-bos",
        ),
        pytest.param(
            np.array([[0, 5, 6, 7]]),
            "the same values in another order, as by padding on the other side.",
            id="pad",
        ),
        pytest.param(IDS[0], "The two runs were fed different inputs.", id="rank"),
    ],
)
def test_different_input_ids_are_described(look: Look, target: Array, text: str) -> None:
    key = "0/@root/input.input_ids"
    item = only(look({}, {}, tensors=({key: IDS}, {key: target})), "inputs")
    assert item.text.startswith("The two runs were fed different inputs.")
    assert item.text.endswith(text)
    assert (item.name, item.explains) == (key, True)


@pytest.mark.spec("PRE-3")
def test_inputs_are_equal_whatever_the_width_of_the_integers(look: Look) -> None:
    key = "0/@root/input.input_ids"
    found = look({}, {}, tensors=({key: IDS}, {key: IDS.astype(np.int32)}))
    assert "inputs" in found.equal
    rounded = look({}, {}, tensors=({key: np.ones(3)}, {key: np.ones(3, np.float32) * 1.5}))
    assert "inputs" in rounded.equal  # the comparison itself measures what rounding did


@pytest.mark.spec("PRE-3")
def test_hashes_serve_where_inputs_are_not_held(look: Look) -> None:
    runs = [{"inputs": {"0/@root/input.input_ids": {"sha256": sha}}} for sha in ("aa", "bb")]
    assert only(look(*runs), "inputs").name == "0/@root/input.input_ids"
    assert "inputs" in look(runs[0], runs[0]).equal


@pytest.mark.spec("PRE-3")
def test_steps_after_the_first_other_token_are_not_comparable(look: Look) -> None:
    tokens = [
        {f"{step}/@root/input.ids": np.array([t]) for step, t in enumerate(side)} for side in ("abc", "axy")
    ]
    tokens = [{key: value.view(np.int32) for key, value in side.items()} for side in tokens]
    item = only(look({}, {}, tensors=tuple(tokens)), "inputs")
    assert item.name == "1/@root/input.ids"
    assert item.text == "From step 1 on the runs were fed other inputs: later steps are not comparable."


@pytest.mark.spec("PRE-3")
def test_a_cache_is_computed_and_no_other_input(look: Look) -> None:
    cache = np.linspace(1, 2, 32, dtype=np.float32)
    runs = [
        {"0/@root/output.cache.keys": values, "1/@root/input.cache.keys": values}
        for values in (cache, cache * np.float32(1 + 1e-6))
    ]
    assert "inputs" in look({}, {}, tensors=(runs[0], runs[1])).equal
    given = {**runs[1], "1/@root/input.cache.keys": cache * 2}
    assert only(look({}, {}, tensors=(runs[0], given)), "inputs").name == "1/@root/input.cache.keys"


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    ("target", "names"), [("max", ["rope_theta"]), ("torch", ["rope_theta", "mlp_bias"])]
)
def test_what_another_framework_has_no_word_for_is_no_difference(
    look: Look, target: str, names: list[str]
) -> None:
    ours = {**config(rope_theta=5e5, mlp_bias=False), "framework": {"name": "torch"}}
    theirs = {**config(rope_theta=1e4), "framework": {"name": target}}
    assert [item.name for item in look(ours, theirs).items if item.kind == "config"] == names
    assert [item.name for item in look(theirs, ours).items if item.kind == "config"] == names


@pytest.mark.spec("PRE-1", "PRE-4")
def test_what_changes_most_is_reported_first(look: Look) -> None:
    ours = config(
        rms_norm_eps=1e-6, rope_theta=5e5, hidden_act="silu", pad_token_id=0, tie_word_embeddings=True
    )
    theirs = config(
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        hidden_act="gelu",
        pad_token_id=1,
        tie_word_embeddings=False,
        extra=1,
    )
    packages = [{"packages": {"torch": version}} for version in ("2.12", "2.13")]
    found = look({**ours, **packages[0]}, {**theirs, **packages[1]})
    assert [item.name for item in found.items] == [
        "rope_theta",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "pad_token_id",
        "torch",
    ]
    assert [item.explains for item in found.items] == [True, True, True, True, False, False]
    assert found.items[0].text == "Every position is rotated by other angles."
    assert found.exit_status == 1


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 10000}}, id="rope-place"),
        pytest.param({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, id="rope-none"),
        pytest.param(
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            id="rope-type",
        ),
        pytest.param({"hidden_act": "gelu_new"}, {"hidden_act": "gelu_pytorch_tanh"}, id="activation"),
        pytest.param({"head_dim": 16}, {}, id="head-dim"),
        pytest.param({}, {"num_key_value_heads": 4}, id="kv-heads"),
        pytest.param(
            {"use_cache": True}, {"use_cache": False, "transformers_version": "4"}, id="bookkeeping"
        ),
        pytest.param({"sliding_window": None}, {}, id="null-is-absent"),
        pytest.param({}, {"some_new_entry": 3}, id="entry-of-another-version"),
    ],
)
def test_what_differs_in_spelling_is_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    assert config_differences({**shape, **ours}, {**shape, **theirs}) == []


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        pytest.param({"head_dim": 32}, {}, "head_dim", id="head-dim"),
        pytest.param({"attention_bias": True}, {"attention_bias": False}, "attention_bias", id="bias"),
        pytest.param({"sliding_window": 4096}, {}, "sliding_window", id="absent"),
        pytest.param(
            {"tie_word_embeddings": 1}, {"tie_word_embeddings": True}, "tie_word_embeddings", id="bool"
        ),
        pytest.param({"unknown": 1}, {"unknown": 2}, "unknown", id="unknown"),
        pytest.param({"rope_scaling": {"factor": 8.0}}, {}, "factor", id="rope-factor"),
    ],
)
def test_what_differs_is_found(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    assert [d.name for d in config_differences({**shape, **ours}, {**shape, **theirs})] == [name]


@pytest.mark.spec("PRE-4")
def test_differences_of_configurations_are_sorted_by_cause() -> None:
    ours = {"pad_token_id": 0, "rms_norm_eps": 1e-6, "hidden_size": 64}
    theirs = {"pad_token_id": 1, "rms_norm_eps": 1e-5, "hidden_size": 32}
    names = [d.name for d in config_differences(ours, theirs)]
    assert names == ["hidden_size", "rms_norm_eps", "pad_token_id"]


@pytest.mark.spec("PRE-5")
def test_a_reference_that_does_not_repeat_is_named_with_its_module(make_archive: MakeArchive) -> None:
    run = tree(("", "Sequential"), ("1", "torch.nn.Dropout"))  # case 66
    tensors = {"0/0/output": np.ones(3), "0/1/output": np.ones(3), "0/2/output": np.ones(3)}
    again = {**tensors, "0/1/output": np.zeros(3), "0/2/output": np.zeros(3)}
    reference, target = make_archive(tensors, run=run), make_archive(tensors, run=run)
    item = only(preflight(reference, target, repeat=make_archive(again)), "repeat")
    assert item.text == (
        "The reference is not deterministic: 2 of 3 tensors of its second run differ, "
        "first 0/1/output (Dropout)."
    )
    assert "repeat" in preflight(reference, target, repeat=make_archive(tensors)).equal
    bare = preflight(reference, target, repeat=make_archive(tensors, digests=False))
    assert bare.unchecked["repeat"] == "the repeat has no digests of the same kind"


@pytest.mark.spec("PRE-6")
def test_random_modules_are_named_on_either_side(look: Look) -> None:
    layers = ("", "Model"), ("drop", "torch.nn.Dropout")
    random = tree(*layers, drop={"training": True})
    item = only(look(tree(*layers), random), "mode")
    assert item.text == "The target ran in training mode: dropout is random in 1 module, first drop."
    assert (item.reference, item.target, item.explains) == (False, True, True)


@pytest.mark.spec("PRE-6")
def test_a_child_in_training_mode_is_no_model_in_training_mode(look: Look) -> None:
    layers = ("", "Model"), ("act", "GELU")
    found = look(tree(*layers), tree(*layers, act={"training": True}))
    assert "mode" in found.equal
    whole = {"modules": [{"path": "", "class": "Model", "training": True}]}
    assert only(look(tree(*layers), whole), "mode").text.startswith("One run was in training mode")


@pytest.mark.spec("PRE-7")
def test_a_module_that_was_replaced_is_named(look: Look) -> None:
    ours = tree(*((f"{i}.act", "x.SiLU") for i in range(3)))
    theirs = tree(("0.act", "x.SiLU"), ("1.act", "y.GELU"), ("2.act", "x.SiLU"))
    item = only(look(ours, theirs), "modules")
    assert (item.name, item.reference, item.target, item.explains) == ("1.act", "x.SiLU", "y.GELU", True)
    half = tree(("0.act", "y.GELU"), ("1.act", "x.SiLU")), tree(("0.act", "x.SiLU"), ("1.act", "x.SiLU"))
    assert only(look(half[1], half[0]), "modules").name == "0.act"
    renamed = only(look(ours, tree(*((f"{i}.act", "z.Swish") for i in range(3)))), "modules")
    assert (renamed.explains, renamed.text) == (
        False,
        "All 3 modules of this class are of another implementation.",
    )


@pytest.mark.spec("PRE-7")
def test_parameters_are_compared_by_value_where_both_are_held(look: Look) -> None:
    weight = np.linspace(-1, 1, 32, dtype=np.float32)
    half = weight.astype(np.float16)
    held = {"0/fc/param.weight": weight, "0/fc/param.bias": weight}
    assert "parameters" in look({}, {}, tensors=(held, held)).equal
    rounded = {"0/fc/param.weight": half, "0/fc/param.bias": half}
    assert "parameters" in look({}, {}, tensors=(held, rounded)).equal
    wrong = {**rounded, "0/fc/param.bias": half * np.float16(1.01)}
    item = only(look({}, {}, tensors=(held, wrong)), "parameters")
    assert item.name == "0/fc/param.bias"
    assert item.text.startswith("1 of 2 parameters is not the same numbers, beyond rounding of the dtypes")
    cut = {**held, "0/fc/param.weight": weight[:4]}
    assert only(look({}, {}, tensors=(held, cut)), "parameters").text == "Its shapes differ."


@pytest.mark.spec("PRE-7")
def test_shapes_serve_where_parameters_are_not_held(look: Look) -> None:
    def run(*sizes: int) -> dict[str, Any]:
        about = {name: {"shape": [size], "dtype": "float32"} for name, size in zip("ab", sizes, strict=False)}
        return tree(("fc", "Linear"), fc={"parameters": about})

    item = only(look(run(4), run(5)), "parameters")
    assert (item.name, item.reference, item.target) == ("fc.a", [4], [5])
    lacking = only(look(run(4, 4), run(4)), "parameters")
    assert lacking.text == "The target lacks 1 parameter of the other: fc.b."
    assert not lacking.explains


@pytest.mark.spec("PRE-7")
def test_buffers_of_another_dtype_explain(look: Look) -> None:
    runs = [
        tree(("rotary", "Rotary"), rotary={"buffers": {"inv_freq": {"shape": [8], "dtype": name}}})
        for name in ("float32", "bfloat16")
    ]
    item = only(look(*runs), "buffers")
    assert (item.name, item.reference, item.target) == ("rotary.inv_freq", "float32", "bfloat16")
    assert item.explains


@pytest.mark.spec("PRE-8")
def test_attention_settings_precision_and_versions_are_told(look: Look) -> None:
    runs = [
        {
            "model": {"config": {"_attn_implementation": attention}},
            "framework": {
                "settings": {"float32_matmul_precision": matmul, "deterministic_algorithms": matmul == "high"}
            },
            "dtype": dtype,
            "packages": {"torch": dtype},
        }
        for attention, matmul, dtype in (("eager", "highest", "float32"), ("sdpa", "high", "bfloat16"))
    ]
    found = look(*runs)
    assert [(item.kind, item.explains) for item in found.items] == [
        ("settings", True),
        ("attention", False),
        ("settings", False),
        ("precision", False),
        ("versions", False),
    ]


@pytest.mark.spec("PRE-110")
@pytest.mark.parametrize(
    ("name", "ours", "theirs", "explains"),
    [
        pytest.param("function", "main", "decode", True, id="function"),
        pytest.param("precision", "fp32", "fp16", False, id="precision"),
        pytest.param("mode", "debug", "release", False, id="mode"),
        pytest.param("device_target", "host", "phone", False, id="device target"),
        pytest.param("compute_units", "cpu", "gpu", False, id="compute units"),
        pytest.param("inputs", {"x": "zeros"}, {"x": "ones"}, False, id="inputs"),
    ],
)
def test_how_a_program_was_run_is_told_side_by_side(
    name: str, ours: object, theirs: object, explains: bool, look: Look
) -> None:
    kept = {"settings": {name: ours, "entry_of_its_own": 1}}, {"settings": {name: theirs, "lacking": 2}}
    item = only(look(*({"framework": framework} for framework in kept)), "settings")
    sides = ("x: zeros", "x: ones") if name == "inputs" else (ours, theirs)
    assert (item.name, item.reference, item.target, item.explains) == (name, *sides, explains)


def test_damaged_metadata_are_no_error(look: Look) -> None:
    damaged = {
        "modules": ["x", {"path": 3, "parameters": 4, "buffers": []}],
        "model": 1,
        "packages": "x",
        "inputs": 3,
    }
    assert look(damaged, damaged).items == ()


@pytest.mark.spec("PRE-7")
def test_a_convolution_of_one_place_as_a_linear_layer_is_the_same_product(look: Look) -> None:
    def side(*classes: str, weight: list[int]) -> dict[str, Any]:
        parameters = {"weight": {"shape": weight}, "bias": {"shape": [8]}}
        modules = [(f"h.{i}", name) for i, name in enumerate(classes)]
        return tree(*modules, h_2={"parameters": parameters})

    conv, own = "torch.nn.modules.conv.Conv2d", "my.ConvL"
    ours = side(conv, conv, conv, weight=[8, 4, 1, 1])
    linear = "torch.nn.modules.linear.Linear"
    items = look(ours, side(own, own, linear, weight=[8, 4])).items
    assert [item.explains for item in items if item.kind == "modules"] == [False]  # all others are of another
    for others in (ours, side(conv, conv, conv, weight=[8, 1, 2, 1])):  # of kernels, not of inputs
        items = look(others, side(own, own, linear, weight=[8, 2])).items
        assert [item.name for item in items if item.kind == "modules" and item.explains] == ["h.2"]


@pytest.mark.spec("PRE-7", "PRE-10")
def test_layers_that_were_replaced_alike_are_one_line(look: Look) -> None:
    blocks = range(40)
    ours = tree(*((f"h.{i}.ffn", "x.Ffn") for i in blocks))
    theirs = tree(*((f"h.{i}.ffn", "y.FusedFfn" if i < 30 or i == 35 else "x.Ffn") for i in blocks))
    item = only(look(ours, theirs), "modules")
    assert item_text(item) == (
        "modules h.{0-29,35}.ffn: Ffn in the reference, FusedFfn in the target. "
        "Other modules of this class stayed what they are."
    )
    corner = {(0, 1), (3, 2), (3, 3)}
    experts = [(i, j) for i in range(4) for j in range(4)]
    ours = tree(*((f"{i}.expert.{j}", "x.Ffn") for i, j in experts))
    theirs = tree(*((f"{i}.expert.{j}", "y.Ffn" if (i, j) in corner else "x.Ffn") for i, j in experts))
    names = [item.name for item in look(ours, theirs).items if item.kind == "modules"]
    assert names == ["0.expert.1", "3.expert.{2-3}"]


@pytest.mark.spec("PRE-7", "PRE-10")
def test_modules_of_one_parent_that_were_replaced_alike_are_one_line(look: Look) -> None:
    names = [f"h.{i}.{name}" for i in range(3) for name in ("attn.q", "attn.k", "mlp.up", "mlp.down", "head")]
    ours = tree(*((name, "torch.nn.Linear") for name in (*names, "lm")))
    kept = {"lm", "h.0.head", "h.1.head", "h.2.head"}
    theirs = tree(*((n, "torch.nn.Linear" if n in kept else "y.Packed") for n in (*names, "lm")))
    found = [item.name for item in look(ours, theirs).items if item.kind == "modules"]
    assert found == ["h.{0-2}.attn.{q,k}", "h.{0-2}.mlp.{up,down}"]


@pytest.mark.spec("PRE-7")
def test_forms_of_a_class_for_ranks_are_no_other_class(look: Look) -> None:
    ours = tree(("q", "torch.nn.Linear"), ("o", "torch.nn.Linear"), ("gate", "torch.nn.Linear"))
    layers = "neuronx_distributed.parallel_layers.layers"
    q, o = ("q", f"{layers}.ColumnParallelLinear"), ("o", f"{layers}.RowParallelLinear")
    assert "modules" in look(ours, tree(q, o, ("gate", "torch.nn.Linear"))).equal
    assert not any(item.explains for item in look(ours, tree(q, o, ("gate", o[1]))).items)
    ours = tree(*((f"{i}.gate", "torch.nn.Linear") for i in range(3)))
    quantised = tree(
        *((f"{i}.gate", f"{layers}.QuantizedColumnParallel" if i == 1 else o[1]) for i in range(3))
    )
    assert [item.name for item in look(ours, quantised).items if item.explains] == ["1.gate"]


@pytest.mark.spec("PRE-7")
def test_a_wrapper_of_compiled_code_is_no_other_class(look: Look) -> None:
    compiled = "torch._dynamo.eval_frame.OptimizedModule"
    ours = tree(("0", "x.Ffn"), ("1", "x.Ffn"), ("2", "x.Norm"))
    theirs = tree(("0", compiled), ("0._orig_mod", "x.Ffn"), ("1", "x.Ffn"), ("2", compiled))
    assert "modules" in look(ours, theirs).equal
    assert "modules" in look(theirs, ours).equal
    within = tree(("0", compiled), ("0._orig_mod", "y.Other"), ("1", "x.Ffn"), ("2", "x.Norm"))
    item = only(look(ours, within), "modules")
    assert (item.name, item.reference, item.target) == ("0", "x.Ffn", "y.Other")


@pytest.mark.spec("PRE-3")
def test_a_cache_that_the_model_hands_on_is_no_input_of_the_run(look: Look) -> None:
    sides = [
        {
            "0/@root/input.ids": np.array([[1, 2]]),
            "0/@root/output.mems.0": np.full(3, value),
            "1/@root/input.ids": np.array([[3]]),
            "1/@root/input.mems.0": np.full(3, value),
        }
        for value in (0.5, 0.75)
    ]
    assert "inputs" in look({}, {}, tensors=tuple(sides)).equal
    renamed = [
        {key.replace("input.mems.0", "input.kept"): tensor for key, tensor in side.items()} for side in sides
    ]
    assert "inputs" in look({}, {}, tensors=tuple(renamed)).equal  # its values are results of the step before
    fed = [renamed[0], {**renamed[1], "1/@root/input.kept": np.full(3, 7.0)}]
    assert only(look({}, {}, tensors=tuple(fed)), "inputs").name == "1/@root/input.kept"


@pytest.mark.spec("PRE-3")
def test_an_argument_that_one_side_lacks_is_no_other_input(look: Look) -> None:
    key = "0/@root/input.input_ids"
    more = {key: IDS, "0/@root/input.attention_mask": np.ones((1, 4))}
    for sides in ((more, {key: IDS}), ({key: IDS}, more)):
        assert "inputs" in look({}, {}, tensors=sides).equal
