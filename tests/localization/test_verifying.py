"""A port is verified in one go, and the folder says what is wrong with it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensorcap
from tensorcap.alignment import align
from tensorcap.port_verification import Runnable, verify
from tensorcap.reports.error_plot import plot_errors
from tensorcap.reports.html import Page
from tensorcap.reports.layer_report import Layer, depth_of
from tensorcap.session import make_side
from tensorcap.workload import Port, Workload
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import opened
from tests.alignment.ports import llama

X = torch.linspace(-1, 1, 4 * 8).reshape(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.SiLU()
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.act(self.fc(x))
        return made


def chain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5))).eval()


def wrong() -> Any:
    model = chain()
    with torch.no_grad():
        model[1].fc.weight.mul_(1.5)
    return model


class TwiceGate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.gelu(gate) * up


def report_of(folder: Path) -> Any:
    return json.loads((folder / "verify.json").read_text())


@pytest.mark.spec("VER-2", "VER-10", "VER-12", "VER-13")
def test_a_wrong_module_is_named_and_what_inherits_is_not(tmp_path: Path) -> None:
    found = verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), tmp_path / "report")
    assert [one.module for one in found.suspects] == ["1.fc"]
    assert found.suspects[0].is_own
    assert found.suspects[0].by == ("replay", "injection")
    assert found.suspects[0].examined is not None
    assert found.suspects[0].key == "0/1.fc/output"
    assert {"0/1.act/output", "0/2.fc/output", "0/4/output"} <= set(found.inheriting)
    assert "0/1.fc/output" not in found.inheriting
    assert found.exit_status == 1


class Biased(nn.Module):
    """Adds a bias that has a row for each row of its input, or one for all; its activation may be inlined."""

    def __init__(self, *, has_rows: bool) -> None:
        super().__init__()
        self.has_rows = has_rows
        self.fc = nn.Linear(8, 8)
        self.add = Addition()
        if has_rows:
            self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.linspace(0, 1, 8)[None]
        hidden: Tensor = self.add(self.fc(x), bias.expand(4, 8) if self.has_rows else bias)
        return self.act(hidden) if self.has_rows else nn.functional.silu(hidden)


class Addition(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias


@pytest.mark.spec("LCL-40")
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_what_a_port_lacks_or_has_in_another_shape_is_explained_beside_an_injected_run_too(
    tmp_path: Path, factor: float
) -> None:
    def made(*, has_rows: bool) -> Workload:
        torch.manual_seed(0)
        return Workload(nn.Sequential(*(Biased(has_rows=has_rows) for _ in range(2))).eval(), (X,))

    port = made(has_rows=False)
    with torch.no_grad():
        port.model[1].fc.weight.mul_(factor)
    found = verify(made(has_rows=True), port, tmp_path / "report")
    assert found.injected is not None
    statuses = {pair.key: pair.status for pair in found.injected.pairs}
    assert [one.module for one in found.suspects[:1]] == ([] if factor == 1 else ["1.fc"])
    assert found.exit_status == (factor != 1)
    if factor == 1:
        assert statuses["0/1.add/input.bias"] == statuses["0/1.act/input.input"] == "explained"


def test_the_summary_names_both_classes_of_an_exchanged_module(tmp_path: Path) -> None:
    model = chain()
    model[1].act = nn.GELU()
    verify(Workload(chain(), (X,)), Workload(model, (X,)), tmp_path / "report")
    text = " ".join((tmp_path / "report" / "summary.txt").read_text().split())
    assert (
        "Before any tensor: modules 1.act: SiLU in the reference, GELU in the target. "
        "Other modules of this class stayed what they are."
    ) in text


@pytest.mark.spec("VER-10", "VER-40")
def test_what_replay_alone_shows_is_no_success(tmp_path: Path) -> None:
    def model(approximate: str) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(approximate=approximate), nn.Linear(64, 8)).eval()

    x = torch.linspace(-3, 3, 512 * 8).reshape(512, 8)
    reference = Workload(model("none"), (x,))
    right = Workload(model("none").bfloat16(), (x.bfloat16(),))
    assert verify(reference, right, tmp_path / "right").exit_status == 0
    other = Workload(model("tanh").bfloat16(), (x.bfloat16(),))  # which differs by less than roundings
    found = verify(reference, other, tmp_path / "wrong")
    assert found.free.is_green
    assert found.injected is not None
    assert found.injected.is_green
    assert [(one.module, one.by) for one in found.suspects] == [("1", ("replay",))]
    assert found.exit_status == report_of(tmp_path / "wrong")["exit_status"] == 1
    assert not any("Nothing is wrong" in sentence for sentence in found.summary)


@pytest.mark.spec("VER-10")
def test_a_reference_that_cannot_be_replayed_leaves_the_injected_run_to_speak(tmp_path: Path) -> None:
    model = chain()
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(X)
    found = verify(tmp_path / "ref.h5", Workload(wrong(), (X,)), tmp_path / "report")
    assert [(one.module, one.by) for one in found.suspects] == [("1.fc", ("injection",))]


@pytest.mark.spec("VER-21", "VER-22", "VER-30", "VER-32")
def test_the_folder_holds_what_the_specification_lists(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), folder)
    assert {path.name for path in folder.iterdir()} == {
        "reference.h5",
        "target.h5",
        *(["report.html"] if importlib.util.find_spec("jinja2") else []),
        "summary.txt",
        "verify.json",
        "without_injection",
        "with_injection",
    }
    assert (folder / "with_injection" / "target.h5").is_file()
    names = (folder / "with_injection" / "module_names_target.txt").read_text().splitlines()
    assert names[:5] == [
        "@root Sequential",
        "0 Block",
        "0.fc Linear",
        "0.act SiLU",
        "0.spare Linear (never called)",
    ]
    told = report_of(folder)
    assert (told["format"], told["version"], told["exit_status"]) == ("tensorcap-verification", 1, 1)
    assert (told["reference"]["path"], told["target"]["path"]) == ("reference.h5", "target.h5")
    assert told["with_injection"]["divergence"] == {
        "key": "0/1.fc/output",
        "module": "1.fc",
        "is_growth": False,
    }
    assert " ".join(told["summary"]).split() == (folder / "summary.txt").read_text().split()
    assert list(tmp_path.iterdir()) == [folder]
    assert ".building" not in (folder / "verify.json").read_text()
    with tensorcap.open_archive(folder / "with_injection" / "target.h5") as archive:
        assert archive.run["injected"]["source"] == str(folder / "reference.h5")


@pytest.mark.spec("VER-23")
def test_errors_in_the_report_are_those_that_numpy_computes(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), folder)
    with torch.no_grad():
        errors, x, y = [], X, X
        for one, other in zip(chain(), wrong(), strict=True):
            for a, b in (
                (one.fc(x), other.fc(y)),
                (one.act(one.fc(x)), other.act(other.fc(y))),
                (one(x), other(y)),
            ):
                errors.append(float(np.square(a.double().numpy() - b.double().numpy()).mean()))
            x, y = one(x), other(y)
    errors.append(errors[-1])  # the model gives what its last block does
    told = report_of(folder)["without_injection"]
    assert [layer["mse"] for layer in told["layers"]] == pytest.approx(errors, rel=1e-6)
    assert told["mse"] == {
        "layers": 16,
        "finite": 16,
        "minimum": 0.0,
        "maximum": pytest.approx(max(errors)),
        "mean": pytest.approx(sum(errors) / 16),
        "median": pytest.approx(float(np.median(errors))),
    }
    assert told["components"]["fc"]["maximum"] == pytest.approx(max(errors[0:15:3]))
    assert {layer["component"] for layer in told["layers"]} == {"fc", "act", "block", "model"}
    text = (folder / "without_injection" / "layer_verification_report_Sequential_float32.txt").read_text()
    assert "The execution order is the same: 16 results compared." in text
    assert f"maximum {max(errors):.3e}" in text
    row = next(line for line in text.splitlines() if line.startswith("0/1.fc/output"))
    assert row.split()[1:3] == ["Linear", "diverged"]
    assert row.split()[5:] == ["4x8", "4x8", "same", "0/1.fc/output", "Linear", "4x8", "4x8"]


class Renamed(nn.Module):
    """The chain of blocks in other code, with other names, and a wrong weight."""

    class Stage(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.up, self.gate = block.fc, block.act

        def forward(self, hidden: Tensor) -> Tensor:
            made: Tensor = hidden + self.gate(self.up(hidden))
            return made

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(map(Renamed.Stage, wrong()))

    def forward(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden


@pytest.mark.spec("VER-23", "VER-27", "VER-30", "VER-32", "VER-33")
def test_reports_name_both_sides_and_hold_the_map(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    assert verify(Workload(chain(), (X,)), Workload(Renamed().eval(), (X,)), folder).exit_status == 1
    text = (folder / "summary.txt").read_text()
    lines = text.splitlines()
    assert lines[:2] == [
        f"Reference: Sequential of {nn.modules.container.__file__}, float32.",
        f"Target: Renamed of {__file__}, float32.",
    ]
    (accused,) = [line for line in lines if line.endswith("is wrong")]
    assert accused == "1. 1.fc (Linear) is wrong"
    assert "   4x8 to 4x8 in the reference; in the target stages.1.up (Linear): the same" in lines
    assert max(map(len, lines)) <= 120
    assert len(set(lines)) == len(lines)
    assert "Own error in execution order" not in text  # it is the suspect's
    told = report_of(folder)
    assert (told["target"]["file"], told["reference"]["file"]) == (__file__, nn.modules.container.__file__)
    side = {
        "keys": ["0/stages.1.up/output"],
        "class_name": "Linear",
        "inputs": [[4, 8]],
        "output": [4, 8],
        "place": f"linear.py:{inspect.getsourcelines(nn.Linear)[1]}",
    }
    assert told["suspects"][0]["target"] == side
    layers = {layer["key"]: layer for layer in told["without_injection"]["layers"]}
    assert layers["0/1.fc/output"]["target"] == side
    assert layers["0/@root/output"]["target"]["class_name"] == "Renamed"
    (report,) = (folder / "without_injection").glob("layer_verification_report_*")
    row = next(line for line in report.read_text().splitlines() if line.startswith("0/1.fc/output"))
    assert row.split()[8:] == ["0/stages.1.up/output", "Linear", "4x8", "4x8"]
    again = tensorcap.compare(folder / "reference.h5", folder / "target.h5", mapping=str(folder / "map.toml"))
    assert {pair.key for pair in again.pairs if pair.is_compared} >= {"0/1.fc/output", "0/4/output"}
    assert str(again.mapping.path if again.mapping else "") == str(folder / "map.toml")


@pytest.mark.spec("VER-33")
def test_what_other_inputs_do_is_told_once(tmp_path: Path) -> None:
    verify(Workload(chain(), (X,)), Workload(chain(), (-X[:3],)), tmp_path / "report")
    text = (tmp_path / "report" / "summary.txt").read_text()
    assert text.count("fed different inputs") == 1
    assert text.count("no module is accused") == 1
    assert ".building" not in text


@pytest.mark.spec("VER-33", "ALN-41", "ALN-80")
def test_rows_that_only_one_run_was_fed_are_told_and_the_order_of_the_others_is_compared(
    tmp_path: Path,
) -> None:
    inputs = X.clone()
    found = verify(Workload(chain(), (inputs,)), Workload(chain(), (X[:3],)), tmp_path / "report")
    assert inputs.shape == (4, 8)  # though the reference was run again with three of its rows
    lines = " ".join((tmp_path / "report" / "summary.txt").read_text().split())
    assert (
        lines.count("What was compared: rows 0, 1, 2 of the reference's batch of 4: the target was fed") == 1
    )
    assert "The execution order is the same: 16 results compared." in lines  # 5 blocks of 3, and the model
    assert (found.free.exit_status, found.exit_status, found.suspects) == (0, 0, ())


class Doubling(nn.Module):
    """Writes to its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("rows", [4, 3])
