"""lm-eval's tasks on a model of ours, with the data of local files; needs the extra `downstream`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.equivalence.bench_config import BenchConfig
from tensorcap.equivalence.downstream import Score
from tensorcap.workload import TokenModel, replace_attribute
from tensorcap_formats.errors import CaptureError, MissingPackageError, UsageError, missing_package

_OFFLINE: Final = {  # set while lm-eval runs, and read when datasets is imported
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_MOST_TOKENS: Final = 256  # of an answer, if its task does not say
_DESCRIBE: Final = "add_env_info"
_NO_SCORE: Final = ("name", "alias", "sample_len")


def run_tasks(model: TokenModel, tokenizer: Any, config: BenchConfig) -> tuple[tuple[Score, ...], int]:
    """Run the tasks of all scenarios.

    Args:
        model: The model.
        tokenizer: Turns texts into its tokens, a tokenizer of transformers.
        config: What is run.

    Returns:
        The scores, and how often logits were no finite numbers.

    Raises:
        MissingPackageError: lm-eval, or a package that it needs, is not installed.
        CaptureError: lm-eval could not run a task.
    """
    folder = config.task_path.resolve()
    with _offline(folder):
        evaluate, manager_class = _import_harness()
        harness_model = _harness_model(model, tokenizer)
        manager = manager_class(include_path=str(folder), include_defaults=False)
        scores: list[Score] = []
        for scenario in config.scenarios:
            if scenario.use_chat and getattr(tokenizer, "chat_template", None) is None:
                raise UsageError(
                    f"scenario {scenario.name}: use_chat: the tokenizer has no chat template, expected one"
                )
            try:
                results = evaluate(
                    model=harness_model,
                    tasks=list(scenario.tasks),
                    task_manager=manager,
                    limit=scenario.limit,
                    num_fewshot=scenario.num_fewshot,
                    apply_chat_template=scenario.use_chat,
                    bootstrap_iters=0,
                    log_samples=False,
                )
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise CaptureError(f"scenario {scenario.name}: lm-eval could not run it: {reason}") from error
            scores += _scores(scenario.name, results)
    return tuple(scores), harness_model.undefined


@contextmanager
def _offline(folder: Path) -> Iterator[None]:
    """Work in the folder of tasks, to whose files they refer, without the hub and without progress bars."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    where = Path.cwd()
    os.environ.update(_OFFLINE)
    os.chdir(folder)
    try:
        with _silent_stderr():
            yield
    finally:
        os.chdir(where)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what is written to the standard error stream, by programs that are started too."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _import_harness() -> tuple[Any, Any]:
    try:
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise _missing(error) from error

    def evaluate(**arguments: Any) -> Any:
        """Without a description of the machine, for which it starts a dozen programs."""
        with ExitStack() as stack:
            if _DESCRIBE in vars(evaluator):
                stack.enter_context(replace_attribute(evaluator, _DESCRIBE, lambda _: lambda results: None))
            return evaluator.simple_evaluate(**arguments)

    return evaluate, TaskManager


def _missing(error: ModuleNotFoundError) -> MissingPackageError:
    package = (error.name or "lm_eval").partition(".")[0]
    return missing_package("stage 7", package, extra="downstream")


def _harness_model(model: TokenModel, tokenizer: Any) -> Any:
    """The model as lm-eval wants one; its class can only be made once lm-eval is there."""
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):  # type: ignore[misc] # lm-eval may be absent
        """Scores and generates through a `TokenModel`, a row at a time."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.undefined = 0

        @property
        def eot_token_id(self) -> int:
            ends = (tokenizer.eos_token_id, *sorted(model.end_tokens), 0)
            return int(next(token for token in ends if token is not None))

        @property
        def prefix_token_id(self) -> int:
            first = tokenizer.bos_token_id
            return self.eot_token_id if first is None else int(first)

        @property
        def tokenizer_name(self) -> str:
            return str(getattr(tokenizer, "name_or_path", ""))

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            text: str = tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(tokenizer.encode(string, **special))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [self._likelihood(context, rest) for _, context, rest in requests]

        def _likelihood(self, context: Sequence[int], rest: Sequence[int]) -> tuple[float, bool]:
            tokens = [*context, *rest]
            rows = model.rows(tokens[:-1], len(context) - 1)[:, : model.vocabulary].astype(np.float64)
            top = rows.max(axis=1)
            if not np.isfinite(top).all():  # a NaN is the maximum of its row
                self.undefined += 1
                return float("nan"), False
            log_p = rows - top[:, None]
            log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
            chosen = log_p[np.arange(len(rest)), list(rest)]
            return float(chosen.sum()), bool((rows.argmax(axis=1) == np.array(rest)).all())

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [request.args[0] for request in requests]
            return [self._likelihood([self.prefix_token_id], self.tok_encode(text))[0] for text in texts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._answer(*request.args) for request in requests]

        def _answer(self, context: str, settings: Any) -> str:
            stops = settings.get("until") or []
            stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
            most = int(settings.get("max_gen_toks") or _MOST_TOKENS)
            ends = {*model.end_tokens, self.eot_token_id}
            row, tokens = model.begin(self.tok_encode(context)), list[int]()
            while len(tokens) < most:
                if not np.isfinite(row[: model.vocabulary].max()):
                    self.undefined += 1
                    break
                token = int(row[: model.vocabulary].argmax())
                if token in ends:
                    break
                tokens.append(token)
                text = tokenizer.decode(tokens)
                if any(stop in text for stop in stops):
                    break
                row = model.step(token)
            text = tokenizer.decode(tokens)
            for stop in stops:
                text = text.partition(stop)[0]
            return str(text)

    return HarnessModel()


def _scores(scenario: str, results: Any) -> Iterator[Score]:
    for task, members in results["results"].items():
        directions = results["higher_is_better"].get(task, {})
        count = int(results["n-samples"].get(task, {}).get("effective", 0))
        for name, value in members.items():
            metric = name.partition(",")[0]
            if name in _NO_SCORE or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            yield Score(scenario, task, name, float(value), count, directions.get(metric) is not False)
