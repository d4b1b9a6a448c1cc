"""The plain log: a line a tensor, the same for whatever was captured."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorcap
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key

ROOT = Path(__file__).parents[2]


def printed(array: Any, name: str, form: Any = "compact", shape: tuple[int, ...] | None = None) -> str:
    stream = io.StringIO()
    bits = np.ascontiguousarray(array).view(dtype(name).storage)
    log = tensorcap.PlainLog(stream, form)
    log.print(
        Key("mlp", "output", step=1, call=2), bits, dtype(name), array.shape if shape is None else shape
    )
    return stream.getvalue()


@pytest.mark.spec("CAP-80")
@pytest.mark.parametrize(
    ("array", "name", "expected"),
    [
        pytest.param(
            np.array([[3.0, -4.0], [0.0, 0.0]], np.float32),
            "float32",
            "float32  2x2  min -4  max 3  mean -0.25  l2 5",
            id="float32",
        ),
        pytest.param(
            np.array([1 / 3, 2 / 3], np.float64),
            "float64",
            "float64  2  min 0.333333  max 0.666667  mean 0.5  l2 0.745356",
            id="six-digits",
        ),
        pytest.param(
            np.array([1.5, -2.0], ml_dtypes.bfloat16),
            "bfloat16",
            "bfloat16  2  min -2  max 1.5  mean -0.25  l2 2.5",
            id="bfloat16",
        ),
        pytest.param(
            np.array([2**40, 1]),
            "int64",
            "int64  2  min 1  max 1099511627776  mean 5.49756e+11  l2 1.09951e+12",
            id="integers-in-full",
        ),
        pytest.param(
            np.array([np.nan, np.inf, -np.inf, -np.inf, 2.0], np.float16),
            "float16",
            "float16  5  min 2  max 2  mean 2  l2 2  nan 1  inf 1  -inf 2",
            id="not-finite",
        ),
        pytest.param(
            np.array([np.nan], np.float32),
            "float32",
            "float32  1  min -  max -  mean -  l2 -  nan 1",
            id="nothing-finite",
        ),
        pytest.param(np.float32(2.0), "float32", "float32  ()  min 2  max 2  mean 2  l2 2", id="scalar"),
        pytest.param(
            np.zeros((0, 3), np.float32), "float32", "float32  0x3  min -  max -  mean -  l2 -", id="empty"
        ),
    ],
)
def test_a_line_says_key_dtype_shape_and_statistics(array: Any, name: str, expected: str) -> None:
    assert printed(array, name) == f"1/mlp@2/output  {expected}\n"


@pytest.mark.spec("CAP-81")
def test_the_full_form_has_first_and_last_values_below_the_line() -> None:
    lines = printed(np.arange(10_000, dtype=np.float32).reshape(100, 100), "float32", "full").splitlines()
    assert lines == [
        "1/mlp@2/output  float32  100x100  min 0  max 9999  mean 4999.5  l2 577307",
        "  [[   0,    1,    2, ...,   97,   98,   99],",
        "   [ 100,  101,  102, ...,  197,  198,  199],",
        "   [ 200,  201,  202, ...,  297,  298,  299],",
        "   ...,",
        "   [9700, 9701, 9702, ..., 9797, 9798, 9799],",
        "   [9800, 9801, 9802, ..., 9897, 9898, 9899],",
        "   [9900, 9901, 9902, ..., 9997, 9998, 9999]]",
    ]


@pytest.mark.spec("CAP-81")
@pytest.mark.parametrize(
    ("array", "name", "values"),
    [
        pytest.param(np.float32(2.5), "float32", "2.5", id="scalar"),
        pytest.param(np.zeros((0, 3), np.float32), "float32", "[] (shape [0, 3])", id="empty"),
        pytest.param(np.array([1.5, -2.0], ml_dtypes.bfloat16), "bfloat16", "[1.5,  -2]", id="bfloat16"),
        pytest.param(np.array([True, False]), "bool", "[ True, False]", id="bool"),
    ],
)
def test_the_full_form_prints_values_of_any_dtype(array: Any, name: str, values: str) -> None:
    assert printed(array, name, "full").splitlines()[1:] == [f"  {values}"]


@pytest.mark.spec("CAP-82")
def test_a_capture_prints_what_it_records_in_its_order_and_the_archive_is_the_same(
    tmp_path: Path, small: Any
) -> None:
    stream = io.StringIO()
    paths = tmp_path / "a.h5", tmp_path / "b.h5"
    for path, log in zip(paths, (None, tensorcap.PlainLog(stream)), strict=True):
        with torch.no_grad(), tensorcap.capture(small, path, log=log, exclude="1", slices="[:, :2]"):
            small(torch.tensor([[1.0, 2, 3, 4]]))
    with tensorcap.open_archive(paths[0]) as one, tensorcap.open_archive(paths[1]) as two:
        assert [(r.key, r.digest) for r in one.records] == [(r.key, r.digest) for r in two.records]
        assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
            record.key.text for record in one.records
        ]
    assert stream.getvalue().splitlines()[:2] == [
        "0/@root/input.input  float32  1x4  min 1  max 4  mean 2.5  l2 5.47723",
        "0/0/input.input  float32  1x2  min 1  max 2  mean 1.5  l2 2.23607",
    ]


@pytest.mark.spec("CAP-82")
def test_two_runs_of_the_same_have_the_same_log(small: Any) -> None:
    streams = io.StringIO(), io.StringIO()
    for stream in streams:
        with torch.no_grad(), tensorcap.capture(small, None, log=tensorcap.PlainLog(stream, "full")):
            small(torch.ones(2, 4))
    assert streams[0].getvalue() == streams[1].getvalue() != ""


@pytest.mark.spec("CAP-82")
@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        pytest.param("2", ["0/2/input.input", "0/2/output"], id="site"),
        pytest.param(
            ["0/*/output", "[02]"],
            ["0/0/input.input", "0/0/output", "0/2/input.input", "0/2/output", "0/@root/output"],
            id="several",
        ),
    ],
)
def test_a_filter_is_of_what_is_printed_alone(small: Any, globs: Any, expected: list[str]) -> None:
    stream = io.StringIO()
    log = tensorcap.PlainLog(stream, globs=globs)
    with torch.no_grad(), tensorcap.capture(small, None, log=log, exclude="1") as cap:
        small(torch.ones(2, 4))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == expected
    assert len(cap.tally.records) == 6


class Broken(io.StringIO):
    """A pipe that nobody reads any more after some lines."""

    def write(self, text: str) -> int:
        if len(self.getvalue().splitlines()) == 2:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.spec("CAP-83")
def test_a_line_is_there_as_soon_as_its_tensor_is_recorded(tmp_path: Path, small: Any) -> None:
    seen = []
    with open(tmp_path / "log", "w") as stream:
        handle = small[2].register_forward_pre_hook(
            lambda *_: seen.append((tmp_path / "log").read_text().count("\n"))
        )
        with torch.no_grad(), tensorcap.capture(small, None, log=tensorcap.PlainLog(stream)):
            small(torch.ones(1, 4))
    handle.remove()
    assert seen == [5]  # what the model and its first two modules are given, and what these return


@pytest.mark.spec("CAP-83")
def test_a_pipe_that_nobody_reads_ends_the_log_and_nothing_else(path: Path, small: Any) -> None:
    stream = Broken()
    log = tensorcap.PlainLog(stream)
    with torch.no_grad(), tensorcap.capture(small, path, log=log) as cap:
        small(torch.ones(1, 4))
    assert isinstance(log.trouble, BrokenPipeError)
    assert len(stream.getvalue().splitlines()) == 2
    assert cap.summary is not None
    assert cap.summary.is_whole
    assert cap.summary.tensors == 8


@pytest.mark.spec("CAP-83")
@pytest.mark.skipif(os.name != "posix", reason="needs a shell with pipes")
@pytest.mark.parametrize(
    ("redirection", "status", "told"),
    [
        pytest.param("| head -n 1", 0, "", id="head"),
        pytest.param("> /dev/full", 1, "the printed log is not whole: [Errno 28]", id="full-disk"),
    ],
)
def test_the_command_survives_a_broken_standard_output(
    tmp_path: Path, redirection: str, status: int, told: str
) -> None:
    (tmp_path / "w.py").write_text(
        "import torch, tensorcap\n"
        "def f():\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(300)])\n"
        "    return tensorcap.Workload(model, (torch.ones(1, 4),))\n"
    )
    search = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    line = f'("$0" -m tensorcap_cli capture torch w.py:f -o a.h5 --print; echo "status $?" >&2) {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert f"status {status}\n" in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        assert archive.is_complete
        assert len(archive.records) == 602
