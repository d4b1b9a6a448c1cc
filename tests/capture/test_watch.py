from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorcap
from tensorcap_formats.errors import CaptureError, UsageError
from tests.support.models import Calls

Make = Callable[[str], Any]  # a module, whose attributes mypy does not know

GEMMA = "transformers.models.gemma3.modeling_gemma3"
SCALED = """
    def scaled(x, factor):
        y = x * factor
        y = y + 1
        both = (y, {"neg": -y})
        return both

    class Block(nn.Module):
        def forward(self, x):
            return scaled(x, 2)[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            return scaled(self.second(self.first(x)), 3)[0]
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Make]:
    """Import a text as the module `watched_code`."""

    def make(text: str) -> Any:
        file = tmp_path / "watched_code.py"
        file.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location("watched_code", file)
        assert spec
        assert spec.loader
        made = sys.modules["watched_code"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    yield make
    sys.modules.pop("watched_code", None)


def read(path: Path) -> dict[str, Any]:
    """Every tensor recorded within a module's code, by key."""
    archive = tensorcap.open_archive(path)
    return {r.key.text: archive.read(r).tolist() for r in archive.records if ":" in r.key.site}


def point(path: Path, site: str) -> list[dict[str, Any]]:
    return [entry for entry in tensorcap.open_archive(path).run["points"] if entry["site"] == site]


@pytest.mark.spec("CAP-31")
def test_variables_of_a_function_lie_within_the_module_that_calls_it(path: Path, module: Make) -> None:
    model = module(SCALED).Net()
    x = torch.tensor([1.0, 2.0])
    with tensorcap.capture(model, path, inputs=False, watch="watched_code:scaled:y,both") as cap:
        result = model(x)
    assert result.tolist() == [22, 34]
    assert read(path) == {
        "0/first:scaled/y": [2, 4],
        "0/first:scaled/y:2": [3, 5],
        "0/first:scaled/both.0": [3, 5],
        "0/first:scaled/both.1.neg": [-3, -5],
        "0/first:scaled/return.0": [3, 5],
        "0/first:scaled/return.1.neg": [-3, -5],
        "0/second:scaled/y": [6, 10],
        "0/second:scaled/y:2": [7, 11],
        "0/second:scaled/both.0": [7, 11],
        "0/second:scaled/both.1.neg": [-7, -11],
        "0/second:scaled/return.0": [7, 11],
        "0/second:scaled/return.1.neg": [-7, -11],
        "0/@root:scaled/y": [21, 33],
        "0/@root:scaled/y:2": [22, 34],
        "0/@root:scaled/both.0": [22, 34],
        "0/@root:scaled/both.1.neg": [-22, -34],
        "0/@root:scaled/return.0": [22, 34],
        "0/@root:scaled/return.1.neg": [-22, -34],
    }
    assert cap.summary is not None
    assert cap.summary.functions == ("first:scaled", "second:scaled", "@root:scaled")
    assert point(path, "first:scaled") == [
        {"site": "first:scaled", "status": "captured", "calls": 1, "kind": "function"}
    ]


@pytest.mark.spec("CAP-31")
def test_calls_of_a_function_are_numbered_within_the_step(path: Path, module: Make) -> None:
    code = module("def double(x):\n    y = x * 2\n    return y")
    model = Calls(lambda x: code.double(code.double(x)))
    with tensorcap.capture(model, path, watch="watched_code:double:y"):
        model(torch.ones(1))
        model(torch.ones(1))
    assert read(path) == {
        "0/@root:double/y": [2],
        "0/@root:double/return": [2],
        "0/@root:double@1/y": [4],
        "0/@root:double@1/return": [4],
        "1/@root:double/y": [2],
        "1/@root:double/return": [2],
        "1/@root:double@1/y": [4],
        "1/@root:double@1/return": [4],
    }


