"""What is missing or differs is explained if all that is computed from it agrees, and else is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tests.comparison.conftest import MakeArchive

RNG: Final = np.random.default_rng(5)
X, HIDDEN, Q, WEIGHTS, Y, LOGITS = (RNG.normal(size=(32, 16)).astype(np.float32) for _ in range(6))
SITES: Final = ("", "block", "block.norm", "block.attn", "block.attn.q")
# A block: norm, then an attention with a projection and weights that it returns
RUN: Final[dict[str, Any]] = {
    "0/block/input.x": X,
    "0/block.norm/input.x": X,
    "0/block.norm/output": HIDDEN,
    "0/block.attn/input.hidden": HIDDEN,
    "0/block.attn/input.mask": Q > 0,
    "0/block.attn.q/input.x": HIDDEN,
    "0/block.attn.q/output": Q,
    "0/block.attn/output.0": Y,
    "0/block.attn/output.1": WEIGHTS,
    "0/block/output": LOGITS,
    "0/@root/output": LOGITS,
}

Make = Callable[..., Any]


@pytest.fixture
def run_of(make_archive: MakeArchive) -> Make:
    """A run: its tensors without some, others in the place of some, and what its metadata say."""

    def make(
        without: str = "", sites: tuple[str, ...] = SITES, other: Mapping[str, Any] | None = None, **run: Any
    ) -> Any:
        tensors = {key: value for key, value in {**RUN, **(other or {})}.items() if not _fits(key, without)}
        modules = run.pop("modules", [{"path": site, "class": "my.Module"} for site in sites])
        scope = {"inputs": True, **run.pop("scope", {})}
        return make_archive(tensors, run={"modules": modules, "scope": scope, "dtype": "float32", **run})

    return make


def _fits(key: str, without: str) -> bool:
    return bool(without) and key.startswith(f"0/{without}")


def statuses(comparison: Comparison, *keys: str) -> list[str]:
    by_key = {pair.key: pair.status for pair in comparison.pairs}
    return [by_key[key] for key in keys]


def reason(comparison: Comparison, key: str) -> str:
    return next(pair.reason for pair in comparison.pairs if pair.key == key)


class TestUndoneDifferences:
    @pytest.mark.spec("CMP-55")
    def test_what_a_mask_leaves_out_is_no_error_of_the_module_around(self, make_archive: MakeArchive) -> None:
        """Keys without their bias, which softmax does not see, in a batch whose padding differs besides."""
        ids, mask = np.arange(8).reshape(2, 4), np.ones((2, 4), np.int64)
        mask[1, 2:] = 0
        keys, out = RNG.normal(size=(2, 2, 4, 16)).astype(np.float32)
        noisy = out.copy()
        noisy[1, 2:] += 1
        modules = [{"path": path} for path in ("", "block", "block.k")]
        run = {"modules": modules, "dtype": "float32", "scope": {"inputs": True}}

        def tensors(shift: float, made: Any) -> dict[str, Any]:
            return {
                "0/@root/input.input_ids": ids,
                "0/@root/input.attention_mask": mask,
                "0/block.k/output": keys + np.float32(shift),
                "0/block/output": made,
                "0/@root/output": made,
            }

        found = compare(make_archive(tensors(0, out), run=run), make_archive(tensors(0.1, noisy), run=run))
        assert statuses(found, "0/block.k/output") == ["explained"]
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-281", "CMP-55")
    @pytest.mark.parametrize("is_undone", [True, False])
    def test_a_gain_that_later_weights_are_multiplied_by_is_explained(
        self, run_of: Make, is_undone: bool
    ) -> None:
        gains = [{"0/block.norm/param.weight": np.full(16, gain, np.float32)} for gain in (1, 2)]
        other = {**gains[1], "0/block.norm/output": 2 * HIDDEN, "0/block.attn/input.hidden": 2 * HIDDEN}
        if not is_undone:
            other |= {"0/block.attn.q/output": 2 * Q, "0/@root/output": LOGITS * 1.2}
        found = compare(run_of(other=gains[0]), run_of("block.attn.q/input", other=other))
        key = "0/block.norm/param.weight"
        assert statuses(found, key) == ["explained" if is_undone else "diverged"]
        assert found.exit_status == int(not is_undone)


class TestMissing:
    @pytest.mark.spec("CMP-54")
    def test_an_argument_is_explained_if_the_results_of_its_call_agree(self, run_of: Make) -> None:
        found = compare(run_of(), run_of("block.attn/input.mask"))
        assert statuses(found, "0/block.attn/input.mask") == ["explained"]
        assert "given no such argument" in reason(found, "0/block.attn/input.mask")
        assert (found.exit_status, found.divergence, found.absent) == (0, None, [])

    @pytest.mark.spec("CMP-54")
    def test_weights_are_explained_of_a_compiled_program_alone_and_if_its_results_agree(
        self, run_of: Make
    ) -> None:
        key = "0/block.attn.q/param.weight"
        reference = run_of(other={key: WEIGHTS})
        compiled = {"operation_map": [{"node": "mm", "op": "matmul"}]}
        assert statuses(compare(reference, run_of()), key) == ["missing-in-target"]
        explained = compare(reference, run_of(**compiled))
        assert (statuses(explained, key), explained.exit_status) == (["explained"], 0)
        wrong = {"0/block.attn.q/output": Q + 1, "0/block/output": LOGITS + 1, "0/@root/output": LOGITS + 1}
        assert statuses(compare(reference, run_of(other=wrong, **compiled)), key) == ["missing-in-target"]

    @pytest.mark.spec("CMP-54")
    def test_an_argument_is_missing_if_a_result_of_its_call_differs(self, run_of: Make) -> None:
        wrong = {"0/block.attn/output.0": Y + 1, "0/block/output": LOGITS + 1, "0/@root/output": LOGITS + 1}
        found = compare(run_of(), run_of("block.attn/input.mask", other=wrong))
        assert statuses(found, "0/block.attn/input.mask") == ["missing-in-target"]
        assert found.divergence is not None
        assert found.divergence.pair.key == "0/block.attn/output.0"

    @pytest.mark.spec("CMP-54")
    @pytest.mark.parametrize("implementation", ["sdpa", ""])
    def test_attention_weights_that_the_target_does_not_return(
        self, run_of: Make, implementation: str
    ) -> None:
        target = run_of("block.attn/output.1", model={"attn_implementation": implementation})
        found = compare(run_of(), target)
        assert statuses(found, "0/block.attn/output.1") == ["explained"]
        assert ("sdpa keeps no attention weights" in reason(found, "0/block.attn/output.1")) is bool(
            implementation
        )
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-54")
    @pytest.mark.parametrize(("result", "status"), [(LOGITS, "explained"), (LOGITS + 1, "missing-in-target")])
    def test_a_module_that_the_target_has_not_is_explained_by_the_one_around_it(
        self, run_of: Make, result: Any, status: str
    ) -> None:
        sites = tuple(site for site in SITES if not site.startswith("block.attn"))
        target = run_of("block.attn", sites, {"0/block/output": result})
        found = compare(run_of(), target, mapping="none")
        assert statuses(found, "0/block.attn/output.0", "0/block.attn.q/output") == [status, status]

    @pytest.mark.spec("CMP-54")
    def test_nothing_explains_a_result_of_the_model_nor_what_leads_to_it_alone(self, run_of: Make) -> None:
        pooled = {"0/pooler/output": WEIGHTS * 2, "0/@root/output.1": WEIGHTS * 2}
        found = compare(run_of(sites=(*SITES, "pooler"), other=pooled), run_of(), mapping="none")
        assert statuses(found, *pooled) == ["missing-in-target"] * 2
        assert (found.exit_status, found.divergence) == (1, None)

    @pytest.mark.spec("CMP-220")
    @pytest.mark.parametrize(
        ("left_out", "other", "status"),
        [
            pytest.param(["bert.pooler.dense.weight"], {}, "explained", id="left-out"),
            pytest.param([], {}, "missing-in-target", id="forgotten"),
            pytest.param(["dense.weight"], {}, "missing-in-target", id="another-weight"),
            pytest.param(
                ["pooler.dense.weight"],
                {"0/@root/output.0": LOGITS + 1},
                "missing-in-target",
                id="beside-a-mistake",
            ),
        ],
    )
    def test_a_result_of_a_head_whose_weights_the_target_leaves_out(
        self, run_of: Make, left_out: list[str], other: Mapping[str, Any], status: str
    ) -> None:
        returned = {"0/@root/output.0": LOGITS}
        pooled = {
            "0/pooler.dense/output": Q * 2,
            "0/pooler/output": WEIGHTS * 2,
            "0/@root/output.1": WEIGHTS * 2,
        }
        modules: list[dict[str, Any]] = [{"path": site, "class": "my.Module"} for site in (*SITES, "pooler")]
        modules.append(
            {"path": "pooler.dense", "class": "my.Linear", "parameters": {"weight": {"shape": [16, 16]}}}
        )
        found = compare(
            run_of(other={**returned, **pooled}, modules=modules),
            run_of(other={**returned, **other}, model={"left_out_weights": left_out}),
            mapping="none",
        )
        assert statuses(found, "0/@root/output.1") == [status]

    @pytest.mark.spec("CMP-220")
    @pytest.mark.parametrize(
        ("left_out", "status"),
        [(["pooler.weight"], "explained"), ([], "missing-in-target")],
        ids=["left-out", "forgotten"],
    )
    def test_a_head_that_is_left_out_is_explained_in_an_injected_run_and_nothing_else_is(
        self, run_of: Make, left_out: list[str], status: str
    ) -> None:
        sites = (*SITES, "pooler")
        pooled = {"0/pooler/output": WEIGHTS * 2, "0/@root/output.1": WEIGHTS * 2, "0/@root/output.0": LOGITS}
        modules: list[dict[str, Any]] = [{"path": site, "class": "my.Module"} for site in sites]
        modules[-1]["parameters"] = {"weight": {"shape": [16, 16]}}
        slots = [{"site": "block", "slot": "input.x", "status": "injected", "calls": {"0": "0"}}]
        target = run_of(
            "block.attn.q/output",
            other={"0/@root/output.0": LOGITS},
            model={"left_out_weights": left_out},
            injected={"source": "ref.h5", "root": "", "mapping": "", "slots": slots},
        )
        found = compare(run_of(other=pooled, sites=sites, modules=modules), target, mapping="none")
        assert statuses(found, "0/@root/output.1", "0/block.attn.q/output") == [status, "missing-in-target"]

    @pytest.mark.spec("CMP-221")
    @pytest.mark.parametrize(
        ("other", "scope", "status"),
        [
            pytest.param({}, {}, "explained", id="agrees"),
            pytest.param({"0/block.attn/output.0": Y + 1}, {}, "missing-in-target", id="result-differs"),
            pytest.param({"0/block.attn.q/output": Q + 1}, {}, "missing-in-target", id="differs-within"),
            pytest.param({"0/block.norm/output": HIDDEN + 1}, {}, "explained", id="differs-elsewhere"),
            pytest.param(
                {},
                {"exclude": ["*/block.attn/input.mask"]},
                "missing-in-target",
                id="left-out-by-the-capture",
            ),
        ],
    )
    def test_an_argument_is_explained_in_an_injected_run_if_its_call_agrees_and_all_within(
        self, run_of: Make, other: Mapping[str, Any], scope: Mapping[str, Any], status: str
    ) -> None:
        slots = [{"site": "block.attn.q", "slot": "input.x", "status": "injected", "calls": {"0": "0"}}]
        injected = {"source": "ref.h5", "root": "", "mapping": "", "slots": slots}
        target = run_of("block.attn/input.mask", other=other, injected=injected, scope=scope)
        found = compare(run_of(), target, mapping="none")
        assert statuses(found, "0/block.attn/input.mask") == [status]
        assert found.exit_status == int(bool(other) or status != "explained")

    @pytest.mark.spec("CMP-54")
    @pytest.mark.parametrize(
        "run",
        [
            pytest.param({}, id="a record that is lost, of a module that was called"),
            pytest.param({"scope": {"exclude": ["block.attn"]}}, id="left out by the capture"),
            pytest.param({"modules": []}, id="modules that are not listed"),
        ],
    )
    def test_what_no_run_explains_is_missing(self, run_of: Make, run: dict[str, Any]) -> None:
        found = compare(run_of(), run_of("block.attn/output", **run), mapping="none")
        assert statuses(found, "0/block.attn/output.0", "0/block.attn/output.1") == ["missing-in-target"] * 2
        assert found.exit_status == 1
        assert {p.status for p in found.pairs if p.is_compared} == {"identical"}

    @pytest.mark.spec("CMP-54")
    def test_what_holds_the_same_as_something_that_agrees(self, run_of: Make) -> None:
        dropout = {"0/block.drop/output": Q}
        found = compare(run_of(sites=(*SITES, "block.drop"), other=dropout), run_of(), mapping="none")
        assert (
            reason(found, "0/block.drop/output") == "it holds what 0/block.attn.q/output holds, which agrees"
        )

    @pytest.mark.spec("CMP-54")
    @pytest.mark.parametrize(("error", "status"), [(0, "explained"), (1e-6, "not-capturable")])
    def test_what_lies_in_a_compiled_graph_is_explained_by_identical_results_alone(
        self, run_of: Make, error: float, status: str
    ) -> None:
        sites = ("", "block", "block.norm", "block.attn", "block.attn._orig_mod", "block.attn._orig_mod.q")
        why = "inside a compiled graph (torch.compile)"
        points = [{"site": site, "status": "not-capturable", "reason": why} for site in sites[-2:]]
        results = {"0/block.attn/output.0": Y * np.float32(1 + error)}
        found = compare(run_of(), run_of("block.attn.q", sites, results, points=points))
        assert statuses(found, "0/block.attn/output.0", "0/block.attn.q/output")[1] == status
        assert "compiled graph" in reason(found, "0/block.attn.q/output")
        assert found.exit_status == (0 if status == "explained" else 1)

    @pytest.mark.spec("CMP-54")
    def test_fewer_calls_are_explained_by_the_module_around_them(self, run_of: Make) -> None:
        def points(calls: int) -> list[dict[str, Any]]:
            return [{"site": "block.norm", "status": "captured", "calls": calls}]

        reference = run_of(other={"0/block.norm@1/output": HIDDEN * 3}, points=points(2))
        key = "0/block.norm@1/output"
        assert statuses(compare(reference, run_of(points=points(1))), key) == ["explained"]
        assert statuses(compare(reference, run_of(points=points(2))), key) == ["missing-in-target"]

    @pytest.mark.spec("CMP-54")
    def test_nothing_explains_what_a_user_requires(self, run_of: Make) -> None:
        found = compare(run_of(), run_of("block.attn/input.mask"), require="block.attn")
        assert (statuses(found, "0/block.attn/input.mask"), found.exit_status) == (["missing-in-target"], 1)


class TestDifferent:
    @pytest.mark.spec("CMP-55")
    def test_a_factor_that_moved_into_the_next_weight_is_undone(self, run_of: Make) -> None:
        gain = np.linspace(0.5, 2, 16, dtype=np.float32)
        folded = {"0/block.norm/output": HIDDEN / gain, "0/block.attn/input.hidden": HIDDEN / gain}
        found = compare(run_of(), run_of(other={**folded, "0/block.attn.q/input.x": HIDDEN / gain}))
        assert statuses(found, *folded, "0/block.attn.q/input.x") == ["explained"] * 3
        assert "block.attn.q" in reason(found, "0/block.norm/output")
        assert (found.exit_status, found.divergence) == (0, None)

    @pytest.mark.spec("CMP-55")
    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param({"0/block/output": LOGITS * 1.2}, id="the module around it"),
            pytest.param({"0/@root/output": LOGITS * 1.2}, id="the model"),
        ],
    )
    def test_nothing_is_undone_where_something_computed_from_it_differs(
        self, run_of: Make, wrong: dict[str, Any]
    ) -> None:
        keys = ("0/block.norm/output", "0/block.attn/input.hidden", "0/block.attn.q/input.x")
        found = compare(run_of(), run_of(other={**dict.fromkeys(keys, HIDDEN * 1.1), **wrong}))
        assert statuses(found, "0/block.norm/output") == ["diverged"]
        assert found.exit_status == 1

    @pytest.mark.spec("CMP-55")
    def test_a_scale_that_moved_from_queries_to_keys_is_undone_by_the_attention(self, run_of: Make) -> None:
        found = compare(run_of(), run_of(other={"0/block.attn.q/output": Q / 8}))
        assert statuses(found, "0/block.attn.q/output") == ["explained"]
        assert "what block.attn makes of it agrees" in reason(found, "0/block.attn.q/output")

    @pytest.mark.spec("CMP-55")
    def test_a_module_that_returns_a_difference_undoes_it_by_no_further_result(self, run_of: Make) -> None:
        """An output projection, whose result the attention returns beside weights that agree."""
        keys = ("0/block.attn.q/output", "0/block.attn/output.0")
        reference = run_of(other=dict.fromkeys(keys, Y))
        found = compare(reference, run_of(other={**dict.fromkeys(keys, Y * 2), "0/block/output": LOGITS * 2}))
        assert statuses(found, *keys) == ["diverged", "diverged"]
        assert found.divergence is not None
        assert found.divergence.module == "block.attn.q"

    @pytest.mark.spec("CMP-55")
    @pytest.mark.parametrize(("handed_on", "status"), [(X, "explained"), (X * 1.2, "diverged")])
    def test_a_place_that_holds_something_else_is_explained_by_a_later_one_that_holds_the_same(
        self, run_of: Make, handed_on: Any, status: str
    ) -> None:
        norm = {"0/block.norm/input.x": handed_on, "0/block/input.x": Q}
        found = compare(run_of(), run_of(other=norm), exclude=["@root"] if status == "diverged" else [])
        assert statuses(found, "0/block/input.x") == [status]

    @pytest.mark.spec("CMP-55")
    @pytest.mark.parametrize("small", [0.0, 1e-6])
    @pytest.mark.parametrize(("noise", "status"), [(4e-3, "diverged"), (2e-5, "explained")])
    def test_an_error_of_a_reference_near_zero_is_no_larger_than_one(
        self, run_of: Make, small: float, noise: float, status: str
    ) -> None:
        results = {"0/block.attn/output.0": Y, "0/block.attn.q/output": Q, "0/block/output": LOGITS}
        results = {key: value * np.float32(1 + noise) for key, value in results.items()}
        results["0/@root/output"] = results["0/block/output"]
        key = "0/block.attn/output.1"
        reference, target = (
            run_of(other={key: WEIGHTS * np.float32(size), **made}, dtype="bfloat16")
            for size, made in ((small, {}), (1.0, results))
        )
        found = compare(reference, target, compute_dtype="bfloat16")
        assert statuses(found, "0/@root/output", key) == ["within-rounding", status]

    @pytest.mark.spec("CMP-19")
    def test_what_repeats_a_tensor_that_differs_need_not_be_equal_to_it(self, run_of: Make) -> None:
        other = {"0/block.norm/output": Q, "0/block.attn/input.hidden": HIDDEN * (1 + 1e-7)}
        found = compare(run_of(), run_of(other={**other, "0/block.attn.q/input.x": HIDDEN * (1 + 1e-7)}))
        assert "diverged" not in statuses(found, "0/block.attn/input.hidden", "0/block.attn.q/input.x")

    @pytest.mark.spec("CMP-55")
    def test_an_error_that_a_result_has_too_though_within_a_tolerance_is_not_undone(
        self, run_of: Make
    ) -> None:
        keys = ("0/block.norm/output", "0/block.attn/input.hidden", "0/block.attn.q/input.x")
        results = {"0/block.attn.q/output": Q, "0/block.attn/output.0": Y, "0/block/output": LOGITS}
        wrong = {
            **dict.fromkeys(keys, HIDDEN * 1.05),
            **{key: value * 1.01 for key, value in results.items()},
        }
        found = compare(run_of(), run_of(other=wrong), rtol=0.02)
        assert statuses(found, "0/block.attn.q/output", "0/block.norm/output") == ["match", "diverged"]

    @pytest.mark.spec("CMP-90")
    @pytest.mark.parametrize(("factor", "status"), [(1.0, "explained"), (1.1, "shape-mismatch")])
    def test_what_is_handed_on_and_explained_is_in_the_way_of_nothing_else(
        self, run_of: Make, factor: float, status: str
    ) -> None:
        """Biases with a row for each sequence, which a block returns for the next, and those without."""
        bias, cross = RNG.normal(size=(2, 2, 4, 8, 8)).astype(np.float32)
        keys = ("0/block.attn/input.bias", "0/block.attn/output.2", "0/block/output.1", "0/block/output.2")
        reference = run_of(other={**dict.fromkeys(keys[:3], bias), keys[3]: cross})
        results = {"0/block.attn/output.0": Y * factor, "0/block/output": LOGITS * factor}
        other = {**dict.fromkeys(keys[:3], bias[:1]), keys[3]: cross[:1], **results}
        found = compare(reference, run_of(other=other))
        assert statuses(found, keys[0]) == [status]
        assert (found.exit_status == 0) == (status == "explained")
        if status == "explained":
            assert statuses(found, *keys) == ["explained"] * 4

    @pytest.mark.spec("CMP-91")
    @pytest.mark.parametrize(("returned", "status"), [(Y, "explained"), (Y * 1.5, "diverged")])
    def test_a_result_that_another_tensor_is_returned_for_hides_no_difference_and_undoes_none(
        self, run_of: Make, returned: Any, status: str
    ) -> None:
        reference = run_of(other={"0/@root/output": LOGITS, "0/@root/output.pooled": Q})
        folded = dict.fromkeys(
            ("0/block.norm/output", "0/block.attn/input.hidden", "0/block.attn.q/input.x"), Y
        )
        found = compare(reference, run_of(other={**folded, "0/@root/output.pooled": returned}))
        assert statuses(found, "0/@root/output.pooled") == ["diverged"]
        assert statuses(found, "0/block.norm/output") == [status]
        assert found.exit_status == 1
        if status == "explained":
            assert found.divergence is not None
            assert found.divergence.pair.key == "0/@root/output.pooled"
            assert (
                "returns 0/block.attn.q/output there, the target what 0/block.attn/output.0 holds"
                in reason(found, "0/@root/output.pooled")
            )


class TestDumps:
    """A dump of prints lists no modules: what it lacks is explained by the module around it alone."""

    DUMP: Final[Mapping[str, Any]] = {"modules": [], "scope": {}, "dump": "files"}

    @pytest.mark.spec("CMP-54")
    @pytest.mark.parametrize("without", ["block.attn.q", "block.attn/input.mask", "block.attn"])
    def test_a_function_in_the_place_of_a_module_is_explained(self, run_of: Make, without: str) -> None:
        found = compare(run_of(), run_of(without, **self.DUMP), mapping="none")
        missing = [pair for pair in found.pairs if pair.key.startswith(f"0/{without}")]
        assert missing
        assert {pair.status for pair in missing} == {"explained"}
        assert found.exit_status == 0

    @pytest.mark.spec("CMP-54")
    def test_what_nothing_that_agrees_is_made_of_is_missing(self, run_of: Make) -> None:
        other = {"0/block.attn/output.0": Y + 1, "0/block/output": LOGITS + 1, "0/@root/output": LOGITS + 1}
        found = compare(run_of(), run_of("block.attn.q", other=other, **self.DUMP), mapping="none")
        assert statuses(found, "0/block.attn.q/output") == ["missing-in-target"]
        assert found.exit_status == 1


class TestBehindOtherExperts:
    """Tokens that chose other experts, at near ties, are excused: what is green then need not be equal."""

    CHOSEN: Final = np.zeros((32, 1), np.int64)
    SCORES: Final = np.tile(np.array([1.001, 1.0, 0.1, 0.2], np.float32), (32, 1))
    SITES: Final = ("", "block", "block.norm", "block.gate", "block.tail", "block.tail.act")

    def run(self, make: MakeArchive, hidden: Any, again: Any, *, flips: int = 0, without: str = "") -> Any:
        """A block with a tensor before its router, and the same again behind it, which `tail` is given."""
        chosen, scores, last = self.CHOSEN.copy(), self.SCORES.copy(), Y.copy()
        chosen[:flips], scores[:flips, :2] = 1, self.SCORES[0, 1::-1]
        last[:flips] = -Y[:flips]
        tensors = {
            "0/block/input.x": X,
            "0/block.norm/output": hidden,
            "0/block.gate/output.0": scores,
            "0/block.gate/output.1": chosen,
            "0/block.tail/input.x": again,
            "0/block.tail.act/output": last,
            "0/block.tail/output": last,
            "0/block/output": last,
            "0/@root/output": last,
        }
        modules = [{"path": site, "class": "my.Module"} for site in self.SITES if site != without]
        return make(
            {key: value for key, value in tensors.items() if not without or without not in key},
            run={"modules": modules, "scope": {"inputs": True}, "dtype": "bfloat16" if flips else "float32"},
        )

    @pytest.mark.spec("CMP-55", "CMP-92")
    @pytest.mark.parametrize("flips", [12, 4])
    def test_what_is_excused_does_not_explain_that_the_same_differs(
        self, make_archive: MakeArchive, flips: int
    ) -> None:
        again = HIDDEN.copy()
        again[: flips // 2] *= 0.5  # of some of those that chose otherwise
        wrong = self.run(make_archive, HIDDEN * np.float32(0.5), again, flips=flips)
        found = compare(self.run(make_archive, HIDDEN, HIDDEN), wrong)
        keys = ("0/block.tail/input.x", "0/@root/output", "0/block.gate/output.1")
        assert statuses(found, *keys) == ["within-rounding"] * 3
        pairs = {pair.key: pair for pair in found.pairs}
        assert [pairs[key].is_equal for key in keys[:2]] == [False, False]
        assert [pairs[key].is_green for key in keys[:2]] == [True, True]
        assert statuses(found, "0/block.norm/output") == ["diverged"]
        assert found.exit_status == 1

    @pytest.mark.spec("CMP-55", "CMP-92")
    def test_what_is_equal_behind_them_explains_it(self, make_archive: MakeArchive) -> None:
        wrong = self.run(make_archive, HIDDEN * np.float32(0.5), HIDDEN * np.float32(1 + 2.0**-9), flips=4)
        found = compare(self.run(make_archive, HIDDEN, HIDDEN), wrong)
        assert statuses(found, "0/block.norm/output") == ["explained"]
        assert next(pair.is_equal for pair in found.pairs if pair.key == "0/block.tail/input.x")

    @pytest.mark.spec("CMP-54", "CMP-92")
    def test_what_the_target_lacks_is_explained_by_what_is_excused(self, make_archive: MakeArchive) -> None:
        target = self.run(make_archive, HIDDEN, HIDDEN, flips=4, without="block.tail.act")
        found = compare(self.run(make_archive, HIDDEN, HIDDEN), target)
        assert statuses(found, "0/block.tail.act/output") == ["explained"]
        assert not next(pair.is_equal for pair in found.pairs if pair.key == "0/block.tail/output")
        assert found.exit_status == 0


@pytest.mark.spec("CMP-55")
@pytest.mark.parametrize("is_used_right", [True, False], ids=["right-where-used", "wrong-in-one-place"])
def test_a_scale_that_the_target_has_behind_a_result_is_no_first_divergence_beside_a_mistake(
    run_of: Make, is_used_right: bool
) -> None:
    wrong: dict[str, Any] = {"0/block.norm/output": HIDDEN / 8}
    wrong |= {key: Y[::-1].copy() for key in ("0/block/output", "0/@root/output", "0/block.attn/output.0")}
    if not is_used_right:
        wrong["0/block.attn.q/input.x"] = HIDDEN / 8
    comparison = compare(run_of(), run_of(other=wrong), mapping="none")
    assert comparison.exit_status == 1
    assert statuses(comparison, "0/block.norm/output") == ["explained" if is_used_right else "diverged"]
    assert comparison.divergence is not None
    first = "0/block.attn/output.0" if is_used_right else "0/block.norm/output"
    assert comparison.divergence.pair.key == first
