"""Stage 7 on an experiment: the source's scores, which are kept, and the target's on its ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tensorcap.adapters import adapter_for
from tensorcap.equivalence.bench_config import BenchConfig
from tensorcap.equivalence.downstream import Score, compare_scores, read_scores, scores_json
from tensorcap.equivalence.experiment import Experiment, digest_of
from tensorcap.equivalence.lm_eval_run import run_tasks
from tensorcap.equivalence.models import MODEL_SETTINGS, Side, SideName, call_on_ranks, model_files, rank
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap_formats.errors import UsageError
from tensorcap_formats.progress import Progress

CONFIG: Final = "bench_config.yaml"
SUMMARY: Final = "results/stage7/stage7_summary.json"
_SCORES: Final = "results/stage7/{}.json"


def run_downstream(experiment: Experiment, progress: Progress) -> StageResult:
    """Run the tasks on both sides, compare, and write the summary."""
    config = _config(experiment)
    config.require_local_tasks()
    if config.runs_source:
        progress.stage("running the source's tasks")
        record_scores(experiment, side="source")
    source = _kept_scores(experiment, config)
    progress.stage("running the target's tasks")
    call_on_ranks(experiment, f"{__name__}:record_scores", side="target")
    content = experiment.read_json(_SCORES.format("target"), stage="downstream")
    target = read_scores(_SCORES.format("target"), content["scores"])
    result = compare_scores(
        source, target, undefined=content["undefined"], tolerance=experiment.settings.limits.tolerance
    )
    experiment.write_json(SUMMARY, result.to_json())
    figures = {score.text: score.value for score in target}
    gate = {True: "passed", False: "failed", None: "none"}[result.passed]
    return StageResult(gate, result.words, (SUMMARY,), figures=figures)  # type: ignore[arg-type] # of these three


def record_scores(experiment: Experiment, *, side: SideName) -> None:
    """Run the tasks on a side, as this rank of it; rank 0 writes the scores.

    Raises:
        CaptureError: A task could not be run, or the source's logits are not finite.
        MissingPackageError: lm-eval is not installed.
    """
    config, run = _config(experiment), experiment.settings.run
    dtype = run.dtype if side == "target" else run.reference_dtype or run.dtype
    workload = Side(experiment, side, is_patched=side == "target").build(dtype)
    model = adapter_for(workload.model).token_model(workload)
    scores, undefined = run_tasks(model, _tokenizer(experiment, config), config)
    if rank() == 0:
        content = {
            "scores": scores_json(scores),
            "undefined": undefined,
            "tasks": _digest(experiment, config),
        }
        experiment.write_json(_SCORES.format(side), content)


def _config(experiment: Experiment) -> BenchConfig:
    return BenchConfig.read(experiment.folder / CONFIG)


def _kept_scores(experiment: Experiment, config: BenchConfig) -> tuple[Score, ...] | None:
    """The source's scores of these tasks, of now or of before; None if there are none.

    Raises:
        UsageError: They are of other tasks, or their file is something else.
    """
    name = _SCORES.format("source")
    if not (experiment.folder / name).exists():
        return None
    content: Any = experiment.read_json(name, stage="downstream")
    if not isinstance(content, dict) or content.get("tasks") != _digest(experiment, config):
        raise UsageError(
            f"{experiment.folder / name}: holds scores of other tasks, or of other settings",
            hint="Run the source again: run_hf_baseline: true.",
        )
    if content.get("undefined"):
        raise UsageError(
            f"{experiment.folder / name}: the source's logits are not finite, by which nothing is judged"
        )
    return read_scores(name, content.get("scores"))


def _digest(experiment: Experiment, config: BenchConfig) -> str:
    """What the source's scores depend on: the tasks, how they are run, and the source."""
    source = Side(experiment, "source")
    return digest_of(
        [
            [asdict(scenario) for scenario in config.scenarios],
            experiment.digest(config.task_path),
            config.tokenizer,
            source.recipe.path,
            [experiment.digest(path) for path in source.files],
            experiment.settings.run.reference_dtype,
        ]
    )


def _tokenizer(experiment: Experiment, config: BenchConfig) -> Any:
    from tensorcap.adapters.huggingface.model_inputs import load_tokenizer

    recipe = Side(experiment, "source").recipe
    if not config.tokenizer and recipe.kind != "huggingface":
        raise UsageError(
            f"{experiment.folder / CONFIG}: tokenizer: is missing, expected a folder with one, as the source "
            "is a function"
        )
    return load_tokenizer(config.tokenizer or recipe.path)


def _sources(experiment: Experiment) -> tuple[Path, ...]:
    path = experiment.folder / CONFIG
    tasks = (_config(experiment).task_path,) if path.exists() else ()
    return (*model_files(experiment), *experiment.patches, path, *tasks)


STAGE: Final = Stage(
    7,
    "downstream",
    "scores of tasks",
    run_downstream,
    (SUMMARY,),
    settings=(*MODEL_SETTINGS, "run.tp", "run.reference_dtype", "run.dtype", "limits.tolerance"),
    sources=_sources,
    is_optional=True,
    when_failed="If all tasks fail, go back to stage 2, `tcap equivalence components`; if only those of long "
    "chains of steps do, the precision is at fault: `tcap equivalence forced`.",
)