@pytest.mark.spec("CAP-31")
def test_a_star_takes_every_variable_that_holds_tensors(path: Path, module: Make) -> None:
    code = module(
        """
        def f(x, n, names=("a", "b")):
            half = x / 2
            pair = [half, n, "text"]
            count = len(pair)
            return half, count
        """
    )
    model = Calls(lambda x: code.f(x, 3))
    with tensorcap.capture(model, path, watch="watched_code:f:*"):
        model(torch.full((1,), 4.0))
    assert read(path) == {
        "0/@root:f/x": [4],
        "0/@root:f/half": [2],
        "0/@root:f/pair.0": [2],
        "0/@root:f/return.0": [2],
    }
    values = tensorcap.open_archive(path).values
    assert {k: v for k, v in values.items() if ":" in k} == {"0/@root:f/return.1": 3}


@pytest.mark.spec("CAP-32")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("y = x + 1", {"y": 2}, id="assignment"),
        pytest.param("y = z = x + 1", {"y": 2, "z": 2}, id="two-targets"),
        pytest.param("y: object = x + 1\nz: int", {"y": 2}, id="annotated"),
        pytest.param("y = x + 0\ny += 1", {"y": 1, "y:2": 2}, id="augmented"),
        pytest.param("y, (z, *w) = x, (x + 1, x + 2)", {"y": 1, "z": 2, "w.0": 3}, id="unpacking"),
        pytest.param("[y, z] = x, -x", {"y": 1, "z": -1}, id="list-target"),
        pytest.param("if (y := x + 1) is not None: pass", {"y": 2}, id="walrus"),
        pytest.param("for y in (x, x + 1):\n    z = y", {"y": 1, "z": 1, "y:2": 2, "z:2": 2}, id="for"),
        pytest.param("for i, y in enumerate([x]): pass", {"y": 1}, id="for-pair"),
        pytest.param("with nullcontext(x + 1) as y: pass", {"y": 2}, id="with"),
        pytest.param("while True:\n    y = x\n    break", {"y": 1}, id="while"),
        pytest.param("try:\n    1 / 0\nexcept ZeroDivisionError:\n    y = x", {"y": 1}, id="except"),
        pytest.param("match [x, -x]:\n    case [y, *z]: pass", {"y": 1, "z.0": -1}, id="match"),
        pytest.param("y = x.clone()\ny[x > 0] = 0", {"y": 1, "y:2": 0}, id="item"),
        pytest.param("y = [x.clone()]\ny[0][...] = 5", {"y.0": 1, "y:2.0": 5}, id="item-of-item"),
        pytest.param("y = x.clone()\ny[...] += 1", {"y": 1, "y:2": 2}, id="augmented-item"),
        pytest.param("y = x.clone()\ny.add_(1).mul_(3)", {"y": 1, "y:2": 6}, id="in-place-method"),
        pytest.param("y = x\ndel y\ny = x + 1", {"y": 1, "y:2": 2}, id="deleted"),
        pytest.param("global y\ny = x + 1", {"y": 2}, id="global"),
        pytest.param("y = 0\ndef g():\n    nonlocal y\n    y = 7\ng()\ny = x + y", {"y:2": 8}, id="cell"),
        pytest.param("y = [z * 2 for z in [x]]", {"y.0": 2}, id="comprehension-is-not-entered"),
        pytest.param("try:\n    return x\nfinally:\n    return -x", {"return:2": -1}, id="return-twice"),
        pytest.param("g = lambda: (z := x)\ny = g()", {"y": 1}, id="lambda-is-not-entered"),
    ],
)
def test_a_variable_is_recorded_after_each_way_to_assign_it(
    path: Path, module: Make, body: str, expected: dict[str, float]
) -> None:
    text = "from contextlib import nullcontext\ndef f(x):\n"
    code = module(text + textwrap.indent(body, "    ") + "\n    return x")
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch="watched_code:f:*") as cap:
        model(torch.tensor(1.0))
    assert cap.summary is not None
    assert cap.summary.is_whole
    archive = tensorcap.open_archive(path)
    found = {r.key.slot: archive.read(r).item() for r in archive.records if r.key.site == "@root:f"}
    assert found == {"x": 1, **expected, "return": 1}


