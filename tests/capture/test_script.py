"""Anybody's script under capture, by `tcap capture script`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.session import ScriptRun, program
from tensorcap.workload import Script
from tensorcap_formats.errors import CaptureError, UsageError, WriteError

ROOT = Path(__file__).parents[2]
HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
class Draft(Net):
    pass
X = torch.ones(1, 2)
torch.set_grad_enabled(False)
"""


@pytest.fixture(autouse=True)
def _gradients_as_before() -> Iterator[None]:
    with torch.no_grad():  # sets back what a script sets
        yield


def written(folder: Path, code: str, name: str = "script.py", *, head: str = HEAD) -> Path:
    file = folder / name
    file.write_text(head + textwrap.dedent(code), encoding="utf-8")
    return file


def run(folder: Path, code: str, *arguments: str, root: str | None = None, **options: Any) -> ScriptRun:
    """Run a script in this process."""
    file = written(folder, code)
    return ScriptRun(Script(str(file), arguments), folder / "ref.h5", root=root, **options).run()


def tcap(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tensorcap_cli", "capture", "script", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def meta(path: Path) -> dict[str, Any]:
    with tensorcap.open_archive(path) as archive:
        return {**archive.run, "is_complete": archive.is_complete}


def keys(path: Path) -> list[str]:
    with tensorcap.open_archive(path) as archive:
        return [r.key.text for r in archive.records]


def load(path: Path, key: str) -> torch.Tensor:
    with tensorcap.open_archive(path) as archive:
        return torch.from_numpy(archive.load(archive.get(key)).copy())


GENERATE = """
import argparse
import importlib.util
import os
import sys
import warnings
from importlib.util import find_spec
import __main__

assert importlib.util.find_spec("torch") and find_spec("torch"), "as transformers asks"
assert "torch" not in sys.modules, "imported before the script has set its environment"
parser = argparse.ArgumentParser()
parser.add_argument("prompt", type=int, nargs="+")
parser.add_argument("--output", "-o")
parser.add_argument("--json", action="store_true")
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from beside import RERANKER


def build(layers, seed):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=40, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    model = build(2, 0)
    prompt = torch.tensor([args.prompt])
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.steps, do_sample=False
    )
    with torch.no_grad():
        score = RERANKER(ids.float())
    print(ids.tolist(), f"{score.item():.6f}", args.output, args.json)
    print(__file__ == os.path.abspath(sys.argv[0]))
    print(__main__.build is build, file=sys.stderr)
    warnings.warn("as Python shows it")
"""
BESIDE = """
import torch
from torch import nn
torch.manual_seed(1)
class Reranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 1)
    def forward(self, ids):
        return self.head(ids)
RERANKER = Reranker().eval()
"""


@pytest.mark.spec("CAP-90", "CAP-91", "CAP-92")
def test_a_script_with_argparse_two_models_and_a_generate_loop_is_captured_unchanged(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    written(work, BESIDE, "beside.py", head="")
    file = written(work, GENERATE, "generate.py", head="")
    text = file.read_bytes()
    own = ["work/generate.py", "3", "1", "4", "--steps", "3", "-o", "x.h5", "--json"]
    # Where MAX was imported, what a child inherits is no longer what os.environ says.
    plain = subprocess.run(
        [sys.executable, *own],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    done = tcap(tmp_path, "-o", "ref.h5", "--no-inputs", "--", *own)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert plain.stdout.endswith("x.h5 True\nTrue\n")
    assert "also called, not captured: Reranker (1 call); see --root" in done.stderr
    assert "True\n" in done.stderr
    warned = re.search(r".*generate\.py:\d+: UserWarning: as Python shows it\n.*\n", plain.stderr)
    assert warned is not None
    assert warned[0] in done.stderr
    assert file.read_bytes() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ref.h5", "work"]
    found = meta(tmp_path / "ref.h5")
    assert found["is_complete"] is True
    assert found["command"] == ["generate.py", *own[1:]]
    assert found["script"] == {
        "file": "work/generate.py",
        "arguments": own[1:],
        "also_called": {"Reranker": 1},
    }
    assert found["steps"] == 3
    # greedy choices of the archive are the tokens that the script printed
    tokens = json.loads(plain.stdout.partition("]]")[0] + "]]")[0][3:]
    logits = [load(tmp_path / "ref.h5", f"{i}/@root/output.logits") for i in range(3)]
    assert [int(step[0, -1].argmax()) for step in logits] == tokens
    names = {key.split("/")[1] for key in keys(tmp_path / "ref.h5")}
    assert {"model.layers.1.mlp.down_proj", "model.embed_tokens", "lm_head"} <= names


PIPELINE = """
import sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
words = {word: i for i, word in enumerate("<unk> the sky is blue and so on".split())}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
config = LlamaConfig(num_hidden_layers=1, vocab_size=8, eos_token_id=None, bos_token_id=None, **sizes)
LlamaForCausalLM(config).eval().save_pretrained(sys.argv[1])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")
tokenizer.save_pretrained(sys.argv[1])
generate = pipeline("text-generation", model=sys.argv[1], device="cpu")
print(generate("the sky is", max_new_tokens=2, do_sample=False, return_tensors=True)[0])
"""


def test_a_pipeline_of_transformers_is_captured(tmp_path: Path) -> None:
    written(tmp_path, PIPELINE, "pipe.py", head="")
    done = tcap(tmp_path, "-o", "ref.h5", "--", "pipe.py", "model")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "ref.h5", "0/@root/input.input_ids").tolist() == [[1, 2, 3]]
    logits = [load(tmp_path / "ref.h5", f"{i}/@root/output.logits") for i in (0, 1)]
    ids = [1, 2, 3, *(int(step[0, -1].argmax()) for step in logits)]
    assert done.stdout == f"{{'generated_token_ids': {ids}}}\n"


@pytest.mark.spec("CAP-90")
def test_a_module_is_run_as_python_does_it(tmp_path: Path) -> None:
    package = tmp_path / "bench"
    package.mkdir()
    (package / "__init__.py").write_text("")
    written(package, "net = Net()", "nets.py")
    code = """
    import sys
    from .nets import X, net
    print(__name__, __package__, __spec__.name, sys.argv[0] == __file__, sys.argv[1:])
    net(X)
    """
    written(package, code, "__main__.py", head="")
    done = tcap(tmp_path, "-o", "ref.h5", "--", "-m", "bench", "--root", "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ bench bench.__main__ True ['--root', 'a']\n"
    assert meta(tmp_path / "ref.h5")["script"]["module"] == "bench"


@pytest.mark.spec("CAP-91")
def test_the_first_model_is_captured_and_one_without_parameters_is_none(tmp_path: Path) -> None:
    done = run(tmp_path, "x = nn.Softmax(-1)(X)\nNet()(x)\nDraft()(x)\nDraft()(x)\nnn.ReLU()(x)\n")
    assert meta(tmp_path / "ref.h5")["model"]["class"] == "__main__.Net"
    assert {r.name: r.calls for r in done.others} == {"Softmax": 1, "Draft": 1, "Draft@1": 1, "ReLU": 1}
    assert "class Net" in meta(tmp_path / "ref.h5")["sources"]["__main__.Net"]["text"]


@pytest.mark.spec("CAP-91")
@pytest.mark.parametrize(
    ("root", "expected"),
    [
        pytest.param("Draft", "0.5", id="class"),
        pytest.param("__main__.Dr*", "0.5", id="qualified-glob"),
        pytest.param("Draft@1", "0.25", id="second-of-its-class"),
        pytest.param("*t@2", "0.25", id="third-that-fits"),
    ],
)
def test_a_root_is_chosen_by_its_class(tmp_path: Path, root: str, expected: str) -> None:
    code = "a, b, c = Net(), Draft(), Draft()\nfor n, m in enumerate((a, b, c)): m(X * 0.5 ** n)\n"
    done = run(tmp_path, code, root=root)
    assert done.trouble is None
    assert load(tmp_path / "ref.h5", "0/@root/input.x").tolist() == [[float(expected)] * 2]


@pytest.mark.spec("CAP-91")
def test_a_part_that_is_called_from_outside_leads_to_the_whole_model(tmp_path: Path) -> None:
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Net(), Net()
        def encode(self, x):
            return self.encoder(x)
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
    model = Model()
    wrapper = Wrapper(model)
    model.decoder.first(model.encode(X))
    """
    done = run(tmp_path, code)
    assert keys(tmp_path / "ref.h5")[0] == "0/encoder/input.x"
    assert keys(tmp_path / "ref.h5")[-1] == "0/decoder.first/output"
    assert meta(tmp_path / "ref.h5")["model"]["class"] == "__main__.Model"
    assert not done.others


def test_a_model_in_a_mere_wrapper_has_its_own_steps(tmp_path: Path) -> None:
    code = """
    class Wrapper(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
    net = Net()
    wrapper = Wrapper(net)
    net(X)
    net(X)
    """
    run(tmp_path, code)
    assert meta(tmp_path / "ref.h5")["model"]["class"] == "__main__.Net"
    assert meta(tmp_path / "ref.h5")["steps"] == 2


@pytest.mark.parametrize("call", ["self.base(x)", "self.base.forward(x)"], ids=["call", "forward"])
def test_a_root_may_be_called_within_another_model(tmp_path: Path, call: str) -> None:
    code = f"""
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, nn.Linear(2, 2)
        def forward(self, x):
            return {call} + self.more(x)
    adapted = Adapted(Net())
    adapted(X)
    adapted(X)
    """
    done = run(tmp_path, code, root="Net")
    assert {key.split("/")[1] for key in keys(tmp_path / "ref.h5")} == {"@root", "first", "second"}
    assert meta(tmp_path / "ref.h5")["steps"] == 2
    assert {r.name: r.calls for r in done.others} == {"Adapted": 2}


@pytest.mark.spec("CAP-91")
def test_a_script_that_calls_forward_alone_has_its_steps(tmp_path: Path) -> None:
    run(tmp_path, "net = Net()\nnet.forward(X)\nnet.forward(X * 2)\n")
    assert meta(tmp_path / "ref.h5")["steps"] == 2
    assert load(tmp_path / "ref.h5", "1/@root/input.x").tolist() == [[2.0, 2.0]]
    assert keys(tmp_path / "ref.h5")[0] == "0/@root/input.x"


def test_nothing_is_left_of_it_in_torch(tmp_path: Path) -> None:
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__init__", "__setstate__")}
    linear, script, leave = nn.Linear.forward, torch.jit._recursive.create_script_module, os._exit
    arguments, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    run(tmp_path, "Net()(X)\nraise ZeroDivisionError\n")
    assert {name: vars(nn.Module)[name] for name in before} == before
    assert nn.Linear.forward is linear
    assert torch.jit._recursive.create_script_module is script
    assert os._exit is leave
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (arguments, path, main)


def test_every_file_whose_frames_are_left_out_of_tracebacks_exists() -> None:
    assert [path for path in program._OURS if not Path(path).is_file()] == []


@pytest.mark.spec("CAP-93")
def test_an_error_of_the_script_is_shown_as_python_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
    def inner(net):
        net(X)
        raise ValueError("no good")
    if __name__ == "__main__":
        inner(Net())
    """
    done = run(tmp_path, code)
    file = tmp_path / "script.py"
    shown = re.sub(r"\n +[\^~]+(?=\n)", "", capsys.readouterr().err)
    assert shown == (
        "Traceback (most recent call last):\n"
        f'  File "{file}", line 20, in <module>\n'
        "    inner(Net())\n"
        f'  File "{file}", line 18, in inner\n'
        '    raise ValueError("no good")\n'
        "ValueError: no good\n"
    )
    assert done.status == 1
    found = meta(tmp_path / "ref.h5")
    assert found["is_complete"] is False
    assert (found["error"]["type"], found["error"]["message"]) == ("ValueError", "no good")


def test_an_error_inside_the_model_shows_no_frame_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, "net = Net()\nnet(X)\nnet.forward(torch.ones(1, 3))\n")
    shown = capsys.readouterr().err
    assert "mat1 and mat2 shapes cannot be multiplied" in shown
    assert "_torch_direct" not in shown
    assert "_torch_roots" not in shown
    assert "scripting.py" not in shown
    assert done.status == 1
    assert meta(tmp_path / "ref.h5")["is_complete"] is False


@pytest.mark.spec("CAP-93")
@pytest.mark.parametrize(
    ("end", "status", "is_complete", "shown"),
    [
        pytest.param("", 0, True, "", id="end"),
        pytest.param("sys.exit()", 0, True, "", id="exit"),
        pytest.param("sys.exit(0)", 0, True, "", id="exit-0"),
        pytest.param("sys.exit(3)", 3, False, "", id="exit-3"),
        pytest.param("sys.exit('no luck')", 1, False, "no luck\n", id="exit-text"),
    ],
)
def test_the_exit_status_of_a_script_is_passed_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    end: str,
    status: int,
    is_complete: bool,
    shown: str,
) -> None:
    done = run(tmp_path, f"import sys\nNet()(X)\n{end}\n")
    assert (done.status, done.trouble) == (status, None)
    assert meta(tmp_path / "ref.h5")["is_complete"] is is_complete
    assert capsys.readouterr().err == shown


@pytest.mark.spec("CAP-93")
@pytest.mark.parametrize(
    ("end", "status", "is_complete"),
    [
        pytest.param("os._exit(7)", 7, False, id="at-once"),
        pytest.param(  # a shell has what it runs in the background ignore the signal
            "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
            130,
            False,
            id="interrupted",
        ),
        pytest.param(
            "os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(5)'])", 5, True, id="replaced"
        ),
    ],
)
def test_the_archive_is_finished_however_the_process_ends(
    tmp_path: Path, end: str, status: int, is_complete: bool
) -> None:
    code = f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\nNet()(X)\n{end}\n"
    written(tmp_path, code)
    done = tcap(tmp_path, "-o", "ref.h5", "--", "script.py")
    assert done.returncode == status, done.stderr
    assert meta(tmp_path / "ref.h5")["is_complete"] is is_complete
    assert str(tmp_path / "ref.h5") in done.stderr
    assert done.stdout == ("at exit\n" if status == 130 else "")


@pytest.mark.spec("CAP-93")
def test_what_a_script_forks_records_nothing_and_ends_as_it_would(tmp_path: Path) -> None:
    code = """
    import multiprocessing, os, sys
    net = Net()
    def work(n):
        net(X)
        return n + 1
    if __name__ == "__main__":
        net(X)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, [1, 2, 3]))
        child = os.fork()
        if not child:
            net(X)
            sys.exit(4)  # to its end, as the parent
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        child = os.fork()
        if not child:
            os._exit(6)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        net(X)
    """
    written(tmp_path, code)
    done = tcap(tmp_path, "-o", "ref.h5", "--", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 3, 4]\n4\n6\n"
    assert meta(tmp_path / "ref.h5")["steps"] == 2
    assert done.stderr.count("ref.h5:") == 1


def test_processes_that_are_spawned_find_the_script(tmp_path: Path) -> None:
    code = """
    import multiprocessing
    def work(n):
        return n + 1
    if __name__ == "__main__":
        Net()(X)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [1]))
    """
    written(tmp_path, code)
    done = tcap(tmp_path, "-o", "ref.h5", "--", "script.py")
    assert (done.returncode, done.stdout) == (0, "[2]\n"), done.stderr


def test_a_script_may_go_elsewhere_close_its_output_and_leave_a_thread_at_work(tmp_path: Path) -> None:
    code = """
    import os, sys, threading, time
    net, place = Net(), os.getcwd()
    def late():
        time.sleep(0.2)
        net(X * 2)
        sys.exit(9)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    net(X)
    threading.Thread(target=late).start()
    sys.stdout.close()
    sys.stderr.close()
    """
    written(tmp_path, code)
    done = tcap(tmp_path, "-o", "ref.h5", "--json", "--", "script.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert meta(tmp_path / "ref.h5")["steps"] == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_pool_that_is_left_open_holds_nothing_up(tmp_path: Path) -> None:
    code = """
    import __main__
    from concurrent.futures import ThreadPoolExecutor
    __main__.pool = ThreadPoolExecutor(1)
    __main__.pool.submit(Net(), X).result()
    """
    done = run(tmp_path, code)
    pool = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert len(pool) == 1
    assert done.trouble is None


def test_a_model_that_is_first_called_in_a_thread_is_captured(tmp_path: Path) -> None:
    code = """
    import threading
    net = Net()
    thread = threading.Thread(target=net, args=(X,))
    thread.start()
    thread.join()
    """
    for level in ("module", "op"):
        done = run(tmp_path, code, level=level)
        assert done.trouble is None
        assert done.error is None
        assert meta(tmp_path / "ref.h5")["steps"] == 1


@pytest.mark.spec("CAP-92")
def test_ops_are_those_of_the_calls_of_the_model_alone(tmp_path: Path) -> None:
    code = """
    from torch.utils.flop_counter import FlopCounterMode
    net, draft = Net(), Draft()
    with FlopCounterMode(display=False) as flops:  # entered before ours, left while ours would be on
        net(X)
    count = flops.get_total_flops()
    draft(X) + 1
    net(X)
    assert count == flops.get_total_flops() == 16, flops.get_total_flops()
    """
    done = run(tmp_path, code, level="op")
    assert done.error is None
    ops = [key for key in keys(tmp_path / "ref.h5") if ":" in key and key.endswith("/output")]
    names = ["first:aten.addmm.default", "@root:aten.relu.default", "second:aten.addmm.default"]
    assert ops == [f"{step}/{name}/output" for step in (0, 1) for name in names]


def test_a_script_that_removes_the_folder_of_the_archive_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = written(tmp_path, f"import shutil\nNet()(X)\nshutil.rmtree({str(tmp_path / 'out')!r})\n")
    done = ScriptRun(Script(str(file)), tmp_path / "out" / "ref.h5").run()
    assert done.status == 0
    assert done.trouble is not None
    assert str(tmp_path / "out" / "ref.h5") in str(done.trouble)


@pytest.mark.parametrize(
    ("code", "root", "message", "hint"),
    [
        pytest.param(
            "print()",
            None,
            "called no model in this process",
            "What it runs in other processes is not seen.",
            id="none",
        ),
        pytest.param(
            "nn.Softmax(-1)(X)",
            None,
            "called no model that has parameters and is not scripted, but Softmax (1 call)",
            "If that is the model: --root Softmax",
            id="no-parameters",
        ),
        pytest.param(
            "n = Net(); n(X); n(X)",
            "Nut",
            "no model 'Nut' was called, but Net (2 calls)",
            "Did you mean 'Net'?",
            id="other",
        ),
    ],
)
def test_a_script_that_calls_no_such_model_is_told_what_it_called(
    tmp_path: Path, code: str, root: str | None, message: str, hint: str
) -> None:
    done = run(tmp_path, code, root=root)
    assert isinstance(done.trouble, CaptureError)
    assert str(done.trouble) == f"{tmp_path / 'script.py'}: {message}"
    assert done.trouble.hint == hint
    assert not (tmp_path / "ref.h5").exists()


@pytest.mark.spec("CAP-95")
def test_an_option_that_does_not_fit_the_model_ends_the_script(tmp_path: Path) -> None:
    written(tmp_path, "try:\n    Net()(X)\nexcept Exception: pass\nprint('went on')\n")
    done = tcap(tmp_path, "-o", "ref.h5", "--only", "frist", "--", "script.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no module matches 'frist'" in done.stderr
    assert "Did you mean 'first'?" in done.stderr


@pytest.mark.spec("CAP-95")
@pytest.mark.parametrize("is_first", [True, False], ids=["script-first", "ours-first"])
def test_a_script_that_captures_the_same_model_is_told_so(
    tmp_path: Path, is_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    call = "" if is_first else "net(X)"
    code = f"""
    import tensorcap
    net = Net()
    {call}
    with tensorcap.capture(net, {str(tmp_path / "own.h5")!r}):
        net(X)
    """
    done = run(tmp_path, code)
    told = str(done.trouble) if is_first else capsys.readouterr().err
    assert "Net: is under capture already" in told
    error = done.trouble if is_first else done.error
    assert isinstance(error, UsageError)
    assert error.hint == "End that capture first; a script under `tcap capture script` has none of its own."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["scirpt.py"], "scirpt.py: there is no such script", id="missing"),
        pytest.param(["."], ".: is a folder, expected a Python file", id="folder"),
        pytest.param(["binary.py"], "binary.py: is no Python", id="binary"),
        pytest.param(["broken.py"], "broken.py: is no Python in line 2: invalid syntax", id="syntax"),
        pytest.param(["-m", "bnech.run"], "-m bnech.run: there is no such module", id="no-package"),
        pytest.param(["-m", "bench.rnu"], "-m bench.rnu: there is no such module", id="no-module"),
        pytest.param(
            ["-m", "bench"], "-m bench: a package without __main__, expected a module", id="package"
        ),
        pytest.param(["-m", "script.py"], "-m script.py: is a file, expected a module's name", id="file-m"),
        pytest.param([], "script to capture: found none, expected a file or -m MODULE", id="nothing"),
        pytest.param(
            ["--lr", "1"], "script to capture: found '--lr', expected a file or -m MODULE", id="option"
        ),
    ],
)
def test_what_is_no_script_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    written(tmp_path, "raise AssertionError")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\x00")
    (tmp_path / "broken.py").write_text("x = 1\nif if\n")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("")
    (tmp_path / "bench" / "run.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        ScriptRun(Script.parse(arguments), tmp_path / "ref.h5").run()
    assert str(caught.value).startswith(message)
    near = {"scirpt.py": "'script.py'", "bench.rnu": "'bench.run'", "bnech.run": None}
    if near.get(arguments[-1] if arguments else ""):
        assert caught.value.hint == f"Did you mean {near[arguments[-1]]}?"
    sys.modules.pop("bench", None)


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        pytest.param("out/ref.h5", {}, WriteError, "there is no folder", id="folder"),
        pytest.param("ref.txt", {}, UsageError, "ref.txt", id="suffix"),
        pytest.param("ref.h5", {"steps": "5-x"}, UsageError, "5-x", id="steps"),
        pytest.param("ref.h5", {"slices": ["["]}, UsageError, "slice", id="slice"),
    ],
)
def test_options_that_fit_no_model_are_refused_before_anything_runs(
    tmp_path: Path, path: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    file = written(tmp_path, "raise AssertionError")
    with pytest.raises(error, match=message):
        ScriptRun(Script(str(file)), tmp_path / path, **options).run()
    assert [p.name for p in tmp_path.iterdir()] == ["script.py"]


def test_a_script_that_fails_before_it_calls_a_model_leaves_the_archive_before(tmp_path: Path) -> None:
    run(tmp_path, "Net()(X)\n")
    before = (tmp_path / "ref.h5").read_bytes()
    done = run(tmp_path, "raise ZeroDivisionError\n")
    assert (done.status, done.trouble, done.capture) == (1, None, None)
    assert (tmp_path / "ref.h5").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ref.h5", "script.py"]


def test_without_a_framework_the_command_says_what_to_install(tmp_path: Path) -> None:
    written(tmp_path, "", head="")
    code = (
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('max', 'torch') else real(name, *a)\n"
        "from tensorcap_cli.main import main\n"
        "main(['capture', 'script', '-o', 'ref.h5', '--', 'script.py'])\n"
    )
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs the package 'torch', which is not installed" in done.stderr


@pytest.mark.spec("CAP-96")
def test_a_model_that_only_a_block_has_is_captured(tmp_path: Path) -> None:
    def somebody_elses() -> None:
        nn.ReLU()(torch.ones(2))  # has no parameters
        nn.Sequential(nn.Linear(2, 2), nn.ReLU())(torch.ones(1, 2))

    with tensorcap.capture_called(tmp_path / "a.h5") as called:
        somebody_elses()
    assert called.capture is not None
    assert called.capture.summary is not None
    assert called.capture.summary.captured == ("@root", "0", "1")
    assert [root.name for root in called.roots] == ["ReLU", "Sequential"]


@pytest.mark.spec("CAP-96")
def test_an_error_in_the_block_leaves_an_incomplete_archive(tmp_path: Path) -> None:
    def somebody_elses() -> None:
        nn.Linear(2, 2)(torch.ones(1, 2))
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"), tensorcap.capture_called(tmp_path / "a.h5"):
        somebody_elses()
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        assert not archive.is_complete


@pytest.mark.spec("CAP-96")
def test_a_block_that_calls_no_model_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match="no torch model with parameters was called in the block"),
        tensorcap.capture_called(tmp_path / "a.h5"),
    ):
        torch.ones(2)
    assert not (tmp_path / "a.h5").exists()