def test_each_run_of_a_model_that_writes_to_its_input_is_given_the_same(rows: int, tmp_path: Path) -> None:
    model, inputs = nn.Sequential(Doubling(), nn.Linear(8, 8)).eval(), X.clone()
    found = verify(Workload(model, (inputs,)), Workload(model, (X[:rows].clone(),)), tmp_path / "report")
    assert (found.exit_status, found.suspects) == (0, ())
    assert torch.equal(inputs, X)


@pytest.mark.spec("PRE-10")
def test_a_setting_that_differs_where_all_agrees_is_no_alarm(tmp_path: Path) -> None:
    model = chain()
    model[2].act.inplace = False
    wrapped = nn.Sequential(*model)
    wrapped[1].act = type("Silu", (nn.SiLU,), {})()
    assert (
        verify(Workload(chain(), (X,)), Workload(wrapped.eval(), (X,)), tmp_path / "report").exit_status == 0
    )
    text = (tmp_path / "report" / "summary.txt").read_text()
    assert "Before any tensor" not in text
    assert "Differs, though all that was compared agrees: modules 1.act: SiLU in the reference" in text


@pytest.mark.spec("VER-24")
@pytest.mark.parametrize(
    ("errors", "factor", "says"),
    [
        ([1e-6, 1e-5, 1e-4], 100.0, "grows with depth, by a factor of 100"),
        ([1e-4, 1e-5, 1e-6], 0.01, "falls with depth, by a factor of 100"),
        ([1e-6, 1e-6, 1e-6], 1.0, "neither grows nor falls"),
        ([1e-12, 1e-10, 1e-7], 1e-7 * 2**24, "neither grows nor falls"),
        ([0.0, 1e-6, 1e-5], None, "Too few"),
    ],
)
def test_depth_is_told_from_the_slope(errors: list[float], factor: float | None, says: str) -> None:
    layers = [
        Layer(f"0/blocks.{i}/output", "", "blocks", "unjudged", 0.0, error, (), ((1,), (1,)))
        for i, error in enumerate(errors)
    ]
    found = depth_of([*layers, Layer("0/head/output", "", "head", "unjudged", 0.0, 9.0, (), ((1,), (1,)))])
    assert says in found.text
    if factor is None:
        assert found.factor is None
    else:
        assert found.factor is not None
        assert math.isclose(found.factor, factor, rel_tol=1e-9)