@pytest.mark.spec("CAP-32")
def test_parameters_of_every_kind_are_recorded_on_entry(path: Path, module: Make) -> None:
    code = module(
        """
        class Net(nn.Module):
            def forward(self, a, /, b, *rest, c, **more):
                '''Docstring.'''
                b = b * 10
        """
    )
    one = torch.ones(())
    model = code.Net()
    with tensorcap.capture(model, path, watch="watched_code:Net.forward:a,b,rest,c,more"):
        assert model(one, one * 2, one * 3, one * 4, c=one * 5, d=one * 6) is None
    assert read(path) == {
        "0/@root:Net.forward/a": 1,
        "0/@root:Net.forward/b": 2,
        "0/@root:Net.forward/c": 5,
        "0/@root:Net.forward/rest.0": 3,
        "0/@root:Net.forward/rest.1": 4,
        "0/@root:Net.forward/more.d": 6,
        "0/@root:Net.forward/b:2": 20,
    }
    assert code.Net.forward.__doc__ == "Docstring."
    assert tensorcap.open_archive(path).values["0/@root:Net.forward/return"] is None


@pytest.mark.spec("CAP-32")
def test_what_is_written_in_place_later_does_not_change_what_was_recorded(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x + 1\n    z = y\n    y.zero_()\n    return z")
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch="watched_code:f:y,z"):
        model(torch.ones(1))
    assert read(path) == {
        "0/@root:f/y": [2],
        "0/@root:f/z": [2],
        "0/@root:f/y:2": [0],
        "0/@root:f/return": [0],
    }


@pytest.mark.spec("CAP-34")
def test_a_function_has_its_code_back_after_an_error_and_the_traceback_is_right(
    path: Path, module: Make
) -> None:
    code = module(
        """
        def f(x):
            y = (
                x + 1
            )
            if y.sum() > 0:
                raise ZeroDivisionError("of the user")
            return y
        """
    )
    original = code.f.__code__
    model = Calls(code.f)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        tensorcap.capture(model, path, watch="watched_code:f:y"),
    ):
        model(torch.ones(1))
    assert code.f.__code__ is original
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name, last.line) == ("f", 'raise ZeroDivisionError("of the user")')
    assert read(path) == {"0/@root:f/y": [2]}
    assert point(path, "@root:f")[0]["unfinished"] == 1


@pytest.mark.spec("CAP-34")
def test_code_that_somebody_sets_in_the_block_stays(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x\n    return y\ndef g(x):\n    return x + 1")
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch="watched_code:f:y"):
        model(torch.ones(1))
        code.f.__code__ = code.g.__code__
    assert code.f.__code__ is code.g.__code__


@pytest.mark.spec("CAP-34")
def test_a_call_that_outlives_the_capture_is_not_disturbed(path: Path, module: Make) -> None:
    code = module("def f(x):\n    for i in range(4):\n        y = x + i\n        yield y")
    steps: list[Any] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        steps.append(code.f(x))
        result: torch.Tensor = next(steps[-1])
        return result

    model = Calls(first)
    with tensorcap.capture(model, path, watch="watched_code:f:y"):
        model(torch.ones(1))
    assert [y.item() for y in steps[0]] == [2, 3, 4]
    assert read(path) == {"0/@root:f/y": [1]}
    assert [y.item() for y in code.f(torch.ones(1))] == [1, 2, 3, 4]
    with tensorcap.capture(model, None, watch="watched_code:f:y") as cap:
        model(torch.ones(1))
    before = cap.tally.records_count
    assert [y.item() for y in steps[1]] == [2, 3, 4]
    assert cap.tally.records_count == before


