"""Rules: names that mean the same, fused projections, and what one side lacks for a reason."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import tensorcap
from tensorcap.alignment import Alignment, resolve
from tensorcap.alignment.match import By, propose
from tensorcap.alignment.names import Rules, builtin_rules, catalogue, read_rules, wrapper_rules
from tensorcap.alignment.names.site_templates import SiteTemplate, name_of
from tensorcap_cli.main import main
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.open import open_archive
from tests.alignment.conftest import PORTS
from tests.support.archives import new_archive

FILES = {file.name: file.rules for file in catalogue()}
EVERY = Rules().before(*FILES.values())


def write(path: Path, tensors: Mapping[str, Array], classes: Mapping[str, str] | None = None) -> Archive:
    known = classes or {}
    modules = [{"path": s, "class": known.get(s, "m.Linear"), "parameters": {}} for s in tensors]
    return new_archive(path, tensors, run={"modules": modules})


def drawn(seed: int, width: int = 16) -> Array:
    return np.random.default_rng(seed).standard_normal((2, 5, width)).astype(np.float32)


def rules_of(folder: Path, text: str) -> Rules:
    path = folder / "mine.toml"
    path.write_text(text)
    return read_rules(path)


def aligned(
    folder: Path,
    one: Mapping[str, Array],
    other: Mapping[str, Array],
    *,
    classes: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    rules: Rules | None = None,
    by: By = "names",
) -> tuple[Alignment, dict[str, str]]:
    reference = write(folder / "ref.h5", one, classes[0])
    target = write(folder / "tgt.h5", other, classes[1])
    alignment = propose(reference, target, rules=rules, by=by).alignment
    found = {}
    for link in resolve(alignment, reference, target).links:
        for record in link.reference:
            found[record.key.site] = "+".join(r.key.site for r in link.target)
    return alignment, found


def reasons(alignment: Alignment) -> dict[str, tuple[str, bool]]:
    return {p: (left.reason, left.is_explained) for left in alignment.left_over for p in left.places}


# Renaming


@pytest.mark.spec("ALN-51")
@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        pytest.param('from = "module"\nto = ""', "submodule.fc", "submodule.fc", id="no-part-of-a-word"),
        pytest.param('from = "module"\nto = ""', "module.a.module.b", "a.b", id="everywhere"),
        pytest.param('from = "module"\nto = ""', "module", "@root", id="nothing-left"),
        pytest.param('from = "a"\nto = "b"\nat = "start"', "a.a", "b.a", id="start"),
        pytest.param('from = "a"\nto = "b"\nat = "end"', "a.a", "a.b", id="end"),
        pytest.param('from = "a"\nto = "b"\nat = "whole"', "a.a", "a.a", id="whole"),
        pytest.param('from = "h.{i}.x"\nto = "y.{i+1}"', "h.9.x.k", "y.10.k", id="next-number"),
        pytest.param('from = "h.{i}"\nto = "y.{i-1}"', "h.0", "h.0", id="no-number-below-0"),
        pytest.param('from = "h.{i}"\nto = "y"', "h.x", "h.x", id="a-number-is-no-word"),
        pytest.param('from = "{*p}.{*p}"\nto = "{p}"', "o.o.1.1.k", "o.1.1.k", id="the-same-twice"),
        pytest.param('from = "{x:q|k}_n"\nto = "{x}"', "a.q_n.k_n.v_n", "a.q.k.v_n", id="one-of-some"),
        pytest.param('from = "*_proj"\nto = "p"', "a.q_proj.proj", "a.p.proj", id="any-characters"),
        pytest.param('from = ["a", "b"]\nto = "c"', "a.b.d", "c.c.d", id="several-names"),
        pytest.param('from = "module"\nto = ""', "module.a:aten.module.b", "a:aten.module.b", id="within"),
        pytest.param('from = "a.b"\nto = "c"', "a.bb.a.b", "a.bb.c", id="several-components"),
    ],
)
def test_whole_components_are_replaced(tmp_path: Path, rule: str, before: str, after: str) -> None:
    assert rules_of(tmp_path, f"[[rename]]\n{rule}\n").canonical(before) == after


@pytest.mark.spec("ALN-52")
def test_rules_are_done_in_order_and_all_again_until_no_name_changes(tmp_path: Path) -> None:
    text = """
    [[rename]]
    from = "c"
    to = "d"
    [[rename]]
    from = "a"
    to = "b"
    [[rename]]
    from = "b"
    to = "c"
    """
    assert rules_of(tmp_path, text).canonical("a.x") == "d.x"


@pytest.mark.spec("ALN-52")
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([("a", "b"), ("c", "a"), ("b", "c")], id="in-circles"),
        pytest.param([("a", "a.a")], id="growing"),
    ],
)
def test_a_renaming_without_end_is_refused_where_it_stands(
    tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    text = "".join(f'[[rename]]\nfrom = "{one}"\nto = "{other}"\n' for one, other in pairs)
    with pytest.raises(UsageError, match=r"mine\.toml:1: .* comes not to rest") as error:
        rules_of(tmp_path, text).canonical("a.x")
    assert "\n" not in str(error.value)


# The catalogue


@pytest.mark.spec("ALN-56")
@pytest.mark.parametrize("name", FILES)
def test_examples_of_the_catalogue_hold(name: str) -> None:
    rules = FILES[name]
    for rename in rules.renames:
        for one, other in rename.examples:
            assert one != other
            assert EVERY.canonical(one) == EVERY.canonical(other), rename.where
    for fused in rules.fused:
        for part, whole in fused.examples:
            assert part.rpartition(".")[2] in fused.parts
            assert whole.rpartition(".")[2] == fused.whole
    for expected in rules.expected:
        for site, module in expected.examples:
            assert expected.explains(site, module), expected.where


def test_every_rule_of_the_catalogue_has_an_example() -> None:
    for rules in FILES.values():
        lacking = {r.where for r in rules.renames} - {r.where for r in rules.renames if r.examples}
        lacking |= {fused.where for fused in rules.fused if not fused.examples}
        lacking |= {expected.where for expected in rules.expected if not expected.examples}
        assert lacking == set()


def test_every_file_of_the_catalogue_is_read() -> None:
    folder = Path(tensorcap.__file__).parent / "alignment" / "names"
    assert {path.stem for path in folder.glob("*.toml")} == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_every_renaming_of_the_catalogue_is_needed_for_its_examples(name: str) -> None:
    for where in {rename.where for rename in FILES[name].renames}:
        rest = Rules(renames=tuple(r for r in EVERY.renames if r.where != where))
        pairs = [pair for r in EVERY.renames if r.where == where for pair in r.examples]
        assert any(rest.canonical(one) != rest.canonical(other) for one, other in pairs), where


@pytest.mark.spec("ALN-56")
@pytest.mark.parametrize("name", PORTS)
def test_no_two_modules_of_a_model_get_one_name(name: str) -> None:
    pytest.importorskip("transformers")
    model, _ = import_module(f"tests.alignment.ports.{name}").PORT.reference()
    names = [path for path, _ in model.named_modules() if path]
    canonical = [EVERY.canonical(path) for path in names]
    assert len(set(canonical)) == len(names) > 20


WRAPPERS = ("module", "_orig_mod", "base_model.model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@pytest.mark.spec("ALN-56")
@given(st.lists(st.sampled_from(WRAPPERS), max_size=5), st.lists(st.sampled_from(WRAPPERS), max_size=3))
def test_wrappers_come_in_any_nesting(before: list[str], within: list[str]) -> None:
    name = ".".join([*before, "layers.2", *within, "submodule.mlp"])
    assert wrapper_rules().canonical(name) == "layers.2.submodule.mlp"


@pytest.mark.spec("ALN-56")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("language_model.model.layers.3.mlp", "model.language_model.layers.3.mlp"),
        ("language_model.lm_head", "lm_head"),
        ("vision_tower.vision_model.encoder.layers.1.mlp.fc1", "model.vision_tower.encoder.layers.1.mlp.fc1"),
        ("vit.encoder.layer.1.attention.attention.key", "vit.layers.1.attention.k_proj"),
        ("vit.encoder.layer.1.output.dense", "vit.layers.1.mlp.fc2"),
        ("model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"),
        ("model.layers.1.self_attn.v_proj", "layers.1.self_attn.qkv_proj.v_proj"),
        ("model.layers.1.self_attn.o_proj", "layers.1.self_attn.o_proj.o_proj"),
        ("model.layers.1.mlp", "model.layers.layers.1.mlp"),
        ("model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
        ("hidden_states.1", "model.layers.0"),
    ],
)
def test_names_of_two_ecosystems_are_one(one: str, other: str) -> None:
    assert EVERY.canonical(one) == EVERY.canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("submodule.fc", "fc"),
        ("model.language_model", "language_model"),
        ("model", "language_model.model"),
        ("encoder.layer.0.attention.attention", "encoder.layer.0.attention"),
        ("block.1.1", "block.1"),
        ("hidden_states.0", "layers.0"),
        ("output.hidden_states.1", "output.layers.0"),
    ],
)
def test_names_that_mean_something_else_stay_apart(one: str, other: str) -> None:
    assert EVERY.canonical(one) != EVERY.canonical(other)


# Case 35

CASE_35 = {
    "module._orig_mod.layers.2.mlp": "layers.2.mlp",
    "_orig_mod.module.layers.2.attn": "layers.2.attn",
    "base_model.model.model.layers.0.mlp": "model.layers.0.mlp",
    "submodule.fc": "submodule.fc",
    "model.layers.1._orig_mod.mlp": "model.layers.1.mlp",
}


@pytest.mark.spec("ALN-56")
def test_case_35_prefixes_are_mapped_one_to_one_by_names_alone(tmp_path: Path) -> None:
    arrays = {name: drawn(seed) for seed, name in enumerate(CASE_35.values())}
    wrapped = {name: drawn(seed + 50) for seed, name in enumerate(CASE_35)}
    alignment, found = aligned(tmp_path, arrays, wrapped)
    assert found == {plain: name for name, plain in CASE_35.items()}
    assert alignment.left_over == ()
    assert {name: wrapper_rules().canonical(name) for name in CASE_35} == CASE_35


def test_case_35_the_first_divergence_is_that_of_the_natural_order(tmp_path: Path) -> None:
    for name, error in (("ref", 0.0), ("tgt", 1e-2)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for i in range(12):
                prefix = "module._orig_mod." if error else ""
                file[f"{prefix}layers.{i}"] = np.full(4, 1.0 + (error * i if i > 1 else 0.0))
    with h5py.File(tmp_path / "ref.h5") as file:
        assert list(file)[1:4] == ["layers.1", "layers.10", "layers.11"]
    compared = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert [pair.key for pair in compared.pairs] == [f"layers.{i}" for i in range(12)]
    assert compared.divergence is not None
    assert compared.divergence.module == "layers.2"


# Wrapped models


@pytest.mark.spec("ALN-55")
@pytest.mark.parametrize("wrapping", ["compiled", "parallel", "adapted", "all", "within", "moved"])
def test_a_wrapped_model_is_mapped_by_names_alone(wrapping: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch
    from torch import nn

    class Holder(nn.Module):
        """Holds a module under a name of several components, and hands its call on."""

        def __init__(self, inner: nn.Module, path: str) -> None:
            super().__init__()
            first, _, rest = path.partition(".")
            self.add_module(first, Holder(inner, rest) if rest else inner)
            self._first = first

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.get_submodule(self._first)(*args, **kwargs)

    model, inputs = import_module("tests.alignment.ports.llama").PORT.reference()
    plain_names = {id(module): name or "@root" for name, module in model.named_modules()}
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(**inputs)
    prefixes = {
        "compiled": ["_orig_mod"],
        "parallel": ["module"],
        "adapted": ["base_model.model"],
        "all": ["base_model.model", "module", "_orig_mod"],
    }
    wrapped: nn.Module = model
    for prefix in prefixes.get(wrapping, []):
        wrapped = Holder(wrapped, prefix)
    if wrapping == "within":
        for i, layer in enumerate(model.model.layers):
            layer.mlp = Holder(layer.mlp, "_orig_mod")
            model.model.layers[i] = Holder(layer, "module")
    if wrapping == "moved":
        model.model = Holder(model.model, "language_model")
    with torch.no_grad(), tensorcap.capture(wrapped, tmp_path / "tgt.h5"):
        wrapped(**inputs)
    with open_archive(tmp_path / "ref.h5") as reference, open_archive(tmp_path / "tgt.h5") as target:
        alignment = propose(reference, target, by="names", read_values=False).alignment
        found = {
            record.key.site: other.key.site
            for link in resolve(alignment, reference, target).links
            for record, other in zip(link.reference, link.target, strict=True)
            if record.key.slot.startswith("output")
        }
        gave = {record.key.site for record in reference.records if record.key.slot.startswith("output")}
    same = {plain_names[id(m)]: n or "@root" for n, m in wrapped.named_modules() if id(m) in plain_names}
    outer = {site for site in gave if site == "@root" or found.get(site) == site}  # equal as they are
    assert found == {site: site if site in outer else same[site] for site in gave}
    assert all(left.is_explained for left in alignment.left_over if left.side == "reference")


@pytest.mark.spec("ALN-55")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            {"model.layers.0.self_attn.o_proj": "layers.0.self_attn.o_proj.o_proj"},
            "layers.0.self_attn.o_proj",
            id="doubled",
        ),
        pytest.param(
            {"layers.0": "module.layers.0._orig_mod", "layers.0.mlp": "module.layers.0._orig_mod.mlp"},
            "module.layers.0",
            id="wrapped",
        ),
    ],
)
def test_the_inmost_of_names_that_mean_the_same_is_taken(
    one: dict[str, str], other: str, tmp_path: Path
) -> None:
    reference = {name: drawn(i) for i, name in enumerate(one)}
    target = {name: drawn(50 + i) for i, name in enumerate([other, *one.values()])}
    alignment, found = aligned(tmp_path, reference, target)
    assert found == one
    assert list(reasons(alignment)) == [other]


# Fused projections


def _attention(seed: int, layers: int = 2) -> dict[str, Array]:
    widths = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    return {
        f"model.layers.{i}.self_attn.{name}": drawn(seed + 10 * i + j, width)
        for i in range(layers)
        for j, (name, width) in enumerate(widths.items())
    }


def _fused(tensors: Mapping[str, Array], layers: int = 2, order: str = "qkv") -> dict[str, Array]:
    return {
        f"layers.{i}.self_attn.qkv_proj": np.concatenate(
            [tensors[f"model.layers.{i}.self_attn.{c}_proj"] for c in order], -1
        )
        for i in range(layers)
    }


@pytest.mark.spec("ALN-53")
def test_parts_and_whole_are_told_by_names_alone(tmp_path: Path) -> None:
    one = _attention(0)
    alignment, _ = aligned(tmp_path, one, _fused(_attention(100)))
    (entry,) = alignment.entries
    assert [site.rpartition(".")[2] for site in entry.reference] == ["q_proj", "k_proj", "v_proj"]
    assert entry.target == ("layers.{i}.self_attn.qkv_proj",)
    assert (entry.steps, entry.evidence) == (("split -1 16,8,8",), "rule")
    assert entry.reason.startswith("by the rule of their names")


@pytest.mark.spec("ALN-53")
def test_a_whole_of_the_reference_is_joined_by_names_alone(tmp_path: Path) -> None:
    alignment, _ = aligned(tmp_path, _fused(_attention(0)), _attention(100))
    (entry,) = alignment.entries
    assert [site.rpartition(".")[2] for site in entry.target] == ["q_proj", "k_proj", "v_proj"]
    assert (entry.steps, entry.evidence) == (("concat -1",), "rule")


@pytest.mark.spec("ALN-53")
def test_values_that_say_another_order_are_followed_and_told(tmp_path: Path) -> None:
    one = _attention(0)
    alignment, _ = aligned(tmp_path, one, _fused(one, order="qvk"), by="all")
    (entry,) = alignment.entries
    assert [site.rpartition(".")[2] for site in entry.reference] == ["q_proj", "v_proj", "k_proj"]
    assert entry.evidence == "rule"
    assert "but its parts are q, v, k by values and q, k, v by name" in entry.reason


@pytest.mark.spec("ALN-53")
def test_what_does_not_add_up_is_not_fused(tmp_path: Path) -> None:
    one = _attention(0)
    other = {name: array[..., :-1] for name, array in _fused(one).items()}
    alignment, found = aligned(tmp_path, one, other)
    assert found == {}
    assert not any(is_explained for _, is_explained in reasons(alignment).values())


# What is expected

VLLM = "vllm.model_executor.layers.linear.QKVParallelLinear"


def _sides() -> tuple[dict[str, Array], dict[str, Array]]:
    shared = {f"model.layers.{i}.mlp": drawn(i) for i in range(2)}
    return {"model.rotary_emb": drawn(7), **shared}, {**shared, "model.logits_processor": drawn(8)}


@pytest.mark.spec("ALN-54")
def test_what_an_ecosystem_lacks_is_explained_by_the_rule(tmp_path: Path) -> None:
    one, other = _sides()
    alignment, _ = aligned(tmp_path, one, other, classes=({}, {"model.logits_processor": VLLM}))
    found = reasons(alignment)
    rotary = (
        "no counterpart by rule: makes the tables once for all layers; each attention of the target turns"
    )
    assert found["model.rotary_emb"] == (f"{rotary} queries and keys", True)
    assert found["model.logits_processor"][0].startswith("no counterpart by rule: the attention kernel")


@pytest.mark.spec("ALN-56")
def test_sides_are_exchanged_where_the_reference_is_of_the_second_ecosystem(tmp_path: Path) -> None:
    one, other = _sides()
    classes = {"model.logits_processor": VLLM}
    alignment, _ = aligned(tmp_path, other, one, classes=(classes, {}), by="names")
    found = reasons(alignment)
    assert found["model.rotary_emb"][1]
    assert found["model.logits_processor"][1]


@pytest.mark.spec("ALN-56")
@pytest.mark.parametrize("both", [True, False], ids=["both", "neither"])
def test_nothing_is_expected_between_runs_of_one_ecosystem(tmp_path: Path, both: bool) -> None:
    one, other = _sides()
    signs = {"model.layers.0.mlp": VLLM} if both else {}
    alignment, _ = aligned(tmp_path, one, other, classes=(signs, signs), by="names")
    found = reasons(alignment)
    assert found["model.rotary_emb"] == ("no counterpart was found", False)
    assert found["model.logits_processor"] == ("no counterpart was found", False)


@pytest.mark.spec("ALN-54")
def test_a_users_expectation_is_of_its_side_only(tmp_path: Path) -> None:
    text = '[[expected]]\nonly_in = "target"\nsites = "probe"\nreason = "a probe of mine"\n'
    rules = rules_of(tmp_path, text)
    alignment, _ = aligned(tmp_path, {"a": drawn(0)}, {"a": drawn(0), "x.probe": drawn(1)}, rules=rules)
    assert reasons(alignment) == {"x.probe": ("no counterpart by rule: a probe of mine", True)}
    alignment, _ = aligned(
        tmp_path / "..", {"a": drawn(0), "x.probe": drawn(1)}, {"a": drawn(0)}, rules=rules
    )
    assert reasons(alignment) == {"x.probe": ("no counterpart was found", False)}


@pytest.mark.spec("ALN-54")
def test_what_is_expected_hides_no_mistake(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, '[[expected]]\nsites = ["b", "c"]\nreason = "mine"\n')
    one, other = {"a": drawn(0), "b": drawn(1)}, {"a": drawn(0), "c": drawn(1) * 3}
    alignment, found = aligned(tmp_path, one, other, rules=rules, by="all")
    assert found == {"a": "a", "b": "c"}
    assert alignment.left_over == ()
    assert "but values differ by 2," in alignment.entries[1].reason


# Users' files


@pytest.mark.spec("ALN-57")
def test_a_users_rules_go_before_those_of_the_catalogue(tmp_path: Path) -> None:
    text = '[[rename]]\nfrom = "net.block{i}"\nto = "module.model.layers.{i}"\n'
    one = {f"model.layers.{i}.mlp": drawn(i) for i in range(4)}
    other = {f"net.block{i}.mlp": drawn(50 + i) for i in range(4)}
    assert aligned(tmp_path, one, other)[1] == {}
    alignment, found = aligned(tmp_path, one, other, rules=rules_of(tmp_path, text))
    assert found == {f"model.layers.{i}.mlp": f"net.block{i}.mlp" for i in range(4)}
    assert {entry.evidence for entry in alignment.entries} == {"rule"}


@pytest.mark.spec("ALN-57")
def test_tcap_align_takes_a_rule_file(tmp_path: Path) -> None:
    write(tmp_path / "ref.h5", {"a.x": drawn(0)})
    write(tmp_path / "tgt.h5", {"b.x": drawn(9)})
    (tmp_path / "mine.toml").write_text('[[rename]]\nfrom = "b"\nto = "a"\n')
    files = [str(tmp_path / name) for name in ("ref.h5", "tgt.h5")]
    options = ["--by", "names", "--rules", str(tmp_path / "mine.toml")]
    ran = CliRunner().invoke(main, ["align", *files, *options])
    assert "a.x = b.x" in ran.output
    assert ran.exit_code == 0
    assert CliRunner().invoke(main, ["align", *files, "--by", "names"]).exit_code == 1
    missing = CliRunner().invoke(main, ["align", *files, "--rules", str(tmp_path / "none.toml")])
    assert missing.exit_code == 3
    assert missing.output.count("\n") == 1


@pytest.mark.spec("ALN-50")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param('\n[[rename]]\nfrom = "a"\n', ":2: has no 'to', expected a text", id="no-to"),
        pytest.param('[[rename]]\nto = "a"\n', ":1: [[rename]] has no 'from'", id="no-from"),
        pytest.param('[[rename]]\nfrom = ""\nto = "a"\n', ":1: name '': a component is empty", id="empty"),
        pytest.param('[[rename]]\nfrom = "a..b"\nto = ""\n', ":1: name 'a..b': a component", id="dots"),
        pytest.param('[[rename]]\nfrom = "a{I!}"\nto = ""\n', "'a{I!}' is no variable", id="variable"),
        pytest.param('[[rename]]\nfrom = "a"\nto = "{i}"\n', "there is no variable 'i' in 'a'", id="unbound"),
        pytest.param('[[rename]]\nfrom = "{*a}"\nto = "{a+1}"\n', "'a' is no number", id="offset"),
        pytest.param('[[rename]]\nfrom = "a"\nto = "b*"\n', "to 'b*': expected a name", id="glob-in-to"),
        pytest.param('[[rename]]\nfrom = "a"\nto = ""\nat = "top"\n', "at 'top', expected one of", id="at"),
        pytest.param(
            '[[rename]]\nfrom = 3\nto = ""\n', ":1: from is 3, expected a text or a list", id="type"
        ),
        pytest.param('[[rename]]\nfrom = "a"\nto = ""\nfor = 1\n', "[[rename]] has 'for'", id="key"),
        pytest.param('[rename]\nfrom = "a"\n', ":1: rename is no list of tables", id="table"),
        pytest.param('\n\n[[renames]]\nfrom = "a"\n', ":3: has 'renames', expected", id="unknown-table"),
        pytest.param(
            '[[fused]]\nparts = ["a"]\nwhole = "b"\n', ":1: parts are a, expected two", id="one-part"
        ),
        pytest.param(
            '[[fused]]\nparts = ["a", "b.c"]\nwhole = "d"\n', "'b.c', expected the last", id="dotted"
        ),
        pytest.param('[[fused]]\nparts = ["a", "b"]\nwhole = "d"\naxis = "x"\n', "axis is 'x'", id="axis"),
        pytest.param('[[expected]]\nsites = "a"\n', ":1: has no 'reason'", id="no-reason"),
        pytest.param('[[expected]]\nreason = "x"\n', "has no sites and no classes", id="no-sites"),
        pytest.param(
            '[[expected]]\nsites = "a"\nreason = "x"\nonly_in = "y"\n',
            "only_in 'y', expected one of reference, target",
            id="side",
        ),
        pytest.param('[[rename]]\nfrom = "a"\nto = ""\nexample = "a"\n', "expected two names", id="example"),
        pytest.param('ecosystems = ["a"]\n', "ecosystems names 1, expected two", id="ecosystems"),
        pytest.param('name = "x"\n', "has no rule, expected", id="nothing"),
    ],
)
def test_what_is_wrong_with_a_file_is_reported_in_one_line_with_its_place(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(UsageError) as error:
        rules_of(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "mine.toml"))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.spec("ALN-50")
def test_a_file_that_is_no_toml_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="is no TOML"):
        rules_of(tmp_path, "[[rename")
    with pytest.raises(ReadError, match="cannot be read"):
        read_rules(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ReadError, match="is no TOML"):
        read_rules(tmp_path / "binary.toml")


@pytest.mark.spec("ALN-58")
def test_a_function_makes_names_that_no_pattern_can_tell(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text(
        "import re\n\ndef canonical(site: str) -> str:\n"
        "    return re.sub(r'stage_(\\d+)', lambda m: f'layers.{int(m[1]) - 1}', site).lower()\n"
    )
    rules = rules_of(tmp_path, 'function = "names.py:canonical"\n')
    assert rules.canonical("stage_3.MLP") == "layers.2.mlp"
    one = {f"layers.{i}.mlp": drawn(i) for i in range(4)}
    other = {f"stage_{i + 1}.MLP": drawn(50 + i) for i in range(4)}
    _, found = aligned(tmp_path, one, other, rules=rules)
    assert found == {f"layers.{i}.mlp": f"stage_{i + 1}.MLP" for i in range(4)}


@pytest.mark.spec("ALN-58")
@pytest.mark.parametrize(
    ("source", "function", "told"),
    [
        pytest.param("", "names.py", "expected 'FILE.py:FUNCTION'", id="no-function-named"),
        pytest.param("x = 1\n", "names.py:f", "has no function 'f'", id="no-such-function"),
        pytest.param(
            "import nothing_of_this_name\n", "names.py:f", "names.py:1: ModuleNotFoundError", id="import"
        ),
        pytest.param("def f(:\n", "names.py:f", "names.py:1: SyntaxError", id="syntax"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_reported_in_one_line(
    tmp_path: Path, source: str, function: str, told: str
) -> None:
    (tmp_path / "names.py").write_text(source)
    with pytest.raises(UsageError) as error:
        rules_of(tmp_path, f'function = "{function}"\n')
    assert str(error.value).startswith(f"{tmp_path / 'mine.toml'}:1: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.spec("ALN-58")
@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param("raise ValueError('no\\nname')", "names.py:2: ValueError: no name", id="raises"),
        pytest.param("return 3", "f('a.b') gave 3, expected a name", id="no-text"),
        pytest.param("return ''", "f('a.b') gave '', expected a name", id="empty"),
    ],
)
def test_a_function_that_fails_is_reported_in_one_line(tmp_path: Path, body: str, told: str) -> None:
    (tmp_path / "names.py").write_text(f"def f(site):\n    {body}\n")
    rules = rules_of(tmp_path, 'function = "names.py:f"\n')
    with pytest.raises(UsageError) as error:
        rules.canonical("a.b")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.spec("ALN-58")
def test_a_file_of_a_function_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"mine\.toml:1: .*none\.py cannot be read"):
        rules_of(tmp_path, 'function = "none.py:f"\n')


def test_builtin_rules_need_no_modules(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.ones(3)
    with open_archive(tmp_path / "a.h5") as archive:
        assert builtin_rules(archive, archive).canonical("module.x") == "x"


@pytest.mark.parametrize("digits", [7, 400, 5000])
def test_long_numbers_within_a_name_are_its_own(digits: int) -> None:
    name = f"blocks.{{0}}.tensor_{'9' * digits}"
    assert name_of(SiteTemplate(name), lambda site: site.replace("blocks", "layers")) == (
        name.replace("blocks", "layers"),
        (0,),
    )