@pytest.mark.spec("VER-24")
def test_padding_that_is_anything_in_a_green_layer_is_no_error_that_grows() -> None:
    """Each layer differs by a tenth where the mask leaves out, more from layer to layer, and by 1e-6 else."""
    layers = [
        Layer(f"0/b.{i}/output", "", "b", "match", 0.0, error, (), ((1,), (1,)), tail_error=1e-6)
        for i, error in enumerate((1e-6, 0.01, 0.1))
    ]
    assert "neither grows nor falls with depth" in depth_of(layers).text
    red = [replace(layer, status="diverged") for layer in layers]
    assert "grows with depth" in depth_of(red).text


@pytest.mark.spec("VER-2")
def test_a_rewritten_model_under_other_names_is_judged_through_the_mapping(tmp_path: Path) -> None:
    def target(planted: bool) -> Workload:
        model, inputs = llama.PORT.reference()
        made, given = llama.PORT.target(model.state_dict(), inputs)
        if planted:
            made.layers[1].ffn.act_mul = TwiceGate()  # type: ignore[index,union-attr]
        return Workload(made.eval(), given)

    reference = Workload(*llama.PORT.reference())
    right = verify(reference, target(planted=False), tmp_path / "right")
    assert (right.suspects, right.why_not_injected) == ((), "")
    found = verify(reference, target(planted=True), tmp_path / "wrong")
    assert [(one.module, one.by) for one in found.suspects] == [
        ("model.layers.1.mlp", ("replay", "injection"))
    ]
    alone = verify(tmp_path / "wrong" / "reference.h5", target(planted=True), tmp_path / "alone")
    assert [(one.module, one.by) for one in alone.suspects] == [("model.layers.1.mlp", ("injection",))]
    assert found.free.mapping is not None
    with ExitStack() as files:
        runs = (files.enter_context(opened(tmp_path / "right" / f"{n}.h5")) for n in ("reference", "target"))
        known = align(*runs).alignment  # what a planted mistake hides of it is not this test's matter
    found = verify(reference, target(planted=True), tmp_path / "known", mapping=known)
    assert [one.module for one in found.suspects] == ["model.layers.1.mlp"]