def test_a_function_that_another_module_imported_by_name_is_watched_there(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x + 1\n    return y")
    elsewhere = ModuleType("elsewhere")
    exec("from watched_code import f as renamed\ndef run(x):\n    return renamed(x)", vars(elsewhere))
    model = Calls(elsewhere.run)
    with tensorcap.capture(model, path, watch="watched_code:f:y"):
        model(torch.ones(1))
    assert read(path) == {"0/@root:f/y": [2], "0/@root:f/return": [2]}
    assert code.f.__code__.co_varnames == ("x", "y")


def test_a_function_is_watched_beneath_its_decorators(path: Path, module: Make) -> None:
    code = module(
        """
        import functools

        def wrapping(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                y = "of the wrapper"
                return function(*args, **kwargs)
            return wrapper

        def bare(function):
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)
            return wrapper

        class Base(nn.Module):
            def forward(self, x):
                return x + self.offset

        class Net(Base):
            offset = 1

            @wrapping
            @torch.no_grad()
            @bare
            def forward(self, x):
                __hidden = x * self.__factor
                y = super().forward(__hidden)
                return self.doubled(y) - self.one

            __factor = 10

            @property
            def one(self):
                number = torch.ones(1)
                return number

            @staticmethod
            @functools.lru_cache
            def doubled(y):
                z = y * 2
                return z
        """
    )
    model = code.Net()
    watch = [f"watched_code:Net.{text}" for text in ("forward:y,__hidden", "doubled:z", "one:number")]
    with tensorcap.capture(model, path, watch=watch):
        assert model(torch.ones(1)).tolist() == [21]
    assert read(path) == {
        "0/@root:Net.forward/__hidden": [10],
        "0/@root:Net.forward/y": [11],
        "0/@root:Net.doubled/z": [22],
        "0/@root:Net.doubled/return": [22],
        "0/@root:Net.one/number": [1],
        "0/@root:Net.one/return": [1],
        "0/@root:Net.forward/return": [21],
    }


def test_a_function_of_the_main_script_and_of_a_file_are_watched(
    path: Path, module: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = module("def f(x):\n    y = x + 1\n    z = y\n    return z")
    monkeypatch.setitem(sys.modules, "__main__", code)
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch=["__main__:f:y", f"{code.__file__}:f:z"]):
        model(torch.ones(1))
    assert read(path) == {"0/@root:f/y": [2], "0/@root:f/z": [2], "0/@root:f/return": [2]}


def test_recursion_and_threads_keep_their_calls_apart(path: Path, module: Make) -> None:
    code = module(
        """
        def down(x, n):
            y = x + n
            if n:
                deeper = down(x, n - 1)
            y = y * 10
            return y
        """
    )
    model = Calls(lambda x: code.down(x, 2))
    with tensorcap.capture(model, path, watch="watched_code:down:y"):
        model(torch.zeros(1))
    assert read(path) == {
        "0/@root:down/y": [2],
        "0/@root:down@1/y": [1],
        "0/@root:down@2/y": [0],
        "0/@root:down@2/y:2": [0],
        "0/@root:down@2/return": [0],
        "0/@root:down@1/y:2": [10],
        "0/@root:down@1/return": [10],
        "0/@root:down/y:2": [20],
        "0/@root:down/return": [20],
    }
    barrier = threading.Barrier(2, timeout=200)

    def together(x: torch.Tensor) -> Any:
        barrier.wait()
        return code.down(x, 1)

    model = Calls(together)
    with tensorcap.capture(model, path, watch="watched_code:down:y"):
        threads = [threading.Thread(target=model, args=(torch.full((1,), v),)) for v in (100.0, 200.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read(path)
    steps = sorted(
        [found[f"{step}/@root:down{call}/{slot}"] for call in ("", "@1") for slot in ("y", "y:2", "return")]
        for step in (0, 1)
    )
    assert steps == [
        [[101], [1010], [1010], [100], [1000], [1000]],
        [[201], [2010], [2010], [200], [2000], [2000]],
    ]


@pytest.mark.spec("CAP-36")
def test_two_captures_that_watch_one_function_each_have_their_own(tmp_path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x + 1\n    z = y * 2\n    return z")
    original = code.f.__code__
    one, two = Calls(code.f), Calls(code.f)
    with tensorcap.capture(one, tmp_path / "1.h5", watch="watched_code:f:y"):
        with tensorcap.capture(two, tmp_path / "2.h5", watch="watched_code:f:z") as second:
            one(torch.zeros(1))
            two(torch.ones(1))
            code.f(torch.ones(1))
        one(torch.zeros(1))
        assert code.f.__code__ is not original
    assert code.f.__code__ is original
    assert read(tmp_path / "1.h5") == {
        "0/@root:f/y": [1],
        "0/@root:f/return": [2],
        "1/@root:f/y": [1],
        "1/@root:f/return": [2],
    }
    assert read(tmp_path / "2.h5") == {"0/@root:f/z": [4], "0/@root:f/return": [4]}
    assert second.summary is not None
    assert second.summary.not_capturable == {
        "@root:f/return": "outside of a call of a model, while several captures were under way"
    }


def test_a_function_that_is_named_twice_is_watched_once(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x + 1\n    z = y * 2\n    return z")
    model = Calls(code.f)
    watch = ["watched_code:f:y", "watched_code:f:z, y", "watched_code:f:return"]
    with tensorcap.capture(model, path, watch=watch):
        model(torch.zeros(1))
    assert read(path) == {"0/@root:f/y": [1], "0/@root:f/z": [2], "0/@root:f/return": [2]}


@pytest.mark.parametrize("include", ["*:scaled", "0/first:scaled/*", "first"])
def test_globs_choose_among_watched_functions(path: Path, module: Make, include: str) -> None:
    model = module(SCALED).Net()
    with tensorcap.capture(model, path, inputs=False, only=include, watch="watched_code:scaled:y"):
        model(torch.ones(1))
    sites = {r.key.site for r in tensorcap.open_archive(path).records} - {"@root"}
    wanted = {
        "*:scaled": {"@root:scaled", "first:scaled", "second:scaled"},
        "0/first:scaled/*": {"first:scaled"},
        "first": {"first", "first:scaled"},
    }
    assert sites - {"@root"} == wanted[include]


@pytest.mark.spec("CAP-33")
@pytest.mark.parametrize(
    ("watch", "message", "hint"),
    [
        pytest.param("f", "expected MODULE:FUNCTION:VARIABLE", "As in", id="no-parts"),
        pytest.param("watched_code:f", "expected MODULE:FUNCTION:VARIABLE", "As in", id="two-parts"),
        pytest.param("watched_code:f:", "expected MODULE:FUNCTION:VARIABLE", "As in", id="no-variable"),
        pytest.param("watched_kode:f:y", "no module 'watched_kode'", "'watched_code'", id="module"),
        pytest.param(
            "transformers.models.llama.modelling_llama:f:y",
            "no module 'transformers.models.llama.modelling_llama'",
            "'transformers.models.llama.modeling_llama'",
            id="submodule",
        ),
        pytest.param("nowhere.py:f:y", "no module was imported from 'nowhere.py'", "", id="file"),
        pytest.param("watched_code:ff:y", "module 'watched_code' has no 'ff'", "'f'", id="function"),
        pytest.param("watched_code:Net.forwad:y", "'Net' has no 'forwad'", "'forward'", id="method"),
        pytest.param("watched_code:Net:y", "Net is a class", "It has: forward, double.", id="class"),
        pytest.param("watched_code:late:y", "has 'late', but does not give it: ImportError", "", id="lazy"),
        pytest.param("watched_code:number:y", "number is an object of class int", "", id="number"),
        pytest.param(
            "watched_code:f:yy", "f assigns no variable 'yy'", "'y'? It has: x, y, r", id="variable"
        ),
        pytest.param("watched_code:f:number", "f assigns no variable 'number'", "It has: x, y", id="global"),
        pytest.param(f"{GEMMA}:Gemma3MLP.forward:gate", "no variable 'gate'", "down_proj", id="gate"),
        pytest.param("math:sin:x", "sin is a function that is not written in Python", "", id="C"),
        pytest.param("torch:relu:x", "relu is a function that is not written in Python", "", id="builtin"),
        pytest.param("json:dumps:obj", "a function that a capture itself may call", "", id="library"),
        pytest.param("tensorcap:probe:name", "a function that a capture itself may call", "", id="ours"),
        pytest.param("watched_code:short:x", "is a lambda", "", id="lambda"),
        pytest.param("watched_code:later:y", "is a coroutine function", "", id="coroutine"),
        pytest.param("watched_code:all_of:y", "calls locals()", "", id="locals"),
        pytest.param("watched_code:made:y", "its source is not to be found", "", id="no-source"),
        pytest.param("watched_code:compiled:y", "compiled is compiled (torch.compile", "", id="compiled"),
        pytest.param("watched_code:scripted:y", "scripted is scripted (torch.jit)", "", id="scripted"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_what_cannot_be_watched_is_refused_before_anything_runs(
    path: Path, module: Make, watch: str, message: str, hint: str, hooks: Callable[[nn.Module], int]
) -> None:
    code = module(
        """
        number = 3
        def __getattr__(name):
            if name == "late":
                raise ImportError("something is not installed")
            raise AttributeError(name)
        def f(x):
            y = x + number
            return y
        class Net(nn.Module):
            def forward(self, x):
                return f(x)
            @staticmethod
            def double(x):
                y = x * 2
                return y
        short = lambda x: x
        async def later(x):
            y = x
        def all_of(x):
            y = 1
            return locals()
        exec("def made(x):\\n    y = x")
        compiled = torch.compile(f, backend="eager")
        """
    )
    code.scripted = torch.jit.script(code.Net.double)
    model = code.Net()
    with pytest.raises(UsageError) as caught:
        tensorcap.capture(model, path, watch=["watched_code:f:y", watch]).__enter__()
    assert message in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert "\n" not in str(caught.value)
    assert hooks(model) == 0
    assert code.f.__code__.co_varnames == ("x", "y")
    assert not path.exists()


@pytest.mark.spec("CAP-33")
def test_a_source_that_changed_after_the_import_is_refused(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x\n    return y")
    file = Path(str(code.__file__))
    assert inspect.getsource(code.f).startswith("def f")  # which Python remembers
    for text in (
        "def f(x):\n    y = -x\n    return y",
        "# moved\ndef f(x):\n    y = x\n    return y",
        "def f(x):\n\n    y = x\n    return y",
        "def f(",
    ):
        file.write_text("import torch\nfrom torch import nn\n" + text)
        with pytest.raises(UsageError, match="is not what it was compiled from"):
            tensorcap.capture(Calls(code.f), path, watch="watched_code:f:y").__enter__()


@pytest.mark.spec("CAP-35")
def test_a_function_that_is_never_called_is_reported(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x\n    return y")
    model = nn.Linear(2, 2)
    with (
        pytest.warns(UserWarning, match="nothing was captured of 'watched_code:f:y'"),
        tensorcap.capture(model, path, watch="watched_code:f:y") as cap,
    ):
        model(torch.ones(2))
    assert cap.summary is not None
    assert cap.summary.unmatched == ("watched_code:f:y",)
    assert not cap.summary.is_whole
    assert code.f.__code__.co_varnames == ("x", "y")
    assert point(path, "@root:f") == [
        {"site": "@root:f", "status": "never-called", "calls": 0, "kind": "function"}
    ]


@pytest.mark.spec("CAP-35")
def test_a_variable_that_no_call_assigns_is_reported(path: Path, module: Make) -> None:
    code = module(
        """
        class Block(nn.Module):
            def __init__(self, negates):
                super().__init__()
                self.negates = negates

            def forward(self, x):
                if self.negates:
                    negated = -x
                    return negated
                if x is None:
                    never = 0
                return x
        """
    )
    model = nn.Sequential(code.Block(True), code.Block(False))
    with tensorcap.capture(model, path, watch="watched_code:Block.forward:negated,never") as cap:
        model(torch.ones(1))
    assert cap.summary is not None
    assert cap.summary.not_capturable == {
        "0:Block.forward/never": "assigned in none of its calls",
        "1:Block.forward/never": "assigned in none of its calls",
    }
    assert point(path, "1:Block.forward")[0]["reason"] == "assigned in none of its calls: negated"
    assert "reason" not in point(path, "0:Block.forward")[0]


@pytest.mark.spec("CAP-36")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_pass_that_computes_anew_is_not_counted_twice(
    path: Path, module: Make, use_reentrant: bool
) -> None:
    code = module("def f(x):\n    y = x * x\n    return y.sin()")
    model = Calls(lambda x: checkpoint(code.f, x, use_reentrant=use_reentrant))
    x = torch.ones(1, requires_grad=True)
    with tensorcap.capture(model, path, watch="watched_code:f:y"):
        model(x).sum().backward()
    assert read(path).keys() == {"0/@root:f/y", "0/@root:f/return"}
    [entry] = point(path, "@root:f")
    assert entry["reason"] == "not recorded: calls of a backward pass to compute anew, 1"


@pytest.mark.spec("CAP-36")
def test_the_backward_of_a_function_of_the_user_is_watched(path: Path, module: Make) -> None:
    code = module(
        """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                wrong = grad * 3
                return wrong
        """
    )
    model = Calls(lambda x: code.Twice.apply(x))
    x = torch.ones(1, requires_grad=True)
    with tensorcap.capture(model, path, watch="watched_code:Twice.backward:wrong"):
        model(x).sum().backward()
    assert read(path) == {"0/@root:Twice.backward/wrong": [3], "0/@root:Twice.backward/return": [3]}


@pytest.mark.spec("CAP-37")
def test_a_compiled_call_runs_as_it_would_and_is_reported(path: Path, module: Make) -> None:
    code = module(SCALED)
    model = code.Net()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(2)
    compiled(x)  # compiled before; what it compiled then is not used while the function is watched
    with tensorcap.capture(model, path, watch="watched_code:scaled:y") as cap:
        model(x)
        assert compiled(x).tolist() == [22, 22]
    assert compiled(x).tolist() == [22, 22]
    assert cap.summary is not None
    told = "inside a compiled graph (torch.compile); --eager runs it as plain code"
    assert cap.summary.not_capturable["@root:scaled/return"] == told
    assert "0/first:scaled/y" in read(path)
    code.fast = torch.compile(code.scaled, backend="eager")
    with tensorcap.capture(model, path, eager=True, watch="watched_code:fast:y") as cap:
        compiled(x)
    assert "0/first:scaled/y" in read(path)


@pytest.mark.spec("CAP-37")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_call_runs_as_it_would_and_is_reported(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x * 2\n    return y")
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch="watched_code:f:y") as cap:
        model(torch.ones(1))
        code.traced = torch.jit.trace(code.f, (torch.ones(1),))  # type: ignore[no-untyped-call] # torch has no types there
    assert code.traced(torch.full((1,), 4.0)).tolist() == [8]
    assert cap.summary is not None
    assert cap.summary.not_capturable["@root:f/return"] == "under torch.jit.trace"


def test_a_value_that_cannot_be_read_does_not_break_the_run(path: Path, module: Make) -> None:
    code = module(
        """
        class Hostile(dict):
            def items(self):
                raise RuntimeError("hands off")

        def f(x):
            y = Hostile()
            z = x.to_sparse()
            return x
        """
    )
    model = Calls(code.f)
    with tensorcap.capture(model, path, watch="watched_code:f:y,z") as cap:
        assert model(torch.ones(1)).tolist() == [1]
    assert cap.summary is not None
    assert cap.summary.not_capturable == {
        "@root:f/y": "RuntimeError: hands off",
        "@root:f/z": "layout sparse_coo",
    }


def test_a_capture_that_is_paused_says_what_it_left_out(path: Path, module: Make) -> None:
    code = module("def f(x, then):\n    y = x\n    then()\n    z = x\n    return z")
    caps: list[Any] = []
    model = Calls(lambda x: code.f(x, caps[0].pause))
    with tensorcap.capture(model, path, watch="watched_code:f:y,z") as cap:
        caps.append(cap)
        model(torch.ones(1))
    assert read(path) == {"0/@root:f/y": [1]}
    assert cap.summary is not None
    reasons = cap.summary.not_capturable
    assert reasons["@root:f/z"] == reasons["@root:f/return"] == "the capture was paused then"


def test_a_watch_of_which_nothing_is_captured_leaves_no_archive(path: Path, module: Make) -> None:
    code = module("def f(x):\n    y = x\n    return y")
    with (
        pytest.raises(CaptureError, match="nothing was captured"),
        tensorcap.capture(Calls(code.f), path, watch="watched_code:f:y"),
    ):
        pass
    assert code.f.__code__.co_varnames == ("x", "y")
