from __future__ import annotations

import errno
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap_formats.errors import UsageError, WriteError
from tensorcap_formats.writing import recover


class Failing(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.error = error

    def forward(self, x: torch.Tensor, fail: bool = True) -> Any:
        x = self.first(x)
        if fail:
            raise self.error
        return self.second(x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit], ids=lambda e: e.__name__)
def test_any_end_by_an_error_keeps_what_was_captured(
    path: Path, hooks: Callable[[nn.Module], int], error: type[BaseException]
) -> None:
    model = Failing(error)
    with pytest.raises(error) as caught, tensorcap.capture(model, path) as cap:
        model(torch.ones(1, 4))
    assert caught.type is error
    assert hooks(model) == 0
    assert cap.path == path
    assert cap.summary is not None
    assert not cap.summary.is_complete
    with tensorcap.open_archive(path) as archive:
        assert not archive.is_complete
        assert [r.key.text for r in archive.records][-1] == "0/first/output"
        assert archive.run["error"] == {"type": error.__name__, "message": "", "last_point": "0/first"}
    assert [p.name for p in path.parent.iterdir()] == ["ref.h5"]


def test_a_complete_archive_is_never_replaced_by_an_incomplete_one(path: Path) -> None:
    model, x = Failing(RuntimeError), torch.ones(1, 4)
    with torch.no_grad(), tensorcap.capture(model, path):
        model(x, fail=False)
    before = path.read_bytes()
    for name in ("ref.incomplete.h5", "ref.incomplete2.h5"):
        with pytest.raises(RuntimeError) as caught, tensorcap.capture(model, path) as cap:
            model(x)
        assert cap.path == path.with_name(name)
        with tensorcap.open_archive(path.with_name(name)) as archive:
            assert not archive.is_complete
        note = f"tensorcap: what was captured until then is in {cap.path}, marked incomplete"
        assert getattr(caught.value, "__notes__", [note]) == [note]
    assert path.read_bytes() == before


def test_an_error_before_anything_was_captured_leaves_nothing(path: Path, small: Any) -> None:
    with pytest.raises(ZeroDivisionError), tensorcap.capture(small, path):
        raise ZeroDivisionError
    assert not list(path.parent.iterdir())


def test_a_complete_capture_replaces_the_archive_before(path: Path, small: Any) -> None:
    for value in (1.0, 2.0):
        with torch.no_grad(), tensorcap.capture(small, path):
            small(torch.full((1, 4), value))
    with tensorcap.open_archive(path) as archive:
        assert archive.load(archive.get("0/0/input.input")).tolist() == [[2] * 4]
    assert [p.name for p in path.parent.iterdir()] == ["ref.h5"]


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let `after` tensors be written, then let the disk be full."""
    from tensorcap_formats.hdf5 import write_at as real

    count = [0]

    def write_at(*arguments: Any) -> None:
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr("tensorcap_formats.writing.writer.write_at", write_at)


def test_a_full_disk_is_raised_and_the_rest_can_be_recovered(
    path: Path, small: Any, hooks: Callable[[nn.Module], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=2)
    with (
        pytest.raises(WriteError, match="No space left on device"),
        torch.no_grad(),
        tensorcap.capture(small, path),
    ):
        small(torch.ones(1, 4))
    assert hooks(small) == 0
    assert not path.exists()
    recover(path)
    with tensorcap.open_archive(path) as archive:
        assert not archive.is_complete
        # the input of the first child is that of the model, so its bytes are there already
        assert [r.key.text for r in archive.records] == [
            "0/@root/input.input",
            "0/0/input.input",
            "0/0/output",
            "0/1/input.input",
        ]


@pytest.mark.spec("CAP-59")
def test_a_full_disk_is_raised_at_the_end_of_the_block_and_never_in_the_run(
    path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=1)
    x = torch.ones(1, 4)
    ended: list[bool] = []

    def run() -> None:
        with torch.no_grad(), tensorcap.capture(small, path):
            small(x)
            small(x)  # recorded no more, and not disturbed
            ended.append(True)

    with pytest.raises(WriteError, match="No space left on device"):
        run()
    assert ended == [True]
    assert not path.exists()


@pytest.mark.spec("CAP-59")
def test_an_error_of_the_run_after_a_full_disk_is_the_one_that_is_raised(
    path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=1)
    model = nn.Sequential(small[:2], Failing(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) as caught, torch.no_grad(), tensorcap.capture(model, path):
        model(torch.ones(1, 4))
    (note,) = caught.value.__notes__
    assert note.startswith(
        f"tensorcap: {path}: No space left on device; 3 tensors are safe in ref.h5.partial"
    )


SCRIPT = """
import resource, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
x = torch.randn(64, 256)
for step in range(3):
    x = model(x).detach()
