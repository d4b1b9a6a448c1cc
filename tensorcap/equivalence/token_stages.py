"""Stages 1, 5 and 6 on an experiment: each side runs alone, and what it gives is kept in a file.

The source runs first, in the wide precision; its tokens are fed to the others. The target runs on its ranks,
each of which is given the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tensorcap.adapters import adapter_for
from tensorcap.equivalence.calibration import CONFIG, read_config
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.forced_decoding import (
    Components,
    ForcedComparison,
    ForcedLimits,
    compare_forced,
)
from tensorcap.equivalence.forced_plot import plot_forced
from tensorcap.equivalence.models import MODEL_SETTINGS, Side, call_on_ranks, model_files, rank
from tensorcap.equivalence.smoke import SmokeTest, compare_generations
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.equivalence.token_runs import (
    FORCED_PROMPTS,
    SMOKE_PROMPTS,
    Prompt,
    SideRuns,
    forced_run,
    greedy_run,
    is_causal,
    prompt_run,
    require_prompts,
)
from tensorcap.workload import TokenModel, Workload
from tensorcap_formats.errors import MissingPackageError, UsageError
from tensorcap_formats.progress import Progress

SMOKE_FILE: Final = "results/stage1.json"
FORCED_FILE: Final = "results/teacher_forced.json"
FORCED_PLOT: Final = "results/teacher_forced.png"
_COMPONENTS_FILE: Final = "results/stage2.json"
_SMOKE_RUNS: Final = "results/stage1"
_FORCED_RUNS: Final = "results/stage5"
_RUN_SETTINGS: Final = (
    *MODEL_SETTINGS,
    "run.tp",
    "run.reference_dtype",
    "run.dtype",
    "run.num_tokens",
    "run.prompts",
)


def run_smoke(experiment: Experiment, progress: Progress) -> StageResult:
    """Let both sides generate, compare, and write the file of stage 1."""
    result = smoke_test(experiment, progress)
    experiment.write_json(SMOKE_FILE, result.to_json())
    further = (result.meaning[1],) if result.meaning[1] else ()
    figures = {"match_rate": result.match_rate, "cosine_p5": result.cosine.tail, "device": result.device}
    return StageResult("passed" if result.passed else "failed", result.words, (SMOKE_FILE,), further, figures)


def smoke_test(experiment: Experiment, progress: Progress) -> SmokeTest:
    """Run stage 1 without writing its result.

    Raises:
        UsageError: There are no prompts, or a model gives no logits of tokens.
        CaptureError: The source's logits are not finite, or a rank of the target died.
    """
    source = _source_runs(experiment, SMOKE_PROMPTS, _SMOKE_RUNS)
    progress.stage("generating by the target")
    target = _target_runs(experiment, _SMOKE_RUNS, is_forced=False)
    limits = experiment.settings.limits
    return compare_generations(
        source.runs,
        target.runs,
        vocabularies=_vocabularies(source, target),
        device=target.device,
        token_match=limits.token_match,
        theta_cosine=limits.theta_cosine,
    )


def run_forced(experiment: Experiment, progress: Progress) -> StageResult:
    """Feed the source's tokens to all three models, compare, and write the file of stages 5 and 6."""
    result = forced_comparison(experiment, progress)
    files = [experiment.write_json(FORCED_FILE, result.to_json())]
    words = list(result.words)
    if experiment.settings.run.plots:
        try:
            plot_forced(experiment.path(FORCED_PLOT), result)
            files.append(FORCED_PLOT)
        except MissingPackageError as error:
            words.append(f"{error}.")
    way = result.way_back
    figures = {gate.name: gate.value for gate in result.gates}
    return StageResult(
        "passed" if result.passed else "failed",
        tuple(words),
        tuple(files),
        () if way is None else (way.text,),
        figures,
    )


def forced_comparison(experiment: Experiment, progress: Progress) -> ForcedComparison:
    """Run stages 5 and 6 without writing their result.

    Raises:
        UsageError: There are no prompts, or a model gives no logits of tokens.
        CaptureError: The source's logits are not finite, or a rank of the target died.
    """
    source = _source_runs(experiment, FORCED_PROMPTS, _FORCED_RUNS)
    progress.stage("feeding the source in the target's precision")
    twin = _twin_runs(experiment, source)
    progress.stage("feeding the target")
    target = _target_runs(experiment, _FORCED_RUNS, is_forced=True)
    config = read_config(experiment.folder / CONFIG)
    limits = experiment.settings.limits
    return compare_forced(
        source.runs,
        twin.runs,
        target.runs,
        vocabularies=_vocabularies(source, twin, target),
        limits=ForcedLimits(
            limits.tau_r,
            limits.theta_cosine,
            limits.top1,
            None if config is None else config.delta_kl,
            None if config is None else config.delta_kl_max,
        ),
        components=_components(experiment),
        generates=source.generates,
        is_perturbed=_has_no_wider(experiment),
        dtype=experiment.settings.run.dtype,
    )


