"""What preflight says of parameters, buffers and settings by what captures describe, without their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import xxhash

from tensorcap.comparison.preflight import Item, Preflight, item_text, preflight
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
Look = Callable[..., Preflight]
RANDOM = np.random.default_rng(5)
WEIGHT, OTHER, THIRD = (RANDOM.normal(size=(8, 8)).astype(np.float32) for _ in range(3))


def described(values: Array, **changes: Any) -> dict[str, Any]:
    """A tensor as a capture describes it; the digest and the statistics are made here by other means."""
    finite = values[np.isfinite(values)].astype(np.float64)
    statistics = {
        "minimum": finite.min().item(),
        "maximum": finite.max().item(),
        "mean": finite.mean().item(),
        "l2": np.sqrt((finite**2).sum()).item(),
        "nan": int(np.isnan(values).sum()),
        "posinf": int((values == np.inf).sum()),
        "neginf": int((values == -np.inf).sum()),
        "zeros": int((values == 0).sum()),
    }
    digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(values.tobytes())}"
    known = {"shape": list(values.shape), "dtype": values.dtype.name, "digest": digest}
    return {**known, "statistics": statistics, **changes}


def run(modules: Mapping[str, Any], kind: str = "parameters", classes: str = "my.Linear") -> dict[str, Any]:
    """The metadata of a run, whose modules have a weight each."""
    return {
        "modules": [
            {
                "path": path,
                "class": classes,
                "training": False,
                kind: {"weight": entry if isinstance(entry, dict) else described(entry)},
            }
            for path, entry in modules.items()
        ]
    }


@pytest.fixture
def look(make_archive: MakeArchive) -> Look:
    """Preflight of two runs given by their metadata."""

    def compare(reference: Any, target: Any) -> Preflight:
        return preflight(make_archive({}, run=reference), make_archive({}, run=target))

    return compare


def only(found: Preflight, kind: str) -> Item:
    (item,) = [item for item in found.items if item.kind == kind]
    return item


@pytest.mark.spec("PRE-7", "PRE-11")
def test_parameters_are_equal_if_all_digests_are(look: Look) -> None:
    found = look(run({"a": WEIGHT, "b": OTHER}), run({"a": WEIGHT, "b": OTHER}))
    assert "parameters" in found.equal
    assert found.items == ()


@pytest.mark.spec("PRE-2", "PRE-11")
def test_parameters_are_not_called_equal_if_their_values_were_not_seen(look: Look) -> None:
    bare = {"shape": [8, 8], "dtype": "float32"}
    found = look(run({"a": bare, "b": WEIGHT}), run({"a": bare, "b": WEIGHT}))
    assert "parameters" not in found.equal
    assert found.unchecked["parameters"] == (
        "not all were compared by value: 1 by shape alone, since no digests or statistics of both are known"
    )
    buffers = look(run({"a": bare}, "buffers"), run({"a": bare}, "buffers"))
    assert "buffers" not in buffers.equal


@pytest.mark.spec("PRE-11")
def test_a_part_that_was_never_loaded_is_named(look: Look) -> None:
    names = ("encoder.0", "encoder.1", "encoder.2")
    ours = {name: RANDOM.normal(size=(8, 8)).astype(np.float32) for name in names}
    fresh = {name: RANDOM.normal(size=(8, 8)).astype(np.float32) for name in names}
    item = only(look(run({**ours, "head": WEIGHT}), run({**fresh, "head": WEIGHT})), "parameters")
    assert item.explains
    assert item.text.startswith("3 of 4 parameters are not the same numbers, beyond rounding of the dtypes: ")
    assert "Nothing in encoder is the same: was it loaded?" in item.text
    one = only(look(run({**ours, "head": WEIGHT}), run({**ours, "head": OTHER})), "parameters")
    assert "was it loaded" not in one.text


@pytest.mark.spec("PRE-11")
def test_a_weight_of_another_layer_is_named_with_its_place(look: Look) -> None:
    ours = {"layers.0": WEIGHT, "layers.1": OTHER, "layers.2": THIRD}
    item = only(look(run(ours), run({**ours, "layers.1": THIRD})), "parameters")
    assert item.name == "layers.1.weight"
    assert "layers.1.weight holds what layers.2.weight holds in the reference." in item.text


@pytest.mark.spec("PRE-11")
def test_a_stale_tied_head_is_named(look: Look) -> None:
    ours = {"embed": WEIGHT, "norm": THIRD, "lm_head": WEIGHT}
    item = only(look(run(ours), run({**ours, "lm_head": OTHER})), "parameters")
    assert item.name == "lm_head.weight"
    assert "lm_head.weight is the same as embed.weight in the reference, not in the target." in item.text


@pytest.mark.spec("PRE-11")
def test_weights_rounded_to_another_dtype_are_no_difference(look: Look) -> None:
    half = WEIGHT.astype(np.float16)
    found = look(run({"a": WEIGHT}), run({"a": half}))
    assert found.items == ()
    assert found.unchecked["parameters"] == (
        "not all were compared by value: 1 the same but for rounding, as far as statistics show"
    )
    wrong = only(look(run({"a": WEIGHT}), run({"a": half * np.float16(1.05)})), "parameters")
    assert wrong.explains


@pytest.mark.spec("PRE-11")
def test_a_table_that_was_computed_with_other_rounding_is_no_difference(look: Look) -> None:
    table = np.float32(10000.0) ** (-np.arange(0, 1, 1 / 32, dtype=np.float32))
    again = (1 / 10000.0 ** np.arange(0, 1, 1 / 32)).astype(np.float32)
    assert not np.array_equal(table, again)
    assert look(run({"rope": table}, "buffers"), run({"rope": again}, "buffers")).items == ()
    never = only(
        look(run({"rope": table}, "buffers"), run({"rope": np.zeros_like(table) + 1e-3}, "buffers")),
        "buffers",
    )
    assert never.explains
    assert never.reference.startswith("0.0001334 to 1, RMS ")
    assert never.target == "0.001 to 0.001, RMS 0.001"


@pytest.mark.spec("PRE-11")
def test_counters_of_training_explain_nothing(look: Look) -> None:
    sides = []
    for count in (0, 7):
        side = run({"bn": np.array(count)}, "buffers")
        side["modules"][0]["buffers"] = {"num_batches_tracked": described(np.array(count))}
        sides.append(side)
    assert not only(look(*sides), "buffers").explains


@pytest.mark.spec("PRE-11")
def test_a_weight_in_another_layout_is_no_mistake_of_another_class(look: Look) -> None:
    turned = np.ascontiguousarray(WEIGHT.T)
    moved = only(look(run({"a": WEIGHT}), run({"a": turned})), "parameters")
    assert (moved.explains, moved.reference, moved.target) == (False, "in order", "in another order")
    found = look(run({"a": WEIGHT}, classes="my.Conv1D"), run({"a": turned}, classes="my.Linear"))
    assert [item.kind for item in found.items] == ["modules"]
    wide = look(run({"a": WEIGHT.reshape(4, 16)}), run({"a": np.ascontiguousarray(WEIGHT.reshape(4, 16).T)}))
    assert wide.items == ()
    assert "1 the same in another layout" in wide.unchecked["parameters"]


@pytest.mark.spec("PRE-11")
def test_digests_of_two_algorithms_say_nothing_of_the_order(look: Look) -> None:
    other = described(WEIGHT, digest="blake2b_128:00112233445566778899aabbccddeeff")
    found = look(run({"a": WEIGHT}), run({"a": other}))
    assert found.items == ()
    assert "1 the same but for rounding" in found.unchecked["parameters"]


@pytest.mark.spec("PRE-11")
def test_integers_for_floats_are_reported_as_quantised_weights(look: Look) -> None:
    codes = np.round(WEIGHT / np.abs(WEIGHT).max() * 127).astype(np.int8)
    found = look(run({"a": WEIGHT}), run({"a": codes}))
    item = only(found, "parameters")
    assert (item.explains, item.reference, item.target) == (False, "float32", "int8")
    subclass = described(WEIGHT, **{"class": "torchao.Int8Tensor", "digest": "", "statistics": None})
    item = only(look(run({"a": WEIGHT}), run({"a": subclass})), "parameters")
    assert item.target == "torchao.Int8Tensor"


@pytest.mark.spec("PRE-7")
def test_quantised_modules_of_one_class_name_are_told_apart(look: Look) -> None:
    theirs = run({"a": WEIGHT}, classes="torch.ao.nn.quantized.dynamic.Linear")
    theirs["modules"][0]["settings"] = {"dtype": "torch.qint8"}
    item = only(look(run({"a": WEIGHT}, classes="torch.nn.Linear"), theirs), "modules")
    assert item_text(item) == (
        "modules Linear: Linear in the reference, Linear (qint8 weights, dequantised) in the target. "
        "The only module of this class is of another implementation."
    )
    other = look(run({"a": WEIGHT}, classes="mine.Linear"), run({"a": WEIGHT}, classes="yours.Linear"))
    assert "mine.Linear in the reference, yours.Linear in the target" in item_text(only(other, "modules"))


@pytest.mark.spec("PRE-11")
def test_weights_of_other_names_are_paired_by_their_bits(look: Look) -> None:
    found = look(run({"a": WEIGHT, "b": OTHER}), run({"a": WEIGHT, "c": OTHER}))
    assert "parameters" in found.equal
    lacking = only(look(run({"a": WEIGHT, "b": OTHER}), run({"a": WEIGHT})), "parameters")
    assert lacking.text == "The target lacks 1 parameter of the other: b.weight."


def test_damaged_descriptions_count_as_unknown(look: Look) -> None:
    for damaged in ({"digest": 3, "statistics": [1]}, {"digest": "", "statistics": {"minimum": "x"}}):
        found = look(run({"a": {**described(WEIGHT), **damaged}}), run({"a": WEIGHT}))
        assert found.items == ()
        assert "by shape alone" in found.unchecked["parameters"]


def modules_with(entries: Mapping[str, Mapping[str, Any]], class_name: str = "my.Norm") -> dict[str, Any]:
    return {
        "modules": [
            {"path": path, "class": class_name, "training": False, "settings": settings}
            for path, settings in entries.items()
        ]
    }


@pytest.mark.spec("PRE-12")
@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        pytest.param(
            {"eps": 1e-5}, {"eps": 1e-6}, "eps is 1e-5 in the reference, 1e-6 in the target.", id="eps"
        ),
        pytest.param(
            {"variance_epsilon": 1e-5},
            {"eps": 0.001},
            "eps is 1e-5 in the reference, 0.001 in the target.",
            id="spelling",
        ),
        pytest.param(
            {"padding": [1, 1]},
            {"padding": 2},
            "padding is [1, 1] in the reference, 2 in the target.",
            id="padding",
        ),
        pytest.param(
            {"approximate": "none"},
            {"approximate": "tanh"},
            "approximate is none in the reference, tanh in the target.",
            id="approximate",
        ),
    ],
)
def test_settings_of_modules_are_compared(look: Look, ours: Any, theirs: Any, text: str) -> None:
    item = only(
        look(modules_with({"model.norm": ours}), modules_with({"model.norm": theirs})), "hyperparameters"
    )
    assert item_text(item) == f"model.norm: {text}"
    assert item.explains


@pytest.mark.spec("PRE-12")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"kernel_size": 3}, {"kernel_size": [3, 3]}, id="one-number-for-two"),
        pytest.param({"padding": "same"}, {"padding": 1}, id="another-way-to-say-it"),
        pytest.param({"eps": 1e-6}, {"eps": 9.999999974752427e-07}, id="float32"),
        pytest.param({"layer_idx": 1}, {"layer_idx": 2}, id="number-of-a-place"),
        pytest.param({"eps": 1e-6, "x": 1}, {"eps": 1e-6, "y": 2}, id="of-one-side"),
    ],
)
def test_settings_that_say_the_same_are_no_difference(look: Look, ours: Any, theirs: Any) -> None:
    assert look(modules_with({"a": ours}), modules_with({"a": theirs})).items == ()


@pytest.mark.spec("PRE-12")
def test_what_a_forward_does_not_read_explains_nothing(look: Look) -> None:
    ours, theirs = {"momentum": 0.1, "scale": 2.0}, {"momentum": 0.2, "scale": 0.5}
    found = look(modules_with({"a": ours}), modules_with({"a": theirs}))
    assert [(item.text.split()[0], item.explains) for item in found.items] == [
        ("scale", True),
        ("momentum", False),
    ]
    other_class = look(modules_with({"a": ours}), modules_with({"a": theirs}, "other.Attention"))
    assert not [item for item in other_class.items if item.kind == "hyperparameters" and item.explains]


@pytest.mark.spec("PRE-12")
def test_modules_that_differ_alike_are_one_item(look: Look) -> None:
    sides = [modules_with({f"layers.{i}.norm": {"eps": eps} for i in range(30)}) for eps in (1e-5, 1e-6)]
    item = only(look(*sides), "hyperparameters")
    assert item.text == (
        "eps is 1e-5 in the reference, 1e-6 in the target; so it is in 30 modules: layers.0.norm, "
        "layers.1.norm, layers.2.norm, and 27 more."
    )
    assert "hyperparameters" in look(sides[0], sides[0]).equal


@pytest.mark.spec("PRE-6")
def test_a_batch_norm_left_in_training_mode_is_named(look: Look) -> None:
    sides = [modules_with({"": {}, "bn": {"eps": 1e-5}}, "torch.nn.BatchNorm2d") for _ in range(2)]
    assert "mode" in look(*sides).equal
    sides[1]["modules"][1]["training"] = True
    item = only(look(*sides), "mode")
    assert (item.name, item.reference, item.target, item.explains) == ("bn", False, True, True)
    assert item.text == (
        "The target ran 1 norm in training mode, first bn: with mean and variance of the batch, not the "
        "running ones."
    )