@pytest.mark.spec("VER-40")
def test_an_injection_that_does_not_fit_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:  # a fake: what fits the comparison fits here as a rule
        raise UsageError("1.fc/input.x: [4, 8] does not fit [8, 4]")

    monkeypatch.setattr("tensorcap.rerun.injected_run.inject", refused)
    found = verify(Workload(chain(), (X,)), Workload(chain(), (X,)), tmp_path / "report")
    assert found.free.exit_status == 0
    assert (found.why_not_injected, found.exit_status) == ("1.fc/input.x: [4, 8] does not fit [8, 4]", 1)
    assert report_of(tmp_path / "report")["exit_status"] == 1
    assert found.why_not_injected in (tmp_path / "report" / "summary.txt").read_text()


@pytest.mark.spec("VER-3", "VER-11")
def test_archives_are_compared_without_injection_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, model in (("ref", chain()), ("tgt", wrong())):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5"):
            model(X)
    folder = tmp_path / "report"
    found = verify(tmp_path / "ref.h5", tmp_path / "tgt.h5", folder)
    assert found.injected is None
    assert [(one.module, one.is_own) for one in found.suspects] == [("1.fc", False)]
    summary = (folder / "summary.txt").read_text()
    assert "Without injection: the target is an archive" in summary
    assert "Own and inherited errors are not told apart." in summary
    sources: list[Any] = []  # that are opened: to merge ranks, or to parse a dump, takes long

    def counted(source: Any, **options: Any) -> Any:
        sources.append(source)
        return opened(source, **options)

    monkeypatch.setattr("tensorcap.port_verification.opened", counted)
    verify(Workload(chain(), (X,)), tmp_path / "tgt.h5", tmp_path / "replayed")
    assert sources.count(tmp_path / "tgt.h5") == 1
    text = (tmp_path / "replayed" / "summary.txt").read_text()
    assert "errors are told apart by replay alone." in " ".join(text.split())
    told = report_of(folder)
    assert told["with_injection"] is None
    assert told["reference"]["path"] == str(tmp_path / "ref.h5")
    assert not (folder / "with_injection").exists()
    assert not (folder / "reference.h5").exists()


