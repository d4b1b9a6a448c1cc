from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tensorcap
from tensorcap_cli.main import main

ROOT = Path(__file__).parents[2]

WORKLOADS = """
import torch
import tensorcap
from beside import WIDTH


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)
        self.register_buffer("saved", torch.full((1,), 1.001))
        self.register_buffer("table", torch.full((1,), 1.001), persistent=False)
        self.spare = torch.nn.Linear(1, 1)

    def forward(self, x, mode="plain"):
        if mode == "fail":
            raise RuntimeError("planted")
        if mode == "interrupt":
            raise KeyboardInterrupt
        hidden = self.first(x)
        if mode == "sparse":
            return self.last(hidden), torch.eye(2).to_sparse()
        return self.last(hidden)


def plain(mode="plain"):
    return tensorcap.Workload(Model().eval(), {"x": torch.randn(1, WIDTH), "mode": mode})


def positional():
    return tensorcap.Workload(Model().eval(), (torch.randn(1, WIDTH),))


def looped():
    def run(model, xs):
        for x in xs:
            model(x)

    return tensorcap.Workload(Model().eval(), {"xs": list(torch.randn(3, 1, WIDTH))}, run)


def with_dtype(dtype=torch.float32):
    return tensorcap.Workload(Model().to(dtype).eval(), {"x": torch.randn(1, WIDTH)})


def layered(num_hidden_layers=3):
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_hidden_layers)]
    return tensorcap.Workload(torch.nn.Sequential(*layers), (torch.randn(1, WIDTH),))


def sparse():
    return plain("sparse")


def caught():
    def run(model, x):
        model(x)
        try:
            model(x, mode="fail")
        except RuntimeError:
            pass

    return tensorcap.Workload(Model().eval(), (torch.randn(1, WIDTH),), run)


def one_argument():
    return tensorcap.Workload(Model().eval(), torch.randn(2, WIDTH))


def failing():
    return plain("fail")


def interrupted():
    return plain("interrupt")


class Drawing(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand(1)


def drawing():
    return tensorcap.Workload(Drawing(), (torch.zeros(1),))


def drawing_after_others():
    torch.rand(7)
    return tensorcap.Workload(Drawing(), (torch.zeros(1),))


def pair():
    return Model(), torch.ones(1, WIDTH)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.py").write_text(WORKLOADS)
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return tmp_path


@pytest.fixture
def tcap(folder: Path) -> Callable[..., Result]:
    def run(arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments.split(), prog_name="tcap", catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return run


def load(archive: tensorcap.Archive, key: str) -> Any:
    return archive.load(archive.get(key))


@pytest.mark.spec("CAP-67")
@pytest.mark.parametrize(
    ("option", "has_digest", "records"), [("", True, 0), ("--no-params", False, 0), ("--params", False, 8)]
)
def test_params_are_kept_as_digests_as_values_or_not_at_all(
    tcap: Callable[..., Result], option: str, has_digest: bool, records: int
) -> None:
    tcap(f"capture torch w.py:plain -o a.h5 {option}")
    tcap("capture torch w.py:plain --like a.h5 -o again.h5")
    with tensorcap.open_archive("a.h5") as archive:
        assert bool(archive.info.modules["first"].parameters["weight"].digest) is has_digest
    for name in ("a.h5", "again.h5"):
        with tensorcap.open_archive(name) as archive:
            held = [r for r in archive.records if r.key.slot.startswith(("param", "buffer"))]
            assert len(held) == records


def test_a_function_of_a_file_is_captured(tcap: Callable[..., Result]) -> None:
    result = tcap("capture torch w.py:plain -o ref.h5")
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("capturing tcap_workload_w.Model from ")
    assert lines[0].endswith("w.py in float32 on cpu")
    assert lines[1:] == [
        "ref.h5: 6 tensors, 80 B (40 B of distinct ones stored), 1 step",
        "modules: 3 captured, 1 never called, 0 not capturable, 0 excluded",
        "never called: spare",
    ]
    with tensorcap.open_archive("ref.h5") as archive:
        assert archive.is_complete
        assert archive.run["workload"] == {"kind": "function", "path": "w.py:plain", "options": {"seed": 0}}
        source = archive.run["sources"]["tcap_workload_w.Model"]
        assert source["text"].startswith("class Model(torch.nn.Module):")


def test_like_repeats_a_run_in_another_precision(tcap: Callable[..., Result]) -> None:
    tcap("capture torch w.py:plain -o ref.h5 --seed 3 --exclude spare")
    tcap("capture torch --like ref.h5 --dtype bfloat16 -o tgt.h5")
    with tensorcap.open_archive("ref.h5") as reference, tensorcap.open_archive("tgt.h5") as target:
        assert [r.key.text for r in target.records] == [r.key.text for r in reference.records]
        assert target.run["dtype"] == "bfloat16"
        assert target.run["seed"] == 3
        assert target.run["scope"] == {"include": [], "exclude": ["spare"], "inputs": True}
        x = load(reference, "0/@root/input.x")
        rounded = load(target, "0/@root/input.x")
        assert target.get("0/@root/input.x").dtype.name == "bfloat16"
        assert abs(rounded - x).max() <= abs(x).max() / 256
        module = next(m for m in target.run["modules"] if m["path"] == "")
        assert {name: b["dtype"] for name, b in module["buffers"].items()} == {
            "saved": "bfloat16",
            "table": "float32",
        }
    tcap("capture torch --like tgt.h5 -o again.h5")
    with tensorcap.open_archive("tgt.h5") as one, tensorcap.open_archive("again.h5") as two:
        assert [r.digest for r in one.records] == [r.digest for r in two.records]


@pytest.mark.parametrize("function", ["positional", "looped"])
def test_like_gives_the_inputs_of_the_archive_to_another_model(
    tcap: Callable[..., Result], function: str
) -> None:
    tcap(f"capture torch w.py:{function} -o ref.h5 --seed 1")
    tcap(f"capture torch w.py:{function} --like ref.h5 --seed 2 -o tgt.h5")
    with tensorcap.open_archive("ref.h5") as reference, tensorcap.open_archive("tgt.h5") as target:
        assert (load(reference, "0/@root/input.x") == load(target, "0/@root/input.x")).all()
        assert (load(reference, "0/first/output") != load(target, "0/first/output")).any()
        assert reference.run["steps"] == target.run["steps"] == (1 if function == "positional" else 3)


def test_random_numbers_of_the_run_do_not_depend_on_how_the_model_was_made(
    tcap: Callable[..., Result],
) -> None:
    tcap("capture torch w.py:drawing -o a.h5")
    tcap("capture torch w.py:drawing_after_others -o b.h5")
    with tensorcap.open_archive("a.h5") as one, tensorcap.open_archive("b.h5") as two:
        assert load(one, "0/@root/output") == load(two, "0/@root/output")


def test_a_secret_in_the_source_of_a_module_is_hidden(tcap: Callable[..., Result], folder: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    text = (folder / "w.py").read_text().replace('mode="plain"):', f'mode="plain"):  # {secret}')
    (folder / "w.py").write_text(text)
    tcap("capture torch w.py:plain -o ref.h5")
    with tensorcap.open_archive("ref.h5") as archive:
        assert "# [hidden]" in archive.run["sources"]["tcap_workload_w.Model"]["text"]
    assert secret.encode() not in (folder / "ref.h5").read_bytes()


def test_a_function_that_takes_a_dtype_is_given_it(tcap: Callable[..., Result]) -> None:
    tcap("capture torch w.py:with_dtype --dtype float16 -o ref.h5")
    with tensorcap.open_archive("ref.h5") as archive:
        module = next(m for m in archive.run["modules"] if m["path"] == "")
        assert module["buffers"]["table"]["dtype"] == "float16"  # as the function made it
        assert archive.get("0/@root/input.x").dtype.name == "float16"


def test_a_dry_run_lists_points_and_bytes_and_writes_nothing(
    tcap: Callable[..., Result], folder: Path
) -> None:
    before = sorted(folder.iterdir())
    result = tcap("capture torch w.py:plain --dry-run --only first")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["key", "dtype", "shape", "size"],
        ["0/@root/input.x", "float32", "1x4", "16", "B"],
        ["0/first/input.input", "float32", "1x4", "16", "B"],
        ["0/first/output", "float32", "1x4", "16", "B"],
        ["3", "tensors,", "48", "B"],
    ]
    found = json.loads(tcap("capture torch w.py:plain --dry-run --json").stdout)
    assert found["bytes"] == 80
    assert found["records"][0] == {"key": "0/@root/input.x", "dtype": "float32", "shape": [1, 4], "bytes": 16}
    assert sorted(p for p in folder.iterdir() if p.name != "__pycache__") == before


def test_json_says_what_was_captured(tcap: Callable[..., Result]) -> None:
    found = json.loads(tcap("capture torch w.py:plain -o ref.zarr --json --no-inputs").stdout)
    assert found == {
        "path": "ref.zarr",
        "is_complete": True,
        "tensors": 4,
        "tensor_bytes": 48,
        "stored_bytes": 40,
        "steps": 1,
        "phases": {"forward": 1},
        "captured": ["@root", "first", "last"],
        "never_called": ["spare"],
        "not_capturable": {},
        "fused": {},
        "held": {},
        "unfinished": {},
        "excluded": [],
        "ops": 0,
        "functions": [],
        "probes": [],
        "unmatched": [],
        "stopped": None,
        "notes": [],
    }


def test_something_that_could_not_be_captured_is_status_1(tcap: Callable[..., Result]) -> None:
    result = tcap("capture torch w.py:sparse -o ref.h5", status=1)
    assert "not capturable, layout sparse_coo: @root/output.1" in result.stderr
    result = tcap("capture torch w.py:plain -o ref.h5 --only spare --only first", status=1)
    assert "nothing was captured of 'spare'" in result.stderr


def test_a_call_that_failed_and_was_caught_is_status_1(tcap: Callable[..., Result]) -> None:
    result = tcap("capture torch w.py:caught -o ref.h5", status=1)
    assert "calls that were not seen to return: @root (1)" in result.stderr
    found = json.loads(tcap("capture torch w.py:caught -o ref.h5 --json", status=1).stdout)
    assert found["unfinished"] == {"@root": 1}
    assert found["steps"] == 2


def test_statistics_alone_are_kept_on_request(tcap: Callable[..., Result]) -> None:
    tcap("capture torch w.py:plain -o ref.h5 --stats-only")
    with tensorcap.open_archive("ref.h5") as archive:
        assert not any(record.stored for record in archive.records)


def test_limits_are_options_and_like_repeats_them(tcap: Callable[..., Result]) -> None:
    tcap("capture torch w.py:looped -o ref.h5 --steps 1- --sample 3 --slice [...,:2] --max-bytes 1MiB")
    tcap("capture torch --like ref.h5 --sample 2 -o tgt.h5")
    limits = {"steps": "1-", "sample": 3, "slices": ["[...,:2]"], "max_bytes": 1_048_576}
    with tensorcap.open_archive("ref.h5") as reference, tensorcap.open_archive("tgt.h5") as target:
        kept = {"include": [], "exclude": [], "inputs": True, **limits}
        assert reference.run["scope"] == kept
        assert target.run["scope"] == {**kept, "sample": 2}
        outputs = [r for r in target.records if r.key.slot == "output"]
        assert [r.key.text for r in outputs] == ["1/first/output", "1/last/output", "1/@root/output"]
        assert [r.shape for r in outputs] == [(1, 2)] * 3
        assert target.get("2/@root/input.x").shape == (1, 4)


def test_like_repeats_what_was_tapped_beside_modules(tcap: Callable[..., Result]) -> None:
    tcap("capture torch w.py:plain -o ref.h5 --level op --ops-in last --params")
    tcap("capture torch --like ref.h5 -o tgt.h5 --dtype bfloat16")
    tcap("capture torch --like ref.h5 -o modules.h5 --level module")
    with tensorcap.open_archive("modules.h5") as archive:
        assert archive.run["scope"] == {"include": [], "exclude": [], "inputs": True, "params": True}
    with tensorcap.open_archive("ref.h5") as reference, tensorcap.open_archive("tgt.h5") as target:
        assert reference.run["scope"] == target.run["scope"]
        assert reference.run["scope"]["level"] == "op"
        assert [r.key for r in reference.records] == [r.key for r in target.records]
        assert any(r.key.site.startswith("last:aten.") for r in reference.records)


def test_a_limit_of_bytes_that_is_reached_is_status_1_and_told(tcap: Callable[..., Result]) -> None:
    result = tcap("capture torch w.py:plain -o ref.h5 --max-bytes 32", status=1)
    assert (
        result.stderr.splitlines()[-1]
        == "stopped at 32 B at 0/last/input.input; later calls are not recorded"
    )
    with tensorcap.open_archive("ref.h5") as archive:
        assert archive.is_complete
    found = json.loads(tcap("capture torch w.py:plain -o ref.h5 --max-bytes 32 --json", status=1).stdout)
    assert found["stopped"] == "0/last/input.input"


def test_a_step_that_was_not_reached_is_status_1_and_told(tcap: Callable[..., Result]) -> None:
    result = tcap("capture torch w.py:looped -o ref.h5 --steps 0,7", status=1)
    assert result.stderr.splitlines()[-1] == "nothing was captured of 'steps 7'"


def test_tensors_are_printed_as_they_come(tcap: Callable[..., Result], folder: Path) -> None:
    result = tcap("capture torch w.py:plain -o ref.h5 --print")
    assert [line.split("  ")[:3] for line in result.stdout.splitlines()] == [
        ["0/@root/input.x", "float32", "1x4"],
        ["0/first/input.input", "float32", "1x4"],
        ["0/first/output", "float32", "1x4"],
        ["0/last/input.input", "float32", "1x4"],
        ["0/last/output", "float32", "1x2"],
        ["0/@root/output", "float32", "1x2"],
    ]
    result = tcap(
        "capture torch w.py:plain --dry-run --print full --print-only last --print-only 0/first/output"
    )
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[::2]] == [
        "0/first/output",
        "0/last/input.input",
        "0/last/output",
    ]
    assert all(line.startswith("  [[") for line in result.stdout.splitlines()[1::2])
    assert "dry run: 6 tensors, 80 B" in result.stderr


def test_a_function_is_given_the_options_that_it_has_parameters_for(tcap: Callable[..., Result]) -> None:
    told = tcap("capture torch w.py:layered --num-hidden-layers 2 --dry-run --no-inputs --json").stdout
    assert [row["key"] for row in json.loads(told)["records"]][-3:] == [
        "0/0/output",
        "0/1/output",
        "0/@root/output",
    ]
    tcap("capture torch w.py:layered --num-hidden-layers 2 -o a.h5")
    told = tcap("capture torch --like a.h5 --dry-run --no-inputs --json").stdout
    assert "0/2/output" not in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("-o a.h5", "no model, expected MODEL or --like ARCHIVE", id="no-model"),
        pytest.param("w.py:plain", "no output, expected -o ARCHIVE or --dry-run", id="no-output"),
        pytest.param("w.py:plain -o a.h5 --dry-run", "--dry-run writes nothing", id="output-of-a-dry-run"),
        pytest.param("w.py:absent -o a.h5", "has no function 'absent'", id="no-function"),
        pytest.param("absent.py:f -o a.h5", "there is no file 'absent.py'", id="no-file"),
        pytest.param("w.py:pair -o a.h5", "returned a tuple, expected a tensorcap.Workload", id="a-pair"),
        pytest.param(
            "w.py:one_argument -o a.h5", "found a Tensor, expected a mapping or a tuple", id="one-argument"
        ),
        pytest.param("w.py:plain -o a.h5 --device nosuch", "device 'nosuch' cannot be used", id="device"),
        pytest.param("w.py:plain -o a.h5 --prompt x", "takes no --prompt", id="option-for-hugging-face"),
        pytest.param("w.py:plain -o a.h5 --only absent", "no module matches 'absent'", id="glob"),
        pytest.param("w.py:plain -o a.txt", "names no container", id="suffix"),
        pytest.param("w.py:plain -o a.h5 --dtype int8", "is no floating dtype of torch", id="dtype"),
        pytest.param("w.py:plain -o a.h5 --config x", "expected key=value", id="config"),
        pytest.param("w.py:plain -o a.h5 --steps x", "'x' is no step", id="steps"),
        pytest.param("w.py:plain -o a.h5 --sample 0", "'--sample'", id="sample"),
        pytest.param("w.py:plain -o a.h5 --max-bytes many", "size 'many': expected bytes", id="bytes"),
        pytest.param("w.py:plain -o a.h5 --slice [0]", "'0' is no slice such as :64", id="slice"),
        pytest.param(
            "w.py:plain -o a.h5 --slice firs=[:1]", "no module matches 'firs'", id="slice-of-nothing"
        ),
        pytest.param("w.py:plain -o a.h5 --level deep", "'--level'", id="level"),
        pytest.param(
            "w.py:plain -o a.h5 --ops-in last", "ops_in is of ops, and the level is module", id="ops"
        ),
        pytest.param("w.py:plain -o a.h5 --print --json", "--print and --json exclude", id="print-and-json"),
        pytest.param("w.py:plain -o a.h5 --print --print-only firs", "no module matches 'firs'", id="filter"),
        pytest.param("w.py:plain -o a.h5 --print-only first", "expected --print too", id="filter-alone"),
        pytest.param("w.py:plain -o a.h5 --teacher-forced b.h5", "takes no --teacher-forced", id="forced"),
    ],
)
def test_wrong_usage_is_status_2_and_leaves_nothing(
    tcap: Callable[..., Result], folder: Path, arguments: str, message: str
) -> None:
    result = tcap(f"capture torch {arguments}", status=2)
    assert message in result.stderr
    assert not [p for p in folder.iterdir() if p.name.startswith("a.")]


def test_an_unreadable_archive_to_be_like_is_status_3(tcap: Callable[..., Result], folder: Path) -> None:
    (folder / "bad.h5").write_bytes(b"nonsense")
    tcap("capture torch --like bad.h5 -o a.h5", status=3)


def test_an_error_in_the_model_is_a_traceback_and_an_incomplete_archive(
    tcap: Callable[..., Result], folder: Path
) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        tcap("capture torch w.py:failing -o ref.h5")
    with tensorcap.open_archive(folder / "ref.h5") as archive:
        assert not archive.is_complete


@pytest.mark.parametrize(
    ("file", "function", "frames"),
    [
        pytest.param("w.py", "failing", ['w.py", line 17, in forward'], id="model"),
        pytest.param(
            "bad.py", "outer", ['bad.py", line 2, in outer', 'bad.py", line 4, in inner'], id="function"
        ),
        pytest.param("lost.py", "f", ['lost.py", line 1, in <module>'], id="import"),
        pytest.param("slip.py", "f", ['slip.py", line 1'], id="syntax"),
    ],
)
def test_an_error_in_a_file_of_the_user_shows_their_own_frames_alone(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    function: str,
    frames: list[str],
) -> None:
    write_faulty(folder)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    result = CliRunner().invoke(main, ["capture", "torch", f"{file}:{function}", "-o", "a.h5"])
    assert result.exc_info is not None
    sys.excepthook(*result.exc_info)  # as the interpreter does with what ends it
    assert own_frames(capsys.readouterr().err) == frames


def test_an_error_of_the_user_that_ends_the_process_shows_their_own_frames_alone(folder: Path) -> None:
    write_faulty(folder)
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", "capture", "torch", "bad.py:outer", "-o", "a.h5"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    expected = ['bad.py", line 2, in outer', 'bad.py", line 4, in inner']
    assert (own_frames(done.stderr), done.returncode) == (expected, 1)


def write_faulty(folder: Path) -> None:
    (folder / "bad.py").write_text("def outer():\n    return inner({})\ndef inner(d):\n    return d['x']\n")
    (folder / "lost.py").write_text("import no_such_module_anywhere\n")
    (folder / "slip.py").write_text("def f(:\n")


def own_frames(report: str) -> list[str]:
    return [line.rpartition("/")[2] for line in report.splitlines() if line.startswith("  File ")]


@pytest.mark.spec("CAP-30")
def test_a_function_of_the_workloads_own_file_is_watched_by_the_name_of_its_module(
    tcap: Callable[..., Result], folder: Path
) -> None:
    (folder / "own_port.py").write_text((folder / "w.py").read_text())
    tcap("capture torch own_port.py:plain --watch own_port:Model.forward:hidden -o ref.h5")
    with tensorcap.open_archive(folder / "ref.h5") as archive:
        assert "0/@root:Model.forward/hidden" in archive
        assert archive.get("0/@root:Model.forward/hidden").shape == (1, 4)


def test_an_interrupt_is_status_130_and_keeps_what_was_captured(
    tcap: Callable[..., Result], folder: Path
) -> None:
    result = tcap("capture torch w.py:interrupted -o ref.h5", status=130)
    assert result.stderr.splitlines()[-2:] == [
        "Interrupted.",
        "tensorcap: what was captured until then is in ref.h5, marked incomplete",
    ]
    with tensorcap.open_archive(folder / "ref.h5") as archive:
        assert archive.run["error"]["type"] == "KeyboardInterrupt"
        assert not archive.is_complete


def test_an_archive_does_not_decide_that_code_of_a_model_is_run() -> None:
    from tensorcap.session import Recipe
    from tensorcap_formats.run_info import RunInfo, WorkloadInfo

    options = {"trust_remote_code": True, "dtype": "float16"}
    before: Any = SimpleNamespace(info=RunInfo(workload=WorkloadInfo("x/y", options)))
    assert Recipe.of(before).options == {"dtype": "float16"}


@pytest.mark.parametrize("arguments", [["capture", "-h"], ["capture", "torch", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from tensorcap_cli.main import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "print([m for m in ('numpy', 'torch', 'h5py', 'rich') if m in sys.modules])\n"
    )
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert any("Exit status" in line for line in lines)