print("the sum is", x.sum().item())
with open("result.txt", "w") as file:
    file.write("done")
"""


@pytest.mark.spec("CAP-59")
@pytest.mark.parametrize(("level", "records"), [("module", 6), ("op", 8)])
def test_a_script_runs_to_its_end_though_files_may_not_grow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    records: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    runpy.run_path("script.py")
    plain = capsys.readouterr().out
    (tmp_path / "result.txt").unlink()
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
    limited += "from tensorcap_cli.main import main; main()"
    command = ["capture", "script", "--level", level, "-o", "ref.h5", "script.py"]
    run = subprocess.run(
        [sys.executable, "-c", limited, *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert "the sum is" in plain
    assert plain in run.stdout
    assert (tmp_path / "result.txt").read_text() == "done"
    assert run.returncode == 1
    # three tensors of 64 KiB fit: the input, and the results of two layers, under several keys each
    assert f"ref.h5: File too large; {records} tensors are safe in ref.h5.partial" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "ref.h5").exists()


def test_something_that_is_no_archive_is_refused_before_the_run(
    path: Path, small: Any, hooks: Callable[[nn.Module], int]
) -> None:
    path.write_text("precious")
    with pytest.raises(WriteError, match="is no archive of tensorcap"), tensorcap.capture(small, path):
        pytest.fail("the block was entered")
    assert path.read_text() == "precious"
    assert hooks(small) == 0
    with torch.no_grad(), tensorcap.capture(small, path.with_name("b.h5")):  # the model is free again
        small(torch.ones(1, 4))


def test_an_unknown_suffix_is_refused(path: Path, small: Any) -> None:
    with (
        pytest.raises(UsageError, match=r"suffix '\.pt' names no container"),
        tensorcap.capture(small, path.with_suffix(".pt")),
    ):
        pytest.fail("the block was entered")


def test_trouble_with_a_value_is_no_trouble_of_the_model(path: Path) -> None:
    class Hostile(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise LookupError("not today")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, odd: Any) -> Any:
            return x * 2

    model = Model()
    with tensorcap.capture(model, path):
        assert model(torch.ones(1), Hostile(a=1)).tolist() == [2]
    with tensorcap.open_archive(path) as archive:
        assert archive.run["points"][1] == {
            "site": "@root",
            "slots": ["input.odd"],
            "status": "not-capturable",
            "calls": 1,
            "reason": "LookupError: not today",
        }


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {".": x + 1, "..": x + 2, "a/..": x + 3}


@pytest.mark.spec("NAM-4")
@pytest.mark.parametrize("suffix", [".h5", ".zarr", ".safetensors"])
def test_fields_that_are_called_as_folders_are_recorded(tmp_path: Path, suffix: str) -> None:
    model = Named()
    with tensorcap.capture(model, tmp_path / f"ref{suffix}"):
        model(torch.zeros(1))
    with tensorcap.open_archive(tmp_path / f"ref{suffix}") as archive:
        outputs = {r.key.slot: archive.load(r).tolist() for r in archive.records[1:]}
    assert outputs == {"output.%2E": [1.0], "output.%2E%2E": [2.0], "output.a%2F..": [3.0]}
