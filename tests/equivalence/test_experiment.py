"""Settings, stages that are believed or not, and how they follow on each other; no model runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tensorcap
from tensorcap.equivalence import FILE, Experiment, Stage, StageResult, new_settings, stages, write_settings
from tensorcap.equivalence.models import apply_patches
from tensorcap.reports.html import ExperimentPage
from tensorcap.workload import load_file
from tensorcap_cli.main import main
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.progress import Progress, Silent

GIVEN = {
    "source_model_path": "ref.py:model",
    "target_modeling_file": "port.py",
    "target_causal_class": "port",
}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    write_settings(tmp_path / FILE, new_settings(tmp_path, GIVEN, {"tp": 1}))
    return Experiment.open(tmp_path)


def tcap(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["equivalence", *arguments], prog_name="tcap")


class Runs:
    """A stage whose runs are counted."""

    def __init__(self, name: str, *needs: Stage, gate: str = "passed", **options: Any) -> None:
        self.count = 0
        self.gate = gate
        self.before: Callable[[], None] = lambda: None
        self.stage = Stage(2, name, f"the stage {name}", self.run, (f"{name}.*",), needs=needs, **options)

    def run(self, experiment: Experiment, progress: Progress) -> StageResult:
        self.count += 1
        experiment.write_editable(f"{self.stage.name}.txt", "as the stage wrote it\n")
        self.before()
        experiment.write_json(f"{self.stage.name}.json", {"count": self.count})
        words = (f"run {self.count}.",)
        files = (f"{self.stage.name}.txt", f"{self.stage.name}.json")
        return StageResult(self.gate, words, files)  # type: ignore[arg-type] # one of the gates


@pytest.mark.spec("EQV-1")
def test_settings_are_read_back(experiment: Experiment) -> None:
    text = (experiment.folder / FILE).read_text()
    assert 'source_model_path = "ref.py:model" # The trusted model' in text
    assert "tau_r = 1.2 # R of a component" in text
    changed = experiment.changed({"limits.tau_r": 2, "run.options": {"prompt": "Hi"}, "run.prompts": ["a"]})
    again = Experiment.open(experiment.folder)
    assert changed.settings == again.settings
    assert again.settings.limits.tau_r == 2.0
    assert again.settings.run.options == {"prompt": "Hi"}
    assert again.settings.run.prompts == ("a",)


@pytest.mark.spec("EQV-1")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limits]\ntau = 1.0", "[limits]: found 'tau', expected one of tau_r,"),
        ("[run]\ntp = '2'", "[run]: tp: found '2', expected a whole number"),
        ("[run]\ntp = true", "[run]: tp: found True, expected a whole number"),
        ("[limits]\ntau_r = nan", "tau_r: found nan, expected a number"),
        ("[parameters]\nsource_model_path = 'a'", "missing: target_modeling_file"),
        ("[other]", "found 'other', expected one of parameters, run, limits"),
        ("run = 3", "[run]: found 3, expected a table"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError) as refused:
        Experiment.open(tmp_path)
    assert words in str(refused.value)


@pytest.mark.spec("EQV-1")
def test_a_folder_without_settings_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReadError) as refused:
        Experiment.open(tmp_path)
    assert refused.value.hint == f"`tcap equivalence init {tmp_path}` writes one."


@pytest.mark.spec("EQV-2")
def test_init_needs_what_it_cannot_ask_for_and_keeps_paths_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("port.py").write_text("")
    refused = tcap("init", "exp", "--source-model-path", "some/model")
    assert refused.exit_code == 2
    assert "[parameters]: missing: target_modeling_file" in refused.output
    arguments = ["--source-model-path", "some/model", "--target-modeling-file", "port.py"]
    done = tcap(
        "init", "exp", *arguments, "--target-causal-class", "make", "--tp", "2", "--set", "run.seed=7"
    )
    assert done.exit_code == 0, done.output
    settings = Experiment.open("exp").settings
    assert settings.parameters.source_model_path == "some/model"
    assert settings.parameters.target_modeling_file == "../port.py"
    assert (settings.run.tp, settings.run.target_framework, settings.run.seed) == (2, "neuron", 7)
    assert Experiment.open("exp").resolve("../port.py:make") == "exp/../port.py:make"
    assert tcap("init", "exp", "--set", "run").exit_code == 2


@pytest.mark.spec("EQV-3")
def test_a_stage_is_run_once_and_again_if_what_it_needs_has_changed(experiment: Experiment) -> None:
    first = Runs("first", settings=("run.dtype",))
    second = Runs("second", first.stage, settings=("limits.tau_r",))
    for _ in range(2):
        state = stages.run_stage(experiment, second.stage)
        assert (state.state, first.count, second.count) == ("passed", 1, 1)
    changed = experiment.changed({"limits.tau_r": 1.5})
    stages.run_stage(changed, second.stage)
    assert (first.count, second.count) == (1, 2)
    changed = changed.changed({"run.dtype": "float16"})
    assert second.stage.result(changed) is None  # since what it needs is not
    stages.run_stage(changed, second.stage)
    assert (first.count, second.count) == (2, 3)
    stages.run_stage(changed, second.stage, again=True)
    assert (first.count, second.count) == (2, 4)


@pytest.mark.spec("EQV-3")
def test_nothing_half_written_is_believed(experiment: Experiment) -> None:
    runs = Runs("first")

    def interrupt() -> None:
        raise KeyboardInterrupt

    runs.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        stages.run_stage(experiment, runs.stage)
    assert runs.stage.result(experiment) is None
    assert not runs.stage.edited(experiment)  # the text is there, and nobody has edited it
    runs.before = lambda: None
    stages.run_stage(experiment, runs.stage)
    (experiment.folder / "first.json").write_text('{"count":')
    assert runs.stage.result(experiment) is None
    stages.run_stage(experiment, runs.stage)
    (experiment.folder / "first.txt").unlink()
    assert runs.stage.result(experiment) is None
    stages.run_stage(experiment, runs.stage)
    (experiment.folder / ".stages" / "first.json").write_text("{")
    assert runs.stage.result(experiment) is None
    assert runs.count == 4


@pytest.mark.spec("EQV-4")
def test_a_file_that_a_person_has_edited_is_never_written_over(experiment: Experiment) -> None:
    runs = Runs("first", edited_files=("*.txt",))
    other = Runs("second", runs.stage)
    stages.run_stage(experiment, other.stage)
    text = experiment.folder / "first.txt"
    text.write_text("mine\n")
    assert runs.stage.result(experiment) is not None
    assert runs.stage.edited(experiment) == ("first.txt",)
    assert other.stage.result(experiment) is None  # which reads it
    stages.run_stage(experiment, runs.stage, again=True)
    assert text.read_text() == "mine\n"
    (experiment.folder / "third.txt").write_text("put there before\n")
    third = Runs("third", edited_files=("*.txt",))
    stages.run_stage(experiment, third.stage)
    assert (experiment.folder / "third.txt").read_text() == "put there before\n"


@pytest.mark.spec("EQV-5")
def test_a_run_stops_where_a_gate_fails_and_says_why_before(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Runs("first", gate="none")
    second = Runs("second", gate="failed", then=("why",), when_failed="Do this.")
    why = Runs("why", is_optional=True)
    last = Runs("last")
    monkeypatch.setattr(stages, "STAGES", (first.stage, second.stage, why.stage, last.stage))
    why.gate = "failed"
    listed = list(stages.run_stages(experiment))
    assert [(one.stage.name, one.state) for one in listed] == [
        ("first", "done"),
        ("second", "failed"),
        ("why", "failed"),
    ]
    assert listed[1].next == ("Do this.",)
    why.gate = "passed"  # as a patch that mends it
    stages.run_stage(experiment, why.stage, again=True)
    assert [one.stage.name for one in stages.run_stages(experiment)] == ["first", "second", "why", "last"]
    assert (second.count, last.count) == (1, 1)


@pytest.mark.spec("EQV-5")
def test_status_is_a_table(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Runs("first", gate="failed", when_failed="Do this."), Runs("second")
    monkeypatch.setattr(stages, "STAGES", (first.stage, second.stage))
    shown = tcap("status", str(experiment.folder))
    assert shown.exit_code == 0
    assert [line.split()[:3] for line in shown.output.splitlines()[1:3]] == [
        ["2", "first", "to"],
        ["2", "second", "to"],
    ]
    done = tcap("run", str(experiment.folder), "--json")
    assert done.exit_code == 1
    (state,) = json.loads(done.stdout)["stages"]
    assert (state["name"], state["state"], state["next"], state["words"]) == (
        "first",
        "failed",
        ["Do this."],
        ["run 1."],
    )
    shown = tcap("status", str(experiment.folder))
    assert (shown.exit_code, shown.output.splitlines()[-1]) == (1, "Next: Do this.")


@pytest.mark.spec("EQV-50")
def test_patches_know_the_port_by_the_name_of_its_file(experiment: Experiment) -> None:
    port = experiment.folder / "some_port.py"
    port.write_text("class Layer:\n    scale = 1\n")
    (experiment.folder / "patches").mkdir()
    patch = experiment.folder / "patches" / "layer.py"
    patch.write_text("def apply_layer_patch():\n    import some_port\n    some_port.Layer.scale = 2\n")
    module = load_file(str(port))
    apply_patches(experiment, module)
    assert module.Layer.scale == 2
    patch.write_text("def other():\n    pass\n")
    with pytest.raises(UsageError, match="has no function apply_…"):
        apply_patches(experiment, module)


@pytest.mark.spec("EQV-5")
def test_progress_names_the_stage(experiment: Experiment) -> None:
    class Lines(Silent):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def stage(self, text: str) -> None:
            self.texts.append(text)

    lines = Lines()
    stages.run_stage(experiment, Runs("first").stage, progress=lines)
    assert lines.texts == ["stage 2, first: the stage first"]


def recorded(experiment: Experiment, name: str, gate: str, *words: str, **files: Any) -> None:
    """Write the record of a stage as if it had run, with its files."""

    def run(experiment: Experiment, progress: Progress) -> StageResult:
        names = [experiment.write_json(f"results/{file}.json", content) for file, content in files.items()]
        return StageResult(gate, words, tuple(names))  # type: ignore[arg-type] # one of the gates

    replace(stages.stage_named(name), run=run).run_recorded(experiment, Silent())


@pytest.fixture
def failed(experiment: Experiment) -> Experiment:
    """An experiment whose components failed, one with a name that is markup; the stages before are over."""
    results = [
        {"component": "embed", "r_ratio": 1.0, "passed": True, "limit": 1.2, "kind": "embedding", "place": 0},
        {"component": "<b>norm</b>", "r_ratio": 4.5, "passed": False, "limit": 1.25, "place": 1},
        {"component": "mlp", "r_ratio": 1.1, "passed": True, "limit": 1.2, "place": 2},
        {"component": "head", "r_ratio": 15.0, "passed": False, "limit": 1.2, "place": 3},
    ]
    content = {"results": results, "passed": 2, "failed": 2, "total": 4}
    for name in [stage.name for stage in stages.STAGES]:
        if name == "components":
            recorded(experiment, name, "failed", "2 of 4 components pass.", stage2=content)
            return experiment
        recorded(experiment, name, "passed" if name == "smoke" else "none", f"{name} is over.")
    raise AssertionError("no stage of components")


@pytest.mark.spec("RPT-141")
def test_a_report_of_an_experiment_has_stages_faults_and_components(
    failed: Experiment, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    page = tensorcap.report(failed.folder, None, tmp_path / "report.html")
    assert isinstance(page, ExperimentPage)
    gates = "1 of 2 gates passed, 2 of 4 components."
    assert page.verdict.startswith(f"The port does not pass components: {gates}")
    assert page.suspects == ("<b>norm</b>", "head")
    assert page.culprit == "<b>norm</b> is at fault: R is 4.5: a factor is missing."
    assert (page.is_green, page.exit_status) == (False, 1)
    assert [(one.name, one.ratio, one.passed) for one in page.components][::3] == [
        ("embed", 1.0, True),
        ("head", 15.0, False),
    ]
    text = (tmp_path / "report.html").read_text()
    assert text.index(page.verdict) < text.index("is at fault") < text.index("Stages</h2>")
    assert "<b>norm" not in text
    assert "&lt;b&gt;norm&lt;/b&gt;" in text
    assert "port.py:port against ref.py:model" in text
    assert not re.search("https?://|<script", text)
    tensorcap.report(failed.folder, None, tmp_path / "issue.md", markdown=True)
    lines = (tmp_path / "issue.md").read_text().splitlines()
    assert len(lines) <= 60
    assert any(line.startswith("| head | 15 | 1.2 |") for line in lines)
    with pytest.raises(UsageError, match="expected no --png"):
        tensorcap.report(failed.folder, None, tmp_path / "plots", png=True)
    done = CliRunner().invoke(main, ["report", str(failed.folder), "-o", str(tmp_path / "again.html")])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == f"Next: tcap equivalence status {failed.folder}"


@pytest.mark.spec("RPT-141")
def test_a_report_of_a_new_experiment_says_what_to_run(experiment: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tensorcap.report(experiment.folder, None, tmp_path / "report.html")
    assert isinstance(page, ExperimentPage)
    assert page.verdict.startswith("No gate was reached yet. ")
    assert page.next.command == f"tcap equivalence run {experiment.folder}"
    assert {stage.state for stage in page.stages} == {"to do"}
    assert (page.is_green, page.exit_status, page.components) == (False, 0, ())