@pytest.mark.spec("VER-20")
def test_nothing_is_left_of_a_run_that_fails_and_nothing_is_overwritten(tmp_path: Path) -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("no target")

    folder = tmp_path / "report"
    with pytest.raises(RuntimeError, match="no target"):
        verify(Workload(chain(), (X,)), Runnable(fail), folder)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError) as raised:
        verify(Workload(chain(), (X,)), Workload(chain(), (X[:, :3],)), folder)
    assert getattr(raised.value, "__notes__", []) == []  # no archive of the run is left, so none is named
    assert list(tmp_path.iterdir()) == []
    verify(Workload(chain(), (X,)), Workload(chain(), (X,)), folder)
    with pytest.raises(UsageError, match="exists"):
        verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), folder)
    with pytest.raises(RuntimeError, match="no target"):
        verify(Workload(chain(), (X,)), Runnable(fail), folder, force=True)
    assert report_of(folder)["exit_status"] == 0
    verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), folder, force=True)
    assert report_of(folder)["exit_status"] == 1
    assert list(tmp_path.iterdir()) == [folder]
    other = tmp_path / "mine"
    other.mkdir()
    with pytest.raises(UsageError, match="is no report"):
        verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), other, force=True)
    assert other.is_dir()


def pixels(path: Path) -> Any:
    """The colours of a picture, 0 to 1, without transparency."""
    image = pytest.importorskip("matplotlib.image")
    return image.imread(path)[:, :, :3]