def record_target(experiment: Experiment, *, folder: str, is_forced: bool) -> None:
    """Run the target on a source's prompts, as this rank of it; rank 0 writes what it gives.

    Args:
        experiment: The experiment.
        folder: Where the source's runs are, and the target's go to, in the experiment's folder.
        is_forced: Whether it is fed the source's tokens, and is patched; else it generates as it is.
    """
    source = SideRuns.read(experiment.folder / folder / "source.npz")
    workload = Side(experiment, "target", is_patched=is_forced).build(experiment.settings.run.dtype)
    runs = _repeat(_token_model(workload), source, is_forced=is_forced)
    if rank() == 0:
        runs.write(experiment.path(f"{folder}/target.npz"))


def _source_runs(experiment: Experiment, texts: Sequence[str], folder: str) -> SideRuns:
    """The source in the wide precision, whose tokens the others are fed."""
    run = experiment.settings.run
    model = _token_model(Side(experiment, "source").build(run.reference_dtype or run.dtype))
    prompts = _prompts(experiment, model, texts)
    require_prompts(prompts, model.vocabulary)
    generates = all(is_causal(model, prompt) for prompt in prompts)
    runs = tuple(
        greedy_run(model, prompt, run.num_tokens, vocabulary=model.vocabulary)
        if generates
        else prompt_run(model, prompt, vocabulary=model.vocabulary)
        for prompt in prompts
    )
    source = SideRuns(runs, model.vocabulary, generates, model.device)
    source.write(experiment.path(f"{folder}/source.npz"))
    return source


def _twin_runs(experiment: Experiment, source: SideRuns) -> SideRuns:
    """The source in the target's precision, or, if it has no wider one, on perturbed inputs."""
    run = experiment.settings.run
    workload = Side(experiment, "source").build(run.dtype)
    if _has_no_wider(experiment):
        workload = adapter_for(workload.model).perturb(workload, run.dtype)
    return _repeat(_token_model(workload), source, is_forced=True)


def _has_no_wider(experiment: Experiment) -> bool:
    """Whether the source runs in no wider precision than the target, so that two tensors have to do."""
    return experiment.settings.run.reference_dtype in ("", experiment.settings.run.dtype)


def _target_runs(experiment: Experiment, folder: str, *, is_forced: bool) -> SideRuns:
    call_on_ranks(experiment, f"{__name__}:record_target", folder=folder, is_forced=is_forced)
    return SideRuns.read(experiment.folder / folder / "target.npz")


def _repeat(model: TokenModel, source: SideRuns, *, is_forced: bool) -> SideRuns:
    """Run a model on a source's prompts."""
    sizes = [size for size in (model.vocabulary, source.vocabulary) if size is not None]
    vocabulary = min(sizes, default=None)
    runs = []
    for one in source.runs:
        if not source.generates:
            runs.append(prompt_run(model, one.prompt, vocabulary=vocabulary))
        elif is_forced:
            runs.append(forced_run(model, one.prompt, one.tokens))
        else:
            runs.append(greedy_run(model, one.prompt, len(one.tokens), vocabulary=vocabulary))
    return SideRuns(tuple(runs), model.vocabulary, source.generates, model.device)


def _token_model(workload: Workload) -> TokenModel:
    return adapter_for(workload.model).token_model(workload)


def _prompts(experiment: Experiment, model: TokenModel, texts: Sequence[str]) -> list[Prompt]:
    """The prompts of the settings; else the method's, if the source has a tokenizer; else its workload's own.

    Raises:
        UsageError: The settings have texts, and the source has no tokenizer.
    """
    recipe = Side(experiment, "source").recipe
    wanted = experiment.settings.run.prompts
    has_tokenizer = recipe.kind == "huggingface"
    if wanted and not has_tokenizer:
        raise UsageError(
            "[run]: prompts: are texts, for which the source has to be a Hugging Face model with a tokenizer",
            hint="Leave them out: the token ids of the source's own workload are then the prompts.",
        )
    if has_tokenizer:
        from tensorcap.adapters.huggingface.model_inputs import load_tokenizer

        try:
            tokenizer: Any = load_tokenizer(recipe.path)
        except UsageError:
            if wanted:
                raise
        else:
            return [Prompt(text, tuple(tokenizer(text)["input_ids"])) for text in wanted or texts]
    return [Prompt.of_tokens(row) for row in model.prompts]


def _vocabularies(*sides: SideRuns) -> list[int]:
    return [side.vocabulary for side in sides if side.vocabulary is not None]


def _components(experiment: Experiment) -> Components:
    """What stage 2 came to, by its file."""
    try:
        content = json.loads((experiment.folder / _COMPONENTS_FILE).read_text(encoding="utf-8"))
        return "failed" if content["failed"] else "passed"
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return "not run"


def _forced_sources(experiment: Experiment) -> tuple[Path, ...]:
    further = (experiment.folder / name for name in (CONFIG, _COMPONENTS_FILE))
    return (*model_files(experiment), *experiment.patches, *further)


SMOKE: Final = Stage(
    1,
    "smoke",
    "greedy tokens of both sides",
    run_smoke,
    (SMOKE_FILE,),
    settings=(*_RUN_SETTINGS, "limits.token_match", "limits.theta_cosine"),
    sources=model_files,
    then=("components", "localize"),
)
FORCED: Final = Stage(
    5,
    "forced",
    "logits of three models that are fed the source's tokens (5 and 6)",
    run_forced,
    (FORCED_FILE, FORCED_PLOT),
    settings=(*_RUN_SETTINGS, "run.plots", "limits.tau_r", "limits.theta_cosine", "limits.top1"),
    sources=_forced_sources,
)
