"""Mistakes planted into random values by numpy alone, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

CONFIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PRECISIONS = ["float32", "bfloat16"]
RNG = np.random.default_rng(11)
R = RNG.standard_normal((2, 24, 64)).astype(np.float32)
HEADS = R.reshape(2, 24, 4, 16)
B = RNG.standard_normal(64)
ORDER = RNG.permutation(64)
POSITIONS = np.arange(24)[None, :, None]


def plant(
    kind: str, target: Array, clause: pytest.MarkDecorator, name: str, reference: Array = R, **facts: Any
) -> Any:
    return pytest.param(reference, target, kind, facts, marks=clause, id=name)


def cosines(base: float, count: int = 24, scale: float = 1.0) -> Array:
    angles = np.arange(count)[:, None] * base ** (-np.arange(16) / 16)
    return np.asarray(scale * np.cos(np.concatenate([angles, angles], axis=1))[None])


def turned(angles: Array) -> Array:
    z = (HEADS[..., :8] + 1j * HEADS[..., 8:]) * np.exp(1j * angles)[None, :, None]
    return np.asarray(np.concatenate([z.real, z.imag], axis=-1))


STEADY = np.arange(24)[:, None] * 0.7 ** np.arange(8)
MASKED = np.where(np.triu(np.ones((24, 24)), 1)[None] > 0, -np.inf, R[:1, :, :24])
PROBABILITIES = np.exp(R) / np.exp(R).sum(-1, keepdims=True)
SHARPER = np.exp(2 * R) / np.exp(2 * R).sum(-1, keepdims=True)
PLANTED = [
    plant("factor", 8 * R, pytest.mark.spec("DIA-10"), "sqrt-hidden", equals=["sqrt(hidden_size)", "8"]),
    plant("factor", R / 4, pytest.mark.spec("DIA-10"), "one-over-sqrt-head"),
    plant("factor", 3.21 * R, pytest.mark.spec("DIA-10"), "no-name", equals=[]),
    plant("factor", -2 * R, pytest.mark.spec("DIA-10"), "negative"),
    plant("sign", -R, pytest.mark.spec("DIA-10"), "sign"),
    plant("offset", R + 0.3, pytest.mark.spec("DIA-10"), "offset"),
    plant("affine", 2 * R + 1, pytest.mark.spec("DIA-10"), "affine"),
    plant("channel-offset", R - B, pytest.mark.spec("DIA-12"), "bias"),
    plant("channel-factor", R * (1 + 0.3 * B), pytest.mark.spec("DIA-12"), "weight"),
    plant("row-factor", R * (0.5 + RNG.random((2, 24, 1))), pytest.mark.spec("DIA-12"), "rows"),
    plant("channel-affine", R * (1 + 0.3 * B) + B[::-1], pytest.mark.spec("DIA-12"), "images"),
    plant(
        "head-factor",
        HEADS * np.array([1.0, 0.5, 2.0, 3.0])[:, None],
        pytest.mark.spec("DIA-12"),
        "heads",
        HEADS,
    ),
    plant("channel-order", R[..., ::-1], pytest.mark.spec("DIA-13"), "reversed"),
    plant("channel-order", R[..., ORDER], pytest.mark.spec("DIA-13"), "any-order"),
    plant(
        "channel-order", HEADS[:, :, [2, 0, 3, 1]].reshape(R.shape), pytest.mark.spec("DIA-13"), "head-order"
    ),
    plant("head-order", HEADS[:, :, [0, 0, 1, 1]], pytest.mark.spec("DIA-13"), "repeated-heads", HEADS),
    plant("token-order", np.roll(R, 1, 1), pytest.mark.spec("DIA-13"), "rolled"),
    plant(
        "token-shift",
        np.concatenate([RNG.standard_normal((2, 1, 64)), R[:, :-1]], 1),
        pytest.mark.spec("DIA-13"),
        "shift",
        shift=-1,
    ),
    plant(
        "token-shift",
        R[:, 1:],
        pytest.mark.spec("DIA-14"),
        "begin-token",
        before=1,
        behind=0,
        longer="reference",
    ),
    plant(
        "token-shift",
        R,
        pytest.mark.spec("DIA-14"),
        "two-more",
        R[:, 1:-1],
        before=1,
        behind=1,
        longer="target",
    ),
    plant("transposed", R.transpose(0, 2, 1), pytest.mark.spec("DIA-14"), "permuted", axes=[0, 2, 1]),
    plant(
        "transposed",
        R[:, :, :24].transpose(0, 2, 1),
        pytest.mark.spec("DIA-13"),
        "square",
        R[:, :, :24],
        axes=[1, 2],
    ),
    plant("reshaped", R.reshape(48, 64), pytest.mark.spec("DIA-14"), "reshaped"),
    plant(
        "rotary-layout",
        HEADS.reshape(2, 24, 4, 2, 8).swapaxes(-1, -2).reshape(R.shape),
        pytest.mark.spec("DIA-15"),
        "pairs",
    ),
    plant(
        "rotary-layout",
        HEADS.reshape(2, 24, 4, 8, 2).swapaxes(-1, -2).reshape(R.shape),
        pytest.mark.spec("DIA-15"),
        "halves",
    ),
    plant("rotary-frequencies", cosines(5e5), pytest.mark.spec("DIA-16"), "theta", cosines(1e4)),
    plant("factor", cosines(1e4, scale=1.2), pytest.mark.spec("DIA-10"), "yarn-scale", cosines(1e4)),
    plant(
        "rotary-frequencies",
        turned(STEADY),
        pytest.mark.spec("DIA-16"),
        "other-frequencies",
        HEADS,
        layout="halves",
    ),
    plant(
        "rotary-shift",
        turned(0.7 ** np.arange(8) + 0 * STEADY),
        pytest.mark.spec("DIA-16"),
        "other-start",
        HEADS,
    ),
    plant(
        "rotary-angles", turned(STEADY**2), pytest.mark.spec("DIA-16"), "any-angles", HEADS, layout="halves"
    ),
    plant("head-nesting", HEADS.swapaxes(-1, -2).reshape(R.shape), pytest.mark.spec("DIA-15"), "nesting"),
    plant(
        "heads-not-moved-back",
        HEADS.transpose(0, 2, 1, 3).reshape(R.shape),
        pytest.mark.spec("DIA-15"),
        "not-moved",
    ),
    plant("channel-signs", np.where(np.arange(64) % 16 < 8, -R, R), pytest.mark.spec("DIA-15"), "signs"),
    plant("padding-side", np.stack([R[0], np.roll(R[1], 5, 0)]), pytest.mark.spec("DIA-13"), "padding"),
    plant("clipped", np.clip(R, -1, 1.5), pytest.mark.spec("DIA-17"), "clip", low=-1.0, high=1.5),
    plant("clip-missing", R, pytest.mark.spec("DIA-17"), "no-clip", np.clip(R, -1, 1)),
    plant("softcap-added", 2 * np.tanh(R / 2), pytest.mark.spec("DIA-17"), "softcap"),
    plant("softcap-missing", R, pytest.mark.spec("DIA-17"), "no-softcap", 2 * np.tanh(R / 2)),
    plant("activation-added", np.maximum(R, 0), pytest.mark.spec("DIA-17"), "relu", activation="relu"),
    plant(
        "activation-missing",
        R,
        pytest.mark.spec("DIA-17"),
        "no-silu",
        R / (1 + np.exp(-R)),
        activation="silu",
    ),
    plant("softmax-scale", SHARPER, pytest.mark.spec("DIA-18"), "temperature", PROBABILITIES),
    plant("logarithm", np.log(PROBABILITIES), pytest.mark.spec("DIA-18"), "logarithm", PROBABILITIES),
    plant("zero", 0 * R, pytest.mark.spec("DIA-19"), "zeros"),
    plant("constant", 0 * R + 1, pytest.mark.spec("DIA-19"), "ones"),
    plant("mask-sentinel", np.maximum(MASKED, -1e9), pytest.mark.spec("DIA-19"), "sentinel", MASKED),
    plant(
        "only-token",
        np.where(POSITIONS == 23, R[::-1], R),
        pytest.mark.spec("DIA-47"),
        "last-token",
        indices=[23],
    ),
    plant(
        "only-token",
        np.where(POSITIONS >= 15, R[::-1], R),
        pytest.mark.spec("DIA-47"),
        "tail",
        indices=list(range(15, 24)),
    ),
    plant(
        "only-head",
        np.where(np.arange(4)[:, None] % 3 == 0, HEADS[::-1], HEADS),
        pytest.mark.spec("DIA-47"),
        "heads",
        HEADS,
    ),
    plant("factor", np.where(np.arange(64) // 16 == 2, 2 * R, R), pytest.mark.spec("DIA-49"), "scaled-head"),
    plant("offset", np.where(POSITIONS == 0, R + 1, R), pytest.mark.spec("DIA-49"), "first-token"),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("reference", "target", "kind", "facts"), PLANTED)
def test_a_planted_mistake_is_named_first(
    diagnosed: Diagnose, reference: Array, target: Array, kind: str, facts: dict[str, Any], precision: str
) -> None:
    found = diagnosed(reference, target, precision=precision, config=CONFIG)
    assert found.status == "explained"
    assert found.explanations[0].kind == kind
    for name, value in facts.items():
        told = found.explanations[0].facts[name]
        assert told == (pytest.approx(value, rel=5e-3) if isinstance(value, float) else value)
    one = found.explanations[0]
    limit = 4 * 0.425 * (2**-8 if precision == "bfloat16" else 2**-24)  # of four roundings
    assert one.after <= max(limit, 0.01 * (one.before or 1.0))


@pytest.mark.spec("DIA-14")
@pytest.mark.parametrize(
    ("shape", "axis", "more", "where"),
    [
        ((2, 5, 6, 7), 1, "it has 1 index of axis 1 more, ", "axis 1"),
        ((2, 5, 6, 7), 1, "it has 2 indices of axis 1 more, ", "axis 1"),
        ((2, 5, 8), 0, "it has 1 sequence more, ", "its sequences"),
        ((2, 5, 8), 2, "it has 2 channels more, ", "its channels"),
    ],
)
def test_what_an_axis_has_more_is_counted(
    diagnosed: Diagnose, shape: tuple[int, ...], axis: int, more: str, where: str
) -> None:
    r = np.random.default_rng(4).standard_normal(shape)
    extra = np.zeros((*shape[:axis], int(more.split()[2]), *shape[axis + 1 :]))
    best = diagnosed(r, np.concatenate((r, extra), axis)).explanations[0]
    assert f"the target is padded: {more}0 before and " in best.text
    assert best.hint == f"The target is padded along {where}."


@pytest.mark.spec("DIA-17")
@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        pytest.param("bfloat16", to_bfloat16, id="bfloat16"),
        pytest.param("float16", lambda x: x.astype(np.float16).astype(np.float32), id="float16"),
        pytest.param("float8_e5m2", lambda x: _truncated(x, 2), id="e5m2"),
        pytest.param("float8_e4m3fn", lambda x: _truncated(x, 3), id="e4m3"),
    ],
)
def test_rounding_to_a_narrower_dtype_is_named(diagnosed: Diagnose, name: str, narrow: Any) -> None:
    values = np.sign(R) * (np.abs(R) + 0.1)  # normal numbers in all of them
    found = diagnosed(values, narrow(values))
    assert found.explanations[0].kind == "rounded"
    assert found.explanations[0].facts["dtype"] == name
    back = diagnosed(narrow(values), values)
    assert back.explanations[0].kind == "not-rounded"


def _truncated(values: Array, bits: int) -> Array:
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent))


@pytest.mark.spec("DIA-19")
def test_nan_is_reported_and_nothing_else_is_looked_for(diagnosed: Diagnose) -> None:
    found = diagnosed(R, R * np.nan)
    assert [e.kind for e in found.explanations] == ["nan"]


@pytest.mark.spec("DIA-47")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_window_is_named_where_the_error_begins_with_it(diagnosed: Diagnose, precision: str) -> None:
    t = np.where(POSITIONS >= 8, R[::-1], R)
    found = diagnosed(R, t, precision=precision, config={**CONFIG, "sliding_window": 8})
    assert found.explanations[0].text == "the error is only from token 8 on, of 24; sliding_window is 8"


@pytest.mark.spec("DIA-10")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("factor", "config", "name"),
    [
        pytest.param(2304**0.5, {"hidden_size": 2304}, "sqrt(hidden_size)", id="embedding"),
        pytest.param(80**-0.5, {"head_dim": 80}, "1/sqrt(head_dim)", id="head"),
        pytest.param(
            (1280 / 80) ** 0.5,
            {"hidden_size": 1280, "head_dim": 80},
            "sqrt(hidden_size / head_dim)",
            id="both",
        ),
        pytest.param(2.5, {"routed_scaling_factor": 2.5}, "routed_scaling_factor", id="routed"),
        pytest.param(1 / 7, {"num_experts_per_tok": 7}, "1/num_experts_per_tok", id="experts"),
        pytest.param(
            12.0, {"text_config": {"embedding_multiplier": 12.0}}, "embedding_multiplier", id="nested"
        ),
    ],
)
def test_factors_are_named_by_the_configuration(
    diagnosed: Diagnose, factor: float, config: dict[str, Any], name: str, precision: str
) -> None:
    found = diagnosed(R, factor * R, config=config, precision=precision)
    assert found.explanations[0].facts["equals"][0] == name
    assert found.explanations[0].facts["factor"] == pytest.approx(factor, rel=1e-3)


@pytest.mark.spec("DIA-17")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_soft_cap_of_the_configuration_is_named(diagnosed: Diagnose, precision: str) -> None:
    found = diagnosed(30 * np.tanh(R), 30 * R, config={"final_logit_softcapping": 30.0}, precision=precision)
    assert found.explanations[0].kind == "softcap-missing"
    assert found.explanations[0].facts == {"cap": 30.0, "equals": "final_logit_softcapping"}


@pytest.mark.spec("DIA-1")
def test_identical_values_need_no_explanation(diagnosed: Diagnose) -> None:
    found = diagnosed(R, R)
    assert (found.status, found.exit_status, found.explanations) == ("identical", 0, ())


@pytest.mark.spec("DIA-8")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_noise_outliers_and_low_ranks_are_explained_by_nothing(diagnosed: Diagnose, precision: str) -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        shape = ((2, 12, 32), (40, 8), (1, 6, 64), (1, 2, 10, 16))[seed % 4]
        r = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]) * (seed % 3 == 0))
        noise, size = rng.standard_normal(shape), np.sqrt((r * r).mean())
        low_rank = rng.standard_normal((*shape[:-1], 2)) @ rng.standard_normal((2, shape[-1]))
        outlier = np.zeros(shape)
        outlier.flat[rng.integers(r.size)] = rng.choice([-30, 3, 30])
        t = r + size * (1e-3 * noise, 1e-2 * noise, 0.3 * noise, 0.2 * low_rank, outlier)[seed % 5]
        x, w = rng.standard_normal(shape), rng.standard_normal(shape[-1])
        beside = {
            "0/m/input.x": x,
            "0/m/param.weight": w,
            "0/m/param.bias": w,
            "0/m.a/output": noise[::-1] + x,
        }
        found = diagnosed(
            {**beside, "0/m/output": r}, {**beside, "0/m/output": t}, precision=precision, config=CONFIG
        )
        assert found.status == "unexplained", (seed, found.explanations[0].text)


@pytest.mark.spec("DIA-7")
def test_as_many_numbers_as_there_are_values_explain_nothing(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(0)
    r, t = rng.standard_normal((2, 3, 16))
    assert diagnosed(r, t).status == "unexplained"  # three tokens cannot tell an offset of channels


@pytest.mark.spec("DIA-3")
def test_of_a_large_pair_the_first_part_that_differs_is_looked_at(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(0).standard_normal((1, 64, 32))
    t = np.where(np.arange(64)[None, :, None] >= 40, 2 * r, r)
    found = diagnosed(r, t, limit=16 * 32)
    assert "Looked at indices 32 to 47 of axis 1 alone, the first part that differs." in found.notes
    assert found.explanations[0].kind == "factor"
    with pytest.raises(UsageError, match="limit: is 0, expected 1 to 16777216"):
        diagnosed(r, t, limit=0)


@pytest.mark.spec("DIA-9")
def test_what_only_says_less_exactly_is_not_repeated(diagnosed: Diagnose) -> None:
    kinds = [e.kind for e in diagnosed(R, 2 * R, config=CONFIG).explanations]
    assert kinds == ["factor"]  # and not a factor of each channel, each token and each head


@pytest.mark.spec("DIA-2")
def test_complex_values_and_unknown_keys_are_refused(diagnosed: Diagnose) -> None:
    with pytest.raises(UsageError, match="no tensor '0/x/output' among 1"):
        diagnosed({"0/m/output": R, "0/x/output": R}, {"0/m/output": R}, key="0/x/output")


@pytest.mark.spec("DIA-10")
@pytest.mark.parametrize(
    ("behind", "text"),
    [
        pytest.param(7.96875, "before n the target multiplies it by 7.96875, where 8 would", id="another"),
        pytest.param(1.0, "", id="none"),
        pytest.param(8.0, "", id="made-up-for"),
    ],
)
def test_what_the_target_multiplies_a_scaled_result_by_behind_the_module_is_told(
    diagnosed: Diagnose, behind: float, text: str
) -> None:
    sides = [{"0/m/output": R * scale, "0/n/input.x": R * given} for scale, given in ((8, 8), (1, behind))]
    found = diagnosed(*sides).explanations[0]
    assert (found.kind, found.facts["factor"]) == ("factor", 0.125)
    assert found.facts.get("factor_behind", 0.0) == pytest.approx(behind if text else 0.0, rel=1e-7)
    assert text in found.text
    assert ("before n" in found.text) is bool(text)


@pytest.mark.spec("DIA-16")
@pytest.mark.parametrize(
    ("rates", "hint"),
    [
        pytest.param(
            1e4 ** (-np.arange(8) / 8), "The rotation of positions is applied on one side", id="whole"
        ),
        pytest.param(
            1e6 ** (-np.arange(8) / 8) - 1e4 ** (-np.arange(8) / 8),
            "Rotary positions with another base",
            id="other-base",
        ),
    ],
)
def test_a_rotation_on_one_side_is_no_other_base(diagnosed: Diagnose, rates: Array, hint: str) -> None:
    found = diagnosed(HEADS, turned(np.arange(24)[:, None] * rates), config=CONFIG)
    assert found.explanations[0].kind == "rotary-frequencies"
    assert found.explanations[0].hint.startswith(hint)
