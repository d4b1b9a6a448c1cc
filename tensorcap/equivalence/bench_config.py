"""What stage 7 runs: `bench_config.yaml`, in the method's members, one file for both sides.

benchmarks:
  lm_eval:
    accuracy:                  # any name
      tasks: [counting]        # by the names in the YAML files of task_path
      limit: 200               # rows of each task, or null for all
      use_chat: false          # whether the tokenizer's chat template is applied
      num_fewshot: 0           # or null for what the task says
task_path: tasks               # where the tasks' YAML files and their data are
tokenizer: llama               # a folder; that of the source if it is left out
run_hf_baseline: true          # whether the source is run too, or its scores of before are taken
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import ReadError, UsageError, abbreviate, missing_package

LIMIT: Final = 200  # rows of a task, the method's
_TOP: Final = ("benchmarks", "model", "run_hf_baseline", "task_path", "tokenizer")
_SCENARIO: Final = ("limit", "num_fewshot", "tasks", "use_chat")
_BUILDERS: Final = ("arrow", "csv", "json", "parquet", "text")  # of datasets, which read files


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tasks that are run in one way.

    Attributes:
        name: Of the scenario.
        tasks: Names of tasks.
        limit: Rows of each task, from the first on; None for all.
        use_chat: Whether the tokenizer's chat template is applied.
        num_fewshot: Examples before each row; None for what the task says.
    """

    name: str
    tasks: tuple[str, ...]
    limit: int | None = LIMIT
    use_chat: bool = False
    num_fewshot: int | None = None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The content of `bench_config.yaml`.

    Attributes:
        scenarios: What is run.
        task_path: The folder of the tasks.
        tokenizer: A folder with a tokenizer; "" for the source's.
        runs_source: Whether the source is run too.
    """

    scenarios: tuple[Scenario, ...]
    task_path: Path
    tokenizer: str = ""
    runs_source: bool = True

    @classmethod
    def read(cls, path: Path) -> BenchConfig:
        """Read the file; its paths are relative to its folder.

        Raises:
            ReadError: It is not there, or is no YAML.
            UsageError: A member is unknown, or of another type.
        """
        content = read_yaml(path)
        _refuse_unknown(str(path), content, _TOP)
        harness = _table(f"{path}: benchmarks", content.get("benchmarks"), ("lm_eval",)).get("lm_eval")
        scenarios = tuple(
            _scenario(f"{path}: benchmarks: lm_eval: {name}", str(name), value)
            for name, value in _table(f"{path}: benchmarks: lm_eval", harness).items()
        )
        if not scenarios:
            raise UsageError(f"{path}: benchmarks: lm_eval: is empty, expected at least one scenario")
        tokenizer = _member(str(path), content, "tokenizer", str, "")
        return cls(
            scenarios,
            path.parent / _member(str(path), content, "task_path", str, "."),
            str(path.parent / tokenizer) if tokenizer else "",
            _member(str(path), content, "run_hf_baseline", bool, True),
        )

    def require_local_tasks(self) -> None:
        """Refuse tasks whose data do not lie in files beside them: nothing is downloaded.

        Raises:
            UsageError: A task has no YAML file in the folder, or other data.
            ReadError: A file is no YAML.
        """
        known = {}
        for path in sorted((*self.task_path.rglob("*.yaml"), *self.task_path.rglob("*.yml"))):
            content = read_yaml(path)
            if isinstance(content.get("task"), str):
                known[content["task"]] = (path, content)
        for name in (task for scenario in self.scenarios for task in scenario.tasks):
            if name not in known:
                listed = ", ".join(known) or "none"
                raise UsageError(f"{self.task_path}: no task {name!r}, found {listed}")
            path, content = known[name]
            source = content.get("dataset_path")
            is_local = source in _BUILDERS or (isinstance(source, str) and (path.parent / source).exists())
            if not is_local:
                raise UsageError(
                    f"{path}: dataset_path: found {source!r}, expected files, read by one of "
                    f"{', '.join(_BUILDERS)}",
                    hint="Nothing is downloaded: name your files in dataset_kwargs: data_files.",
                )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of one mapping; tags such as `!function` stay unread.

    Raises:
        ReadError: It cannot be read, or is no YAML.
        MissingPackageError: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise missing_package("stage 7", "yaml", extra="downstream") from error

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda _, suffix, node: f"!{suffix}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), loader)
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ReadError(f"{path}: is no YAML: {abbreviate(reason)}") from error
    return _table(str(path), content)


def _scenario(where: str, name: str, value: object) -> Scenario:
    members = _table(where, value, _SCENARIO)
    tasks = members.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise UsageError(f"{where}: tasks: found {abbreviate(repr(tasks))}, expected names of tasks")
    limit = members.get("limit", LIMIT)
    shots = members.get("num_fewshot")
    for member, number, least in (("limit", limit, 1), ("num_fewshot", shots, 0)):
        is_whole = isinstance(number, int) and not isinstance(number, bool) and number >= least
        if number is not None and not is_whole:
            raise UsageError(
                f"{where}: {member}: found {abbreviate(repr(number))}, expected a number of at least {least}"
            )
    return Scenario(name, tuple(tasks), limit, _member(where, members, "use_chat", bool, False), shots)


def _table(where: str, value: object, known: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: found {abbreviate(repr(value))}, expected a mapping")
    if known:
        _refuse_unknown(where, value, known)
    return value


def _member(where: str, values: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = values.get(name, default)
    if not isinstance(value, kind):
        expected = {str: "a text", bool: "true or false"}[kind]
        raise UsageError(f"{where}: {name}: found {abbreviate(repr(value))}, expected {expected}")
    return value


def _refuse_unknown(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise UsageError(f"{where}: found {abbreviate(repr(name))}, expected one of {', '.join(known)}")
