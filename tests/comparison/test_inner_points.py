"""Places within a module's code, gradients, parameters and partial captures in a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tensorcap.comparison import POLICY, Comparison, Thresholds, compare, first_divergence, kind_of
from tensorcap.comparison.preflight import preflight
from tensorcap.reports.pair_examination import examine
from tensorcap.reports.results import judge_again, load_result, save_result
from tensorcap.runs import Calls
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.keys import Key
from tests.support.floats import bfloat16_bits, to_bfloat16

MakeArchive = Callable[..., Any]
BF16 = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}
F32 = {"dtype": "float32", "compute_dtype": "float32"}
MODULES = [{"path": "", "class": "my.Model"}, {"path": "m", "class": "my.Mlp"}]


def normal(*shape: int, seed: int = 0) -> Array:
    found: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return found


X = normal(32, 64)


def fact(
    op: str,
    inputs: Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[Mapping[str, Any]] | None = None,
    line: int = 1,
    order: int = 0,
    call: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """What a run says of an op: an input that is a text is the key of a record."""
    given = {name: {"record": ref} if isinstance(ref, str) else ref for name, ref in (inputs or {}).items()}
    return {
        "op": op,
        "order": order,
        "module": "m",
        "module_call": call,
        "class": "Mlp",
        "file": "/lib/modeling_my.py",
        "line": line,
        "function": "forward",
        "inputs": [{"name": name, **reference} for name, reference in given.items()],
        "arguments": arguments,
        "outputs": list(outputs or ()),
    }


def place(op: str, number: int = 0, module: str = "m") -> str:
    return f"0/{module}:aten.{op}{f'@{number}' if number else ''}"


@pytest.fixture
def run_of(make_archive: MakeArchive) -> Callable[..., Any]:
    """An archive of what is passed, in order: keys with tensors, and what is said of ops by their place."""

    def make(passed: Mapping[str, Any], facts: Mapping[str, Any], **run: Any) -> Any:
        values = {f"{where}/op": said for where, said in facts.items()}
        return make_archive(dict(passed), values=values, run={"modules": MODULES, **run})

    return make


def statuses(comparison: Comparison) -> dict[str, str]:
    return {pair.key: pair.status for pair in comparison.pairs}


def partners(comparison: Comparison) -> dict[str, str]:
    return {p.key: p.target.key.text for p in comparison.pairs if p.reference and p.target}


class TestPairing:
    @pytest.mark.spec("CMP-30")
    def test_one_more_op_of_a_name_shifts_no_other(self, run_of: Callable[..., Any]) -> None:
        mul, other = f"{place('mul.Tensor')}/output", f"{place('mul.Tensor', 1)}/output"
        reference = run_of(
            {mul: X, other: X[:8]}, {place("mul.Tensor", n): fact("aten.mul.Tensor") for n in (0, 1)}
        )
        last = f"{place('mul.Tensor', 2)}/output"
        target = run_of(
            {mul: X[:3], other: X, last: X[:8]},
            {place("mul.Tensor", n): fact("aten.mul.Tensor") for n in (0, 1, 2)},
        )
        found = compare(reference, target)
        assert partners(found) == {mul: other, other: last}
        assert statuses(found) == {
            mul: "identical",
            other: "identical",
            f"{mul} (target)": "missing-in-reference",
        }
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-30")
    def test_calls_of_modules_tell_which_of_two_sums_is_missing(self, run_of: Callable[..., Any]) -> None:
        add, last = f"{place('add.Tensor')}/output", f"{place('add.Tensor', 1)}/output"
        facts = {place("add.Tensor", n): fact("aten.add.Tensor") for n in (0, 1)}
        before = {"0/m/input.x": X}
        reference = run_of({**before, add: X + 1, "0/m.mlp/output": X + 2, last: X + 3}, facts)
        target = run_of(
            {**before, "0/m.mlp/output": X + 2, add: X + 3},
            {place("add.Tensor"): fact("aten.add.Tensor")},
        )
        found = compare(reference, target)
        assert partners(found)[last] == add
        assert statuses(found)[add] == "missing-in-target"
        assert found.divergence is None
        assert found.exit_status == 1

    @pytest.mark.spec("CMP-30")
    def test_ops_of_other_shapes_pair_by_name_alone_where_nothing_else_fits(
        self, run_of: Callable[..., Any]
    ) -> None:
        key = f"{place('mul.Tensor')}/output"
        facts = {place("mul.Tensor"): fact("aten.mul.Tensor")}
        found = compare(run_of({key: X}, facts), run_of({key: X[:4]}, facts))
        assert statuses(found) == {key: "shape-mismatch"}

    def test_each_call_of_a_module_is_a_sequence_of_its_own(self, run_of: Callable[..., Any]) -> None:
        keys = [f"{place('mul.Tensor', n)}/output" for n in range(3)]
        calls = {"0/m/input.x": X, "0/m@1/input.x": X}
        ours = {place("mul.Tensor", n): fact("aten.mul.Tensor", call=n) for n in (0, 1)}
        theirs = {place("mul.Tensor", n): fact("aten.mul.Tensor", call=n // 2) for n in range(3)}
        reference = run_of({**calls, keys[0]: X, keys[1]: X + 1}, ours)
        target = run_of({**calls, keys[0]: X, keys[1]: -X, keys[2]: X + 1}, theirs)
        assert partners(compare(reference, target))[keys[1]] == keys[2]

    def test_without_facts_keys_pair(self, make_archive: MakeArchive) -> None:
        tensors = {"0/m:aten.mul.Tensor/output": X, "0/m:Mlp.forward/gate": X, "0/probe:x/value": X}
        found = compare(make_archive(tensors), make_archive(tensors))
        assert found.counts == {"identical": 3}

    @pytest.mark.spec("CMP-1")
    def test_a_module_of_several_names_has_its_ops_under_one_of_them(self, make_archive: MakeArchive) -> None:
        reference = make_archive({"0/tied:Mlp.forward@1/gate": X})
        target = make_archive({"0/own:Mlp.forward@1/gate": X}, run={"aliases": {"tied": "own"}})
        assert compare(reference, target).counts == {"identical": 1}

    @pytest.mark.spec("CMP-30")
    def test_ops_of_a_module_of_several_names_pair_too(self, run_of: Callable[..., Any]) -> None:
        op = {"tied": place("mul.Tensor", module="tied"), "own": place("mul.Tensor", module="own")}
        ours, theirs = (
            run_of({f"{where}/output": X}, {where: fact("aten.mul.Tensor")}, aliases=aliases)
            for where, aliases in ((op["tied"], {}), (op["own"], {"tied": "own"}))
        )
        assert compare(ours, theirs).counts == {"identical": 1}

    @pytest.mark.spec("CMP-31")
    def test_memory_without_values_is_left_out_and_a_cast_may_be_missing(
        self, run_of: Callable[..., Any]
    ) -> None:
        empty, cast, mul = (
            f"{place(op)}/output" for op in ("empty_like.default", "_to_copy.default", "mul.Tensor")
        )
        facts = {
            place(op): fact(f"aten.{op}") for op in ("empty_like.default", "_to_copy.default", "mul.Tensor")
        }
        reference = run_of({empty: X, cast: X, mul: X}, facts)
        target = run_of({empty: X + 5, mul: X}, {k: v for k, v in facts.items() if "_to_copy" not in k})
        found = compare(reference, target)
        assert statuses(found) == {empty: "excluded", cast: "explained", mul: "identical"}
        assert [pair.reason for pair in found.pairs[:2]] == [
            "memory that nothing was written to yet",
            "a cast, which computes nothing; the target has none",
        ]
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-31")
    def test_what_reserved_memory_held_before_it_was_written_is_left_out(
        self, run_of: Callable[..., Any]
    ) -> None:
        put, given = place("index_put_.default"), f"{place('index_put_.default')}/input.self"
        empty = fact("aten.empty_like.default", outputs=[{"slot": "output", "unfilled": True}])
        facts = {
            place("empty_like.default"): empty,
            put: fact("aten.index_put_.default", {"self": given}, order=5),
        }
        keys = {given: X, f"{put}/output": X}
        found = compare(run_of(keys, facts), run_of({**keys, given: -X}, facts))
        assert [pair.status for pair in found.pairs] == ["excluded", "identical"]
        del facts[place("empty_like.default")]
        found = compare(run_of(keys, facts), run_of({**keys, given: -X}, facts))
        assert [pair.status for pair in found.pairs] == ["diverged", "identical"]

    @pytest.mark.spec("CMP-31")
    @pytest.mark.parametrize("held", [True, False])
    def test_an_op_input_may_be_missing_if_another_target_record_holds_it(
        self, run_of: Callable[..., Any], held: bool
    ) -> None:
        cast, mul = f"{place('_to_copy.default')}/output", place("mul.Tensor")
        given, made = f"{mul}/input.self", f"{mul}/output"
        reference = run_of({given: X, made: 2 * X}, {mul: fact("aten.mul.Tensor", {"self": given})})
        facts = {
            place("_to_copy.default"): fact("aten._to_copy.default"),
            mul: fact("aten.mul.Tensor", {"self": cast} if held else {}, order=5),
        }
        found = compare(reference, run_of({cast: X, made: 2 * X}, facts))
        assert found.pairs[0].status == ("explained" if held else "missing-in-target")
        assert (cast in found.pairs[0].reason) is held
        assert found.exit_status == (0 if held else 1)

    def test_an_op_that_is_no_cast_may_not_be_missing(self, run_of: Callable[..., Any]) -> None:
        keys = [f"{place('mul.Tensor')}/output", f"{place('neg.default')}/output"]
        facts = {place(op): fact(f"aten.{op}") for op in ("mul.Tensor", "neg.default")}
        target = run_of({keys[0]: X}, {place("mul.Tensor"): facts[place("mul.Tensor")]})
        assert compare(run_of({keys[0]: X, keys[1]: -X}, facts), target).exit_status == 1


class TestValues:
    @pytest.mark.spec("CMP-32")
    def test_facts_are_no_values_and_arguments_of_ops_are(self, run_of: Callable[..., Any]) -> None:
        key = f"{place('mul.Tensor')}/output"

        def archive(line: int, **arguments: Any) -> Any:
            return run_of({key: X}, {place("mul.Tensor"): fact("aten.mul.Tensor", line=line, **arguments)})

        found = compare(
            archive(1, other=0.25, dtype="torch.float32", fill=-65504.0, dim=1),
            archive(2, other=0.375, dtype="torch.bfloat16", fill=-1e9, dim=1.0),
        )
        assert [(v.key, v.reference, v.target) for v in found.value_differences] == [
            (f"{place('mul.Tensor')}/op.other", 0.25, 0.375)
        ]
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-32")
    def test_where_a_probe_was_passed_is_no_value(self, make_archive: MakeArchive) -> None:
        found = compare(
            *(
                make_archive({"0/probe:gate/value": X}, values={"0/probe:gate/module": module})
                for module in ("model.mlp", "ffn")
            )
        )
        assert (found.counts, found.value_differences) == ({"identical": 1}, ())

    def test_a_variable_that_is_called_op_or_module_is_a_value(self, make_archive: MakeArchive) -> None:
        ours, theirs = (
            make_archive({"0/x/output": X}, values={"0/m:Mlp.forward/op": n, "0/m:Mlp.forward/module": n})
            for n in (1, 2)
        )
        assert len(compare(ours, theirs).value_differences) == 2


class TestAbsences:
    WHOLE: ClassVar = {"inputs": True, "grads": True, "params": True, "watch": ["f"]}
    RECORDS = ("0/m/input.x", "0/m/output", "1/m/output", "0/m/grad_output", "0/m/param.w", "0/m:f/gate")

    @pytest.mark.spec("CMP-33")
    @pytest.mark.parametrize(
        ("scope", "missing", "reason"),
        [
            pytest.param({"steps": "0"}, "1/m/output", "took steps 0", id="steps"),
            pytest.param({"grads": False}, "0/m/grad_output", "took no gradients", id="gradients"),
            pytest.param({"params": False}, "0/m/param.w", "took no parameters", id="parameters"),
            pytest.param({"inputs": False}, "0/m/input.x", "took no inputs of modules", id="inputs"),
            pytest.param({"watch": []}, "0/m:f/gate", "watched no functions", id="watch"),
            pytest.param({"exclude": ["*/output"]}, "0/m/output", "left it out", id="exclude"),
            pytest.param({"include": ["n"]}, "0/m/output", "left it out", id="include"),
            pytest.param({"sample": 1}, "1/m/output", "took the first 1 calls of each site", id="sample"),
        ],
    )
    def test_the_reason_is_what_the_capture_was_told(
        self, make_archive: MakeArchive, scope: dict[str, Any], missing: str, reason: str
    ) -> None:
        reference = make_archive(dict.fromkeys(self.RECORDS, X))
        held = {key: X for key in self.RECORDS if key != missing}
        target = make_archive(held, run={"scope": {**self.WHOLE, **scope}})
        found = compare(reference, target)
        (pair,) = [pair for pair in found.pairs if pair.status != "identical"]
        assert (pair.key, pair.status) == (missing, "missing-in-target")
        assert pair.reason == f"the target's capture {reason}"
        assert found.exit_status == 1

    @pytest.mark.spec("CMP-33")
    def test_what_came_after_the_limit_of_bytes_is_told_apart(self, make_archive: MakeArchive) -> None:
        reference = make_archive({f"0/m.{i}/output": X + i for i in range(3)})
        run = {
            "scope": {"inputs": True, "max_bytes": 9000},
            "stopped": {"at": "0/m.1/output", "max_bytes": 9000},
        }
        found = compare(reference, make_archive({"0/m.2/output": X + 2}, run=run))
        assert [pair.reason for pair in found.pairs] == [
            "",
            "the target's capture stopped at its limit of 9000 bytes, at 0/m.1/output",
            "",
        ]
        assert any("The capture of the target stopped at its limit" in text for text in found.warnings)

    @pytest.mark.spec("CMP-33")
    @pytest.mark.parametrize(
        ("scope", "others", "reason"),
        [
            pytest.param({}, {}, "the target's capture took no ops", id="level"),
            pytest.param(
                {"level": "op", "ops_in": ["n"]},
                {place("mul.Tensor", module="n"): fact("aten.mul.Tensor")},
                "the target's capture took only ops in n",
                id="ops-in",
            ),
        ],
    )
    def test_ops_that_were_not_asked_for_are_told(
        self,
        run_of: Callable[..., Any],
        make_archive: MakeArchive,
        scope: dict[str, Any],
        others: dict[str, Any],
        reason: str,
    ) -> None:
        key = f"{place('mul.Tensor')}/output"
        reference = run_of({key: X, "0/m/output": X}, {place("mul.Tensor"): fact("aten.mul.Tensor")})
        found = compare(reference, run_of({"0/m/output": X}, others, scope={"inputs": True, **scope}))
        assert next((p.status, p.reason) for p in found.pairs) == ("missing-in-target", reason)

    @pytest.mark.spec("CMP-6")
    def test_a_module_that_was_never_called_has_no_ops_either(self, run_of: Callable[..., Any]) -> None:
        key = f"{place('mul.Tensor')}/output"
        reference = run_of({key: X, "0/n/output": -X}, {place("mul.Tensor"): fact("aten.mul.Tensor")})
        target = run_of({"0/n/output": -X}, {}, points=[{"site": "m", "status": "never-called"}])
        assert statuses(compare(reference, target))[key] == "never-called"

    def test_a_slice_is_reported_if_shapes_differ(self, make_archive: MakeArchive) -> None:
        target = make_archive({"0/m/output": X[:, :8]}, run={"scope": {"slices": ["[..., :8]"]}})
        (pair,) = compare(make_archive({"0/m/output": X}), target).pairs
        assert pair.reason == "[32, 64] in the reference, [32, 8] in the target; the target kept [..., :8]"


class TestDivergence:
    @pytest.mark.spec("CMP-41")
    @pytest.mark.parametrize(
        ("key", "module", "explanation"),
        [
            ("0/m:aten.mul.Tensor/output", "m", "The code of m made this tensor."),
            ("0/m:aten.mul.Tensor/input.other", "m", "The code of m made this argument of aten.mul.Tensor."),
            ("0/probe:gate/value", "m", "The code of m made this tensor."),
            ("0/@root:generate/scores", "@root", "The code of @root made this tensor."),
            ("0/m/grad_output", "m", "This gradient came back to m from what took its output."),
            ("0/m/grad_input.x", "m", "The way back through m made this gradient."),
            ("0/m/param.weight", "m", "m holds this; it is no result of a computation."),
        ],
    )
    def test_the_module_is_the_one_whose_code_made_it(
        self, make_archive: MakeArchive, key: str, module: str, explanation: str
    ) -> None:
        values = {"0/probe:gate/module": "m"}
        reference = make_archive({key: X}, values=values, run={"modules": MODULES})
        found = compare(reference, make_archive({key: -X}, values=values), rtol=0.1).divergence
        assert found is not None
        assert (found.module, found.explanation) == (module, explanation)
        assert found.class_name == ("my.Model" if module == "@root" else "my.Mlp")

    @pytest.mark.spec("CMP-40")
    def test_a_wrong_value_says_more_than_an_op_that_is_missing(self, run_of: Callable[..., Any]) -> None:
        op = f"{place('mul.Tensor')}/output"
        reference = run_of({op: X, "0/n/output": X}, {place("mul.Tensor"): fact("aten.mul.Tensor")})
        wrong = run_of({"0/n/output": -X}, {place("neg.default"): fact("aten.neg.default")})
        found = compare(reference, wrong).divergence
        assert found is not None
        assert found.pair.key == "0/n/output"

    def test_an_outlier_of_an_op_is_inherited_from_what_the_graph_says_went_in(
        self, run_of: Callable[..., Any]
    ) -> None:
        keys = [f"{place(op)}/output" for op in ("mul.Tensor", "cumsum.default")]
        facts = {
            place("mul.Tensor"): fact("aten.mul.Tensor"),
            place("cumsum.default"): fact("aten.cumsum.default", {"self": keys[0]}),
        }
        wrong = X.copy()
        wrong[3, 5] += 50
        reference = run_of({keys[1]: X, keys[0]: X + 0.5, "0/z/output": X}, facts, **F32)
        target = run_of({keys[1]: wrong, keys[0]: wrong + 0.5, "0/z/output": X}, facts, **F32)
        pairs = compare(reference, target).pairs
        assert [p.status for p in pairs] == ["diverged", "diverged", "identical"]
        found = first_divergence(reference, pairs)
        assert found is not None
        assert found.pair.key == keys[0]  # though the other one stands before it


class TestPolicy:
    def scaled(self, run_of: Callable[..., Any], factor: float, op: str = "mul.Tensor") -> Comparison:
        source, key = "0/m/input.x", f"{place(op)}/output"
        facts = {place(op): fact(f"aten.{op}", {"self": source}, other=factor)}
        noise = 1 + 2e-3 * normal(32, 64, seed=5)
        return compare(
            run_of({source: X, key: 0.25 * X}, facts, **F32),
            run_of({source: X * noise, key: factor * X * noise}, facts, **BF16),
        )

    @pytest.mark.spec("POL-26")
    def test_an_op_that_adds_an_error_is_named_and_one_that_hands_it_on_is_not(
        self, run_of: Callable[..., Any]
    ) -> None:
        assert self.scaled(run_of, 0.25).exit_status == 0
        found = self.scaled(run_of, 0.375)
        assert found.divergence is not None
        assert (found.divergence.pair.key, found.divergence.pair.status) == (
            f"{place('mul.Tensor')}/output",
            "diverged",
        )
        assert [f.test for f in found.divergence.pair.findings if f.status == "diverged"] == [
            "attention_gain"
        ]

    @pytest.mark.spec("POL-26")
    def test_an_op_of_unknown_kind_is_not_tested(self, run_of: Callable[..., Any]) -> None:
        (_, pair) = self.scaled(run_of, 0.375, "cumsum.default").pairs
        assert "attention_gain" not in {f.test for f in pair.findings}

    @pytest.mark.spec("POL-26")
    def test_a_sum_may_cancel(self, run_of: Callable[..., Any]) -> None:
        ours = {"0/a/output": X, "0/b/output": 0.02 * normal(32, 64, seed=8) - X}
        key = f"{place('add.Tensor')}/output"
        facts = {place("add.Tensor"): fact("aten.add.Tensor", {"self": "0/a/output", "other": "0/b/output"})}

        def archive(held: Mapping[str, Array], run: Mapping[str, Any], wrong: float = 0.0) -> Any:
            added = held["0/a/output"] + held["0/b/output"] + wrong * X
            return run_of({**held, key: added}, facts, **run)

        theirs = {name: to_bfloat16(values) for name, values in ours.items()}
        reference = archive(ours, F32)
        (*_, pair) = compare(reference, archive(theirs, BF16)).pairs
        assert {f.test: f.status for f in pair.findings}["attention_gain"] == "within-rounding"
        assert pair.difference is not None
        assert (pair.difference.row_error_median or 0) > 10 * POLICY.rounding * 2**-8
        (*_, pair) = compare(reference, archive(theirs, BF16, wrong=0.1)).pairs
        assert {f.test: f.status for f in pair.findings}["attention_gain"] == "diverged"

    @pytest.mark.spec("POL-26")
    def test_a_view_has_the_error_of_what_it_is_a_view_of(self, run_of: Callable[..., Any]) -> None:
        source, view = "0/a/output", place("view.default")
        seen = {"view_of": source, "shape": [2048], "strides": [1], "offset": 0, "dtype": "float32"}
        facts = {
            view: fact("aten.view.default", {"self": source}, outputs=[{"slot": "output", **seen}]),
            place("mul.Tensor"): fact("aten.mul.Tensor", {"self": {"view": f"{view}/output"}}, order=1),
        }
        key = f"{place('mul.Tensor')}/output"
        noisy = X * (1 + 5e-3 * normal(32, 64, seed=5))
        reference = run_of({source: X, key: X.reshape(-1)}, facts, **F32)
        (_, pair) = compare(reference, run_of({source: noisy, key: noisy.reshape(-1)}, facts, **BF16)).pairs
        assert next(f.text for f in pair.findings if f.test == "attention_gain").startswith(
            "error 0.0048 in, 0.0048 out"
        )

    @pytest.mark.spec("POL-26")
    def test_where_a_mask_was_added_norms_say_nothing(self, run_of: Callable[..., Any]) -> None:
        mask = np.where(np.arange(64) < 60, 0, -3.4e38).astype(np.float32)
        key = f"{place('add.Tensor')}/output"
        facts = {place("add.Tensor"): fact("aten.add.Tensor", {"self": "0/a/output", "other": "0/b/output"})}
        noisy = to_bfloat16(X)
        reference = run_of({"0/a/output": X, "0/b/output": mask, key: X + mask}, facts, **F32)
        target = run_of({"0/a/output": noisy, "0/b/output": mask, key: noisy + mask}, facts, **BF16)
        (*_, pair) = compare(reference, target).pairs
        assert "attention_gain" not in {f.test for f in pair.findings}

    @pytest.mark.spec("POL-27")
    def test_ops_behind_other_choices_are_left_out_and_told_of(self, run_of: Callable[..., Any]) -> None:
        scores = np.tile(np.array([4.0, 3.999, 1.0, 0.0], np.float32), (16, 1))
        theirs = scores.copy()
        theirs[0] = [3.999, 4.0, 1.0, 0.0]
        chosen = np.zeros((16, 1), np.int64)
        flipped = chosen.copy()
        flipped[0] = 1
        sort, index = f"{place('sort.default')}/output.1", f"{place('index.Tensor')}/output"
        after = "0/n:aten.cumsum.default/output"
        facts = {place(op): fact(f"aten.{op}") for op in ("sort.default", "index.Tensor")}
        facts["0/n:aten.cumsum.default"] = fact("aten.cumsum.default")

        def archive(by: Array, of: Array, order: int, run: Mapping[str, Any]) -> Any:
            rows = np.roll(X[:16], order, axis=0)
            return run_of(
                {
                    "0/router/output.router_scores": by,
                    "0/router/output.router_indices": of,
                    "0/m/input.hidden": X[:16],
                    "0/m/input.router_indices": of,
                    sort: np.roll(np.arange(16), order),
                    index: rows,
                    "0/m/output": X[:16],
                    after: np.arange(4) + order,
                },
                facts,
                **run,
            )

        found = compare(archive(scores, chosen, 0, F32), archive(theirs, flipped, 1, BF16))
        assert {k: v for k, v in statuses(found).items() if v == "excluded"} == {
            sort: "excluded",
            index: "excluded",
            after: "excluded",
        }
        assert found.exit_status == 0
        assert "3 tensors of ops were left out, since experts flipped before them." in found.blind_spots

    @pytest.mark.spec("POL-18")
    def test_an_op_that_chooses_the_largest_scores_is_a_router(self, run_of: Callable[..., Any]) -> None:
        scores = np.tile(np.array([4.0, 2.0, 1.0, 0.0], np.float32), (400, 1))
        noisy = scores * (1 + 2e-3 * np.sign(normal(400, 4)))
        key = f"{place('topk.default')}/output.1"
        facts = {place("topk.default"): fact("aten.topk.default", {"self": "0/m/input.scores"})}
        chosen = np.zeros((400, 1), np.int64)
        wrong = chosen.copy()
        wrong[:9] = 1  # no near tie
        reference = run_of({"0/m/input.scores": scores, key: chosen}, facts, **F32)
        found = compare(reference, run_of({"0/m/input.scores": noisy, key: wrong}, facts, **BF16))
        (finding,) = found.pairs[1].findings
        assert (finding.test, finding.status) == ("routing", "diverged")
        assert finding.text == "9 of 400 rows chose other experts, 9 not by a near tie"

    @pytest.mark.spec("POL-28")
    def test_a_parameter_is_that_of_the_reference_or_its_rounding(self, make_archive: MakeArchive) -> None:
        key = "0/m/param.weight"
        bits = bfloat16_bits(X)
        one_off = bits.copy()
        one_off[3, 3] += 2  # in units of the last place
        for target, status in (
            ((bits, dtype("bfloat16")), "within-rounding"),
            ((one_off, dtype("bfloat16")), "diverged"),
            (X.astype(np.float16), "within-rounding"),
            (X * np.float32(1 + 1e-6), "diverged"),
            (X.copy(), "identical"),
        ):
            (pair,) = compare(make_archive({key: X}, run=F32), make_archive({key: target}, run=BF16)).pairs
            assert pair.status == status
            assert {f.test for f in pair.findings} <= {"parameter"}

    @pytest.mark.spec("POL-28")
    def test_the_smallest_values_of_a_dtype_are_rounded_by_their_distance(
        self, make_archive: MakeArchive
    ) -> None:
        tiny = np.array([2.4e-7, 1.3e-8, 3e-7], np.float32)
        found = compare(
            make_archive({"0/m/buffer.b": tiny}), make_archive({"0/m/buffer.b": tiny.astype(np.float16)})
        )
        assert statuses(found) == {"0/m/buffer.b": "within-rounding"}

    @pytest.mark.spec("POL-29")
    @pytest.mark.parametrize("twin", ["bfloat16", "float32"])
    @pytest.mark.parametrize(
        ("op", "slot", "make"),
        [
            pytest.param("native_layer_norm.default", "output.1", np.mean, id="mean-of-a-norm"),
            pytest.param("mean.dim", "output", np.mean, id="mean"),
            pytest.param("sum.dim_IntList", "output", np.sum, id="sum"),
        ],
    )
    def test_what_cancels_is_held_against_what_went_in(
        self, run_of: Callable[..., Any], op: str, slot: str, make: Callable[..., Array], twin: str
    ) -> None:
        centred = X - X.mean(-1, keepdims=True)  # means of 1e-9
        noisy = (
            to_bfloat16(centred) if twin == "bfloat16" else centred * np.float32(1 + 1e-7) + np.float32(1e-7)
        )
        key = f"{place(op)}/{slot}"
        facts = {place(op): fact(f"aten.{op}", {"input": "0/a/output"})}

        def archive(held: Array, run: Mapping[str, Any], wrong: float = 0.0) -> Any:
            return run_of({"0/a/output": held, key: make(held, axis=-1, keepdims=True) + wrong}, facts, **run)

        reference, run = archive(centred, F32), BF16 if twin == "bfloat16" else F32
        (_, pair) = compare(reference, archive(noisy, run)).pairs
        assert pair.difference is not None
        assert (pair.difference.row_error_median or 0) > 0.1
        assert pair.status == "within-rounding"
        (_, pair) = compare(reference, archive(noisy, run, wrong=0.1)).pairs
        assert pair.status in ("suspect", "diverged")

    @pytest.mark.spec("POL-29")
    @pytest.mark.parametrize("key", ["0/m:aten.cumsum.default/output", "0/m/grad_output", "0/m/output"])
    def test_places_within_modules_and_gradients_have_three_times_the_limit(
        self, make_archive: MakeArchive, key: str
    ) -> None:
        limit = 2 * 0.425 * 2**-8 * 2  # at depth 0
        for factor, is_green in ((0.9, True), (2.5, key != "0/m/output"), (3.5, False)):
            target = X * np.float32(1 + factor * limit)
            (pair,) = compare(make_archive({key: X}, run=F32), make_archive({key: target}, run=BF16)).pairs
            assert pair.is_green == is_green, factor

    @pytest.mark.spec("POL-29")
    def test_an_outlier_is_not_looked_for_where_masked_elements_are(self, make_archive: MakeArchive) -> None:
        masked = X.copy()
        masked[:, 2:] = np.finfo(np.float32).min
        wrong = masked.copy()
        wrong[0, 1] += 0.5
        for key, tests in (
            ("0/m:aten.cumsum.default/output", {"growth"}),
            ("0/m/output", {"growth", "outlier_element"}),
        ):
            (pair,) = compare(
                make_archive({key: masked}, run=F32), make_archive({key: wrong}, run=BF16)
            ).pairs
            assert {f.test for f in pair.findings} == tests

    @pytest.mark.spec("CMP-19")
    def test_a_sum_that_loses_a_small_term_is_no_echo(self, make_archive: MakeArchive) -> None:
        keys = ["0/m:aten.mean.dim/output", "0/m:aten.add.Tensor/output"]
        target = {keys[0]: X, keys[1]: X * np.float32(1 + 1e-7)}
        found = compare(make_archive(dict.fromkeys(keys, X)), make_archive(target))
        assert found.exit_status == 0
        target = {"0/m/input.x": X, "0/m/output": X * np.float32(1 + 1e-7)}
        assert compare(make_archive(dict.fromkeys(target, X)), make_archive(target)).exit_status == 1


class TestCalls:
    def test_ops_make_no_leaf_a_composite_and_add_no_calls(self, make_archive: MakeArchive) -> None:
        keys = ["0/m/input.x", "0/m:aten.mm.default/output", "0/m:aten.mm.default/input.y", "0/m/output"]
        calls = Calls(make_archive(dict.fromkeys(keys, X), run={"modules": MODULES}))
        assert [(call.site, len(call.inputs), len(call.outputs)) for call in calls.calls] == [("m", 1, 1)]
        assert calls.is_leaf("m")
        assert calls.class_of("m:aten.mm.default") == "Mlp"
        assert kind_of(Key.parse(keys[1]), calls) == ("Mlp:aten.mm.default", "output")

    @pytest.mark.spec("POL-13")
    def test_an_op_has_the_depth_of_its_block(self, make_archive: MakeArchive) -> None:
        keys = [
            "0/layers.0:aten.add.Tensor/output",
            "0/layers.1:aten.add.Tensor/output",
            "0/layers.1.mlp:aten.mul.Tensor/output",
            "0/head:aten.mm.default/output",
        ]
        archive = make_archive(dict.fromkeys(keys, X))
        calls = Calls(archive)
        assert [calls.depth(record) for record in archive.records] == [1, 2, 2, 2]

    @pytest.mark.spec("POL-29")
    def test_a_gradient_has_come_through_the_blocks_behind_it_too(self, make_archive: MakeArchive) -> None:
        keys = [
            "0/layers.0/param.w",
            "0/layers.1/param.w",
            "0/layers.0/output",
            "0/layers.1/output",
            "0/layers.2/output",
            "0/layers.2/grad_output",
            "0/layers.1/grad_output",
            "0/layers.0/grad_output",
            "0/embed/grad_param.w",
        ]
        archive = make_archive(dict.fromkeys(keys, X))
        calls = Calls(archive)
        depths = [calls.depth(record) for record in archive.records]
        assert depths[2:] == [1, 2, 3, 4, 5, 6, 6]


class TestReports:
    def test_json_tells_class_and_source_of_an_op_and_keeps_them(
        self, run_of: Callable[..., Any], tmp_path: Path
    ) -> None:
        key = f"{place('mul.Tensor')}/output"
        facts = {place("mul.Tensor"): fact("aten.mul.Tensor", line=189)}
        reference, target = run_of({key: X}, facts), run_of({key: -X}, facts)
        comparison = compare(reference, target)
        save_result(tmp_path / "r.json", comparison, examine(comparison, reference, target))
        result = load_result(tmp_path / "r.json")
        assert result.examination.sources == {key: "modeling_my.py:189 in forward"}
        assert result.examination.classes == {"m": "my.Mlp"}
        again = judge_again(result, Thresholds.parse(1e-3, None)).divergence
        assert again is not None
        assert (again.module, again.class_name) == ("m", "my.Mlp")

    @pytest.mark.spec("PRE-7")
    def test_one_changed_number_of_a_parameter_or_a_buffer_explains(self, make_archive: MakeArchive) -> None:
        for key, kind in (("0/m/param.w", "parameters"), ("0/m/buffer.b", "buffers")):
            wrong = X.astype(np.float16)
            wrong[3, 3] += np.float16(0.01)
            for target, count in ((X.astype(np.float16), 0), (wrong, 1)):
                found = preflight(make_archive({key: X}), make_archive({key: target}))
                items = [item for item in found.items if "not the same numbers" in item.text]
                assert [(item.kind, item.name, item.explains) for item in items] == [
                    (kind, key, True)
                ] * count

    def test_gradients_and_parameters_are_no_part_of_the_growth(self, make_archive: MakeArchive) -> None:
        keys = ("0/layers.0/param.w", "0/layers.0/output", "0/layers.0/grad_output")
        noisy = {key: to_bfloat16(X) for key in keys}
        found = compare(make_archive(dict.fromkeys(keys, X), run=F32), make_archive(noisy, run=BF16))
        assert found.account is not None
        assert [depth.depth for depth in found.account.growth] == [1]


def test_a_pair_of_a_key_that_stands_twice_keeps_its_own_target_key(run_of: Callable[..., Any]) -> None:
    key = f"{place('mul.Tensor')}/output"
    last = f"{place('mul.Tensor', 1)}/output"
    reference = run_of({key: X}, {place("mul.Tensor"): fact("aten.mul.Tensor")})
    facts = {place("mul.Tensor", n): fact("aten.mul.Tensor") for n in (0, 1)}
    found = compare(reference, run_of({key: X[:2], last: X}, facts))
    extra = replace(found.pairs[-1])
    assert (extra.key, extra.target.key.text if extra.target else "") == (f"{key} (target)", key)