@pytest.mark.spec("VER-25")
def test_the_plot_is_written_or_its_absence_said(tmp_path: Path) -> None:
    found = verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), tmp_path / "report")
    plots = [tmp_path / "report" / name / "mse_plot.png" for name in ("without_injection", "with_injection")]
    if importlib.util.find_spec("matplotlib") is None:
        assert not any(plot.exists() for plot in plots)
        assert [note for note in found.summary if "'matplotlib'" in note] == list(found.notes)
        assert len(found.notes) == 1
    else:
        assert found.notes == ()
        for plot in plots:
            colours = pixels(plot)
            assert 0.01 < float((colours.min(axis=2) < 0.9).mean()) < 0.5
            assert len({tuple(colour) for colour in colours.reshape(-1, 3).round(1)}) > 10


def drawn(folder: Path, layers: list[Layer]) -> Any:
    pytest.importorskip("matplotlib")
    plot_errors(folder / "plot.png", "title", layers)
    return pixels(folder / "plot.png")


def layer(at: int, mse: float | None, status: Any = "within-rounding", component: str = "fc") -> Layer:
    return Layer(f"0/{at}.fc/output", "Linear", component, status, mse, mse, (), ((1,), (1,)))


def coloured(picture: Any, rows: slice) -> int:
    """How many pixels of some rows of the picture are of the first component's blue."""
    blue = np.array([0x1F, 0x77, 0xB4]) / 255
    within = picture[rows, : picture.shape[1] * 3 // 4]  # left of the legend
    return int((np.abs(within - blue) < 0.02).all(axis=2).sum())


@pytest.mark.spec("VER-25")
def test_errors_of_zero_and_those_that_are_no_number_are_drawn_below_the_scale(tmp_path: Path) -> None:
    scale, below = slice(0, 540), slice(540, None)
    for mse, place in ((1e-6, scale), (0.0, below), (math.inf, below), (math.nan, below), (1e300, scale)):
        picture = drawn(tmp_path, [layer(0, mse)])
        assert (coloured(picture, scale) > 20, coloured(picture, below) > 20) == (
            place is scale,
            place is below,
        )
    zero, infinite = (drawn(tmp_path, [layer(0, mse)]) for mse in (0.0, math.inf))
    assert np.abs(zero - infinite).max() > 0.5  # each has a row of its own
    empty = drawn(tmp_path, [layer(0, None)])
    assert coloured(empty, scale) == coloured(empty, below) == 0
    assert float((empty.min(axis=2) < 0.5).mean()) > 0.001  # which says so


@pytest.mark.spec("VER-25")
def test_a_layer_that_is_not_green_stands_out(tmp_path: Path) -> None:
    many = [layer(at, 1e-6) for at in range(400)]
    before = drawn(tmp_path, many)
    after = drawn(tmp_path, [*many[:200], layer(200, 1e-6, "diverged"), *many[201:]])
    assert int((before.max(axis=2) > after.max(axis=2) + 0.3).sum()) > 10  # its edge is black


@pytest.mark.spec("VER-25")
def test_colours_do_not_depend_on_the_errors(tmp_path: Path) -> None:
    small, large = ([layer(0, mse), layer(1, 1e-3, component="act")] for mse in (1e-6, 1e-1))
    blues = [coloured(drawn(tmp_path, layers), slice(None)) for layers in (small, large)]
    assert blues[0] == pytest.approx(blues[1], abs=10)


@pytest.mark.spec("VER-160", "RPT-1", "RPT-10", "RPT-11")
def test_the_page_names_the_module_that_is_wrong_and_is_made_again_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    found = verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), tmp_path / "report")
    first_screen = (tmp_path / "report" / "report.html").read_text().partition("</header>")[0]
    suspect = found.suspects[0]
    assert f"{suspect.module} (" in first_screen
    assert "is wrong" in first_screen
    assert f"tcap diagnose {tmp_path}/report/reference.h5" in first_screen
    own = json.loads((tmp_path / "report" / "verify.json").read_text())["own_errors"]
    assert own[suspect.key] == suspect.own
    page = tensorcap.report(tmp_path / "report", None, tmp_path / "again.html")
    assert isinstance(page, Page)
    assert (page.exit_status, page.suspects[0].name) == (1, suspect.module)
    again = (tmp_path / "again.html").read_text()
    assert again.partition("</header>")[0] == first_screen
    assert "Own error: what each module adds itself" in again


