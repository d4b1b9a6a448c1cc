"""Stage 7: its configuration and its gate; and ten rows of a task that lm-eval really runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tensorcap.equivalence import compare_scores
from tensorcap.equivalence.bench_config import BenchConfig, Scenario
from tensorcap.equivalence.downstream import Score, read_scores, scores_json
from tensorcap_formats.errors import ReadError, UsageError

ROOT = Path(__file__).parents[2]
BENCH = """
benchmarks:
  lm_eval:
    accuracy: {tasks: [counting], limit: 10}
    chat: {tasks: [counting], limit: 5, use_chat: true}
    answers: {tasks: [answering], limit: null, num_fewshot: 1}
task_path: tasks
"""
TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
fewshot_split: test
doc_to_text: "{{question}}"
"""
COUNTING = f"""
task: counting
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
{TASK}"""
ANSWERING = f"""
task: answering
output_type: generate_until
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: [" "], max_gen_toks: 1}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
{TASK}"""
PORTS = """
import math
import pathlib

import torch
from transformers import LlamaForCausalLM

import tensorcap

FOLDER = pathlib.Path(__file__).parent / "llama"


def port(change=lambda model: None):
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    change(model)
    return tensorcap.Workload(model, {"input_ids": torch.arange(3, 9)[None], "use_cache": False})


def right():
    return port()


def wrong():
    return port(lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.data.roll(1, 0)))


def nan():
    return port(lambda model: model.lm_head.weight.data.fill_(math.nan))
"""
RUNS = """
import json
import pathlib

from tensorcap.equivalence import Experiment, run_stage, stage_named

stage = stage_named("downstream")
results = []
for name in ("right", "wrong", "nan", "no baseline"):
    experiment = Experiment.open("exp")
    if name == "no baseline":
        name = "right"
        path = pathlib.Path("exp/bench_config.yaml")
        path.write_text(path.read_text() + "run_hf_baseline: false\\n")
    state = run_stage(experiment.changed({"parameters.target_causal_class": name}), stage)
    source = pathlib.Path("exp/results/stage7/source.json").stat().st_mtime_ns
    results.append([state.exit_status, state.state, state.result.words, source])
print(json.dumps(results))
"""


def bench(folder: Path, text: str) -> Path:
    path = folder / "bench_config.yaml"
    path.write_text(text)
    return path


