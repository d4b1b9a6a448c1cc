"""What a port folds into a tensor, or hoists out of its users, is explained beside a mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import Comparison, FoldedResults, compare
from tests.comparison.conftest import MakeArchive

RNG: Final = np.random.default_rng(11)
X, OUT, Y, Z = (RNG.normal(size=(2, 16, 8)).astype(np.float32) for _ in range(4))
T: Final = RNG.normal(size=(4, 32)).astype(np.float32)
PER_CHANNEL: Final = np.linspace(0.2, 0.9, 8, dtype=np.float32)
SILU: Final = (T / (1 + np.exp(-T.astype(np.float64)))).astype(np.float32)
CHOSEN: Final = np.array([[4, 1], [0, 3], [2, 4], [3, 1]])
WEIGHTS: Final = np.array([[0.7, 0.3], [0.55, 0.45], [0.9, 0.1], [0.6, 0.4]], np.float32)

Make = Callable[..., Any]


@pytest.fixture
def run_of(make_archive: MakeArchive) -> Make:
    """A run of some tensors in order, with the modules that their keys name."""

    def make(tensors: Mapping[str, Any]) -> Any:
        sites = dict.fromkeys(["", *(key.split("/")[1].replace("@root", "") for key in tensors)])
        modules = [{"path": site, "class": "my.Module"} for site in sites]
        return make_archive(tensors, run={"modules": modules, "scope": {"inputs": True}, "dtype": "float32"})

    return make


def statuses(comparison: Comparison, *keys: str) -> list[str]:
    by_key = {pair.key: pair.status for pair in comparison.pairs}
    return [by_key[key] for key in keys]


def first(comparison: Comparison) -> str:
    assert comparison.divergence is not None
    return comparison.divergence.pair.key


def block(result: Any, added: Any, last: Any = Z) -> dict[str, Any]:
    """A block: a projection, a residual sum that a norm is given, and what comes of it."""
    return {
        "0/@root/input.x": X,
        "0/block/input.x": X,
        "0/block.proj/input.x": Y,
        "0/block.proj/output": result,
        "0/block.norm/input.x": added,
        "0/block.norm/output": last,
        "0/block/output": last,
        "0/@root/output": last,
    }


class TestFactors:
    @pytest.mark.spec("CMP-260")
    @pytest.mark.parametrize(
        "factor", [np.float32(0.3), PER_CHANNEL], ids=["of-the-whole", "of-each-channel"]
    )
    def test_a_factor_in_the_weights_is_no_first_divergence_beside_a_mistake(
        self, run_of: Make, factor: Any
    ) -> None:
        reference = run_of(block(OUT, X + factor * OUT))
        comparison = compare(reference, run_of(block(factor * OUT, X + factor * OUT, -Z)), mapping="none")
        assert statuses(comparison, "0/block.proj/output") == ["explained"]
        assert (first(comparison), comparison.exit_status) == ("0/block.norm/output", 1)

    @pytest.mark.spec("CMP-260")
    def test_it_is_if_the_sum_differs_too(self, run_of: Make) -> None:
        reference = run_of(block(OUT, X + np.float32(0.3) * OUT))
        comparison = compare(
            reference, run_of(block(OUT / 2, X + np.float32(0.15) * OUT, -Z)), mapping="none"
        )
        assert first(comparison) == "0/block.proj/output"

    @pytest.mark.spec("CMP-260")
    def test_what_is_made_of_something_else_says_nothing(self, run_of: Make) -> None:
        reference = run_of(block(OUT, X + Y))
        comparison = compare(reference, run_of(block(OUT / 2, X + Y, -Z)), mapping="none")
        assert first(comparison) == "0/block.proj/output"

    @pytest.mark.spec("CMP-260")
    def test_a_tensor_that_is_one_number_in_each_channel_fits_anything(self, run_of: Make) -> None:
        alike = np.broadcast_to(OUT[:1, :1], OUT.shape).copy()
        added = X + np.broadcast_to(Y[:1, :1], Y.shape)
        reference = run_of(block(alike, added))
        comparison = compare(reference, run_of(block(alike / 2, added, -Z)), mapping="none")
        assert first(comparison) == "0/block.proj/output"

    @pytest.mark.spec("CMP-260")
    @pytest.mark.parametrize(
        ("factor", "behind", "given", "status"),
        [
            (0.25, 1.0, 0.05, "explained"),
            (2.0, 0.25, 0.05, "diverged"),
            (0.25, 1.0, 0.0, "diverged"),
        ],
        ids=["folded", "twice-too-large", "of-something-right"],
    )
    def test_behind_a_mistake_the_target_has_another_factor_itself(
        self, run_of: Make, factor: float, behind: float, given: float, status: str
    ) -> None:
        def run(normed: Any, head: Any, logits: Any) -> Any:
            before = {"0/@root/input.x": X, "0/head/input.x": normed.astype(np.float32)}
            return run_of({**before, "0/head/output": head, "0/@root/output.logits": logits})

        wrong = factor * (OUT + 0.05 * Y).astype(np.float32)  # of an earlier mistake, if what is given is
        target = run(Z + given * X, wrong, behind * wrong)
        comparison = compare(run(Z, OUT, OUT / 4), target, mapping="none")
        assert statuses(comparison, "0/head/output", "0/@root/output.logits") == [status, "diverged"]


class TestLeaves:
    @pytest.mark.spec("CMP-260")
    @pytest.mark.parametrize(
        ("hoisted", "status"), [(SILU, "explained"), (SILU / 2, "diverged")], ids=["right", "wrong"]
    )
    def test_an_activation_that_the_target_applies_before_it_hands_a_tensor_on(
        self, run_of: Make, hoisted: Any, status: str
    ) -> None:
        def run(given: Any, last: Any, act: Mapping[str, Any]) -> Any:
            before = {"0/@root/input.t": T[::-1].copy(), "0/block/input.t": given}
            behind = {"0/block.proj/input.x": SILU, "0/block.proj/output": last, "0/@root/output": last}
            return run_of({**before, **act, **behind})

        reference = run(T, T, {"0/block.act/input.x": T, "0/block.act/output": SILU})
        comparison = compare(reference, run(hoisted, -T, {}), mapping="none")
        assert statuses(comparison, "0/block/input.t") == [status]
        assert first(comparison) == ("0/block.proj/output" if status == "explained" else "0/block/input.t")


class TestRouters:
    @pytest.mark.spec("CMP-260")
    @pytest.mark.parametrize(
        ("weights", "status"), [(WEIGHTS, "explained"), (WEIGHTS / 2, "diverged")], ids=["right", "halved"]
    )
    def test_weights_of_chosen_experts_stand_for_the_scores_of_all(
        self, run_of: Make, weights: Any, status: str
    ) -> None:
        scores = RNG.normal(size=(4, 5)).astype(np.float32)
        dense = np.zeros((4, 5), np.float32)
        for row, (one, other) in enumerate(CHOSEN.tolist()):
            dense[row, one], dense[row, other] = weights[row]
        ours = {"0/gate/output.0": scores, "0/gate/output.1": WEIGHTS, "0/gate/output.2": CHOSEN}
        before, behind = {"0/@root/input.x": T, "0/gate/input.x": T}, {"0/@root/output": T}
        reference = run_of({**before, **ours, **behind})
        target = run_of({**before, "0/gate/output.0": dense, "0/@root/output": -T})
        comparison = compare(reference, target, mapping="none")
        assert statuses(comparison, "0/gate/output.0") == [status]


@pytest.mark.spec("LCL-263")
@pytest.mark.parametrize(
    ("made", "is_folded"),
    [(0.3 * OUT, True), (PER_CHANNEL * OUT, True), (OUT + 0.1, False), (0.3 * OUT + 0.01 * Y, False)],
    ids=["factor", "channels", "bias", "factor-and-more"],
)
def test_a_tensor_is_folded_that_another_one_is_but_for_factors(
    run_of: Make, made: Any, is_folded: bool
) -> None:
    reference, target = run_of(block(OUT, X + OUT)), run_of(block(made.astype(np.float32), X + OUT))
    assert FoldedResults(reference, target, ()).is_folded("0/block.proj/output") is is_folded