@pytest.mark.spec("VER-26")
def test_layers_are_written_in_the_same_layout_on_request(tmp_path: Path) -> None:
    verify(Workload(chain(), (X,)), Workload(wrong(), (X,)), tmp_path / "report", layers=True)
    folder = tmp_path / "report" / "with_injection"
    about = json.loads((folder / "reference_layers" / "layer_metadata.json").read_text())
    file = next(name for name, entry in about.items() if entry["key"] == "0/1.fc/output")
    assert about[file]["shape"] == [4, 8]
    with torch.no_grad():
        given = chain()[0](X)
        np.testing.assert_array_equal(
            np.load(folder / "reference_layers" / file), chain()[1].fc(given).numpy()
        )
        np.testing.assert_array_equal(np.load(folder / "target_layers" / file), wrong()[1].fc(given).numpy())


@pytest.mark.spec("VER-4")
def test_a_port_makes_both_sides_and_refuses_what_it_is_not_made_for() -> None:
    port = Port(chain, wrong, inputs=lambda side: (X if side == "reference" else X * 2,), dtypes=("float32",))
    assert torch.equal(port.make("target").inputs[0], X * 2)  # type: ignore[index]
    port.allow("float32", "cuda")
    with pytest.raises(UsageError, match="dtype: found bfloat16, expected float32"):
        port.allow("bfloat16", None)
    with pytest.raises(UsageError, match=r"reference: found a Sequential, expected a tensorcap\.Workload"):
        Port(chain, wrong).make("reference")


@pytest.mark.spec("VER-220", "MAX-113")
def test_a_port_hands_dtype_and_layers_to_functions_that_take_them() -> None:
    calls: list[tuple[Any, ...]] = []

    def reference(num_hidden_layers: int = 2) -> Workload:
        calls.append(("reference", num_hidden_layers))
        return Workload(chain(), (X,))

    def target(num_hidden_layers: int = 2, dtype: torch.dtype = torch.float32) -> Workload:
        calls.append(("target", num_hidden_layers, dtype))
        return Workload(chain().to(dtype), (X,))

    port = Port(reference, target)
    made = [
        make_side(port, "reference", num_hidden_layers=1),
        make_side(port, "target", num_hidden_layers=1, dtype="bfloat16"),
    ]
    assert calls == [("reference", 1), ("target", 1, torch.bfloat16)]
    assert {p.dtype for p in made[1].model.parameters()} == {torch.bfloat16}
    inputs: list[Any] = [workload.inputs for workload in made]
    assert [each[0].dtype for each in inputs] == [torch.float32, torch.bfloat16]
    with pytest.raises(UsageError, match="target: takes no --num-hidden-layers"):
        make_side(Port(reference, lambda: Workload(chain(), (X,))), "target", num_hidden_layers=1)
    cast = make_side(Port(reference, lambda: Workload(chain(), (X,))), "target", dtype="bfloat16")
    assert {p.dtype for p in cast.model.parameters()} == {torch.bfloat16}