@pytest.mark.spec("EQL-40")
def test_one_file_says_what_both_sides_run(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = BenchConfig.read(bench(tmp_path, f"{BENCH}run_hf_baseline: false\ntokenizer: llama\n"))
    assert config.scenarios == (
        Scenario("accuracy", ("counting",), 10),
        Scenario("chat", ("counting",), 5, use_chat=True),
        Scenario("answers", ("answering",), None, num_fewshot=1),
    )
    assert (config.task_path, config.tokenizer) == (tmp_path / "tasks", str(tmp_path / "llama"))
    assert not config.runs_source
    short = BenchConfig.read(bench(tmp_path, "benchmarks: {lm_eval: {a: {tasks: [b]}}}"))
    assert (short.scenarios[0].limit, short.runs_source) == (200, True)


@pytest.mark.spec("EQL-40")
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        pytest.param("a: [", ReadError, "is no YAML", id="no YAML"),
        pytest.param("- a", UsageError, "expected a mapping", id="list"),
        pytest.param(
            "tolerance: 0.5", UsageError, "found 'tolerance', expected one of benchmarks", id="tolerance"
        ),
        pytest.param("benchmarks: {lm_eval: {}}", UsageError, "expected at least one scenario", id="empty"),
        pytest.param(
            "benchmarks: {lm_eval: {a: {tasks: []}}}",
            UsageError,
            "a: tasks: found \\[\\], expected names",
            id="tasks",
        ),
        pytest.param(
            "benchmarks: {lm_eval: {a: {tasks: [b], limit: 0}}}",
            UsageError,
            "a: limit: found 0, expected a number of at least 1",
            id="limit",
        ),
        pytest.param(
            "benchmarks: {lm_eval: {a: {tasks: [b], use_chat: 3}}}",
            UsageError,
            "a: use_chat: found 3, expected true or false",
            id="chat",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(error, match=message):
        BenchConfig.read(bench(tmp_path, text))


@pytest.mark.spec("EQL-41")
def test_tasks_with_data_elsewhere_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = BenchConfig.read(bench(tmp_path, BENCH))
    (tmp_path / "tasks").mkdir()
    with pytest.raises(UsageError, match="no task 'counting', found none"):
        config.require_local_tasks()
    (tmp_path / "tasks" / "a.yaml").write_text(COUNTING + "process_docs: !function utils.docs\n")
    (tmp_path / "tasks" / "b.yaml").write_text(
        ANSWERING.replace("dataset_path: json", "dataset_path: cais/mmlu")
    )
    with pytest.raises(
        UsageError, match=r"b\.yaml: dataset_path: found 'cais/mmlu', expected files"
    ) as error:
        config.require_local_tasks()
    assert error.value.hint == "Nothing is downloaded: name your files in dataset_kwargs: data_files."
    (tmp_path / "tasks" / "b.yaml").write_text(ANSWERING)
    config.require_local_tasks()


def score(value: float, metric: str = "acc,none", rows: int = 100, *, higher: bool = True) -> Score:
    return Score("accuracy", "counting", metric, value, rows, higher)


@pytest.mark.spec("EQL-42")
@pytest.mark.parametrize(
    ("source", "target", "passed"),
    [
        (0.60, 0.58, True),
        (0.60, 0.57, False),
        (0.60, 0.75, True),
        (0.60, math.nan, False),
        (math.nan, 0.6, None),
    ],
)
def test_a_score_may_be_two_points_worse(source: float, target: float, passed: bool | None) -> None:
    # 0.60 - 0.58 is a little more than 0.02 in binary
    result = compare_scores([score(source)], [score(target)])
    assert result.passed is passed


@pytest.mark.spec("EQL-42")
def test_what_is_no_share_decides_nothing() -> None:
    result = compare_scores(
        [score(12.5, "word_perplexity,none", higher=False)], [score(99.0, "word_perplexity,none")]
    )
    assert result.passed is None
    assert result.words[1].endswith("no share of 1, which decides nothing.")


@pytest.mark.spec("EQL-42")
def test_answers_without_numbers_fail_whatever_the_scores_are() -> None:
    result = compare_scores([score(0.6)], [score(0.6)], undefined=3)
    assert result.passed is False
    assert result.words[0] == "Of 3 answers the target's logits are no finite numbers."


@pytest.mark.spec("EQL-42")
def test_a_row_that_weighs_more_than_the_tolerance_is_told() -> None:
    result = compare_scores([score(0.6, rows=10)], [score(0.5, rows=10)])
    assert result.words[1] == (
        "accuracy, counting, acc,none: source 0.6, target 0.5: failed; of 10 rows one is 0.1."
    )


@pytest.mark.spec("EQL-43")
def test_without_a_baseline_nothing_is_decided() -> None:
    result = compare_scores(None, [score(0.1)])
    assert result.passed is None
    assert result.words[0] == "The source was not run, and no scores of it are kept: nothing is decided."
    assert result.to_json()["lm_eval_hf"] is None
    with pytest.raises(UsageError, match="unlike tasks"):
        compare_scores([score(0.1, "f1,none")], [score(0.1)])


def test_scores_are_read_as_they_were_written() -> None:
    scores = [score(0.6), score(3.5, "ppl,none", higher=False)]
    assert read_scores("a.json", json.loads(json.dumps(scores_json(scores)))) == tuple(scores)
    spoiled: list[Any] = [None, [{}], [{**scores_json(scores)[0], "rows": "10"}]]
    for entries in spoiled:
        with pytest.raises(UsageError, match=r"a\.json: holds no scores of stage 7"):
            read_scores("a.json", entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer, ports of it, and ten rows whose answer is the model's own choice."""
    words = {word: number for number, word in enumerate(["<s>", "</s>", *map(str, range(62))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast_class: Any = PreTrainedTokenizerFast
    fast = fast_class(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    exp = tmp_path / "exp"
    (exp / "tasks").mkdir(parents=True)
    fast.save_pretrained(exp / "llama")
    model.save_pretrained(exp / "llama")
    rows: list[dict[str, Any]] = []
    first = 2
    while len(rows) < 10:
        first += 1
        numbers = [first, first + 7, first + 2]
        with torch.no_grad():
            order = model(torch.tensor([[n + 2 for n in numbers]])).logits[0, -1].argsort().tolist()
        if order[-1] < 2:
            continue
        choices = [str(order[-1] - 2), str(next(token for token in order[32:] if token > 1) - 2)]
        rows.append({"question": " ".join(map(str, numbers)), "choices": choices, "answer": 0})
    (exp / "tasks" / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (exp / "tasks" / "counting.yaml").write_text(COUNTING)
    (exp / "tasks" / "answering.yaml").write_text(ANSWERING)
    (exp / "bench_config.yaml").write_text(BENCH)
    (exp / "port.py").write_text(PORTS)
    (exp / "equivalence.toml").write_text(
        '# Equivalence:\n[parameters]\nsource_model_path = "llama"\ntarget_modeling_file = "port.py"\n'
        'target_causal_class = "right"\n[run]\noptions = {input_ids = "3,4,5"}\n'
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra downstream")
@pytest.mark.spec("EQL-41", "EQL-42", "EQL-43", "EQL-44")
def test_ten_rows_are_run_on_both_sides(folder: Path) -> None:
    paths = os.pathsep.join([*(str(ROOT / part) for part in (".", "formats", "cli")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    right, wrong, nan, again = json.loads(done.stdout)
    assert right[:2] == [0, "passed"]
    assert right[2][1].startswith("accuracy, counting, acc,none: source 1, target 1: passed")
    assert right[2][2].startswith("chat, counting, acc,none: source 1, target 1: passed")
    assert right[2][3].startswith("answers, answering, exact_match,none: source ")
    assert wrong[:2] == [1, "failed"]
    assert "accuracy, counting, acc,none: source 1, target 0." in wrong[2][1]
    assert nan[:2] == [1, "failed"]
    assert "the target's logits are no finite numbers" in nan[2][0]
    assert again[:2] == [0, "passed"]
    assert again[3] == nan[3]  # the source's scores are those of before
