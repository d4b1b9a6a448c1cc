"""`tcap capture coreai`: assets and conversions from the command line, one model in two configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("coreai_torch")

import tensorcap
from tensorcap_cli.main import main

PORT = """
import torch
import tensorcap


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(2, 8)
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x, kinds):
        return torch.nn.functional.gelu(self.up(x + self.table(kinds)))


def module():
    return tensorcap.Workload(Net().eval(), {"x": torch.randn(2, 8), "kinds": torch.tensor([0, 1])})


def nothing():
    return tensorcap.Workload(len, ("abc",))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A port, its reference's capture, and its conversions to two precisions, with a capture of each."""
    folder = tmp_path_factory.mktemp("capture")
    (folder / "port.py").write_text(PORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("capture", "torch", "port.py:module", "--level", "export", "-o", "ref.h5")
        run("capture", "coreai", "--from", "port.py:module", "--keep", "net.aimodel", "-o", "tgt.h5")
        options = ["--precision", "fp16", "--keep", "half.aimodel"]
        run("capture", "coreai", "--from", "port.py:module", *options, "-o", "half.h5")
    return folder


@pytest.fixture
def tcap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(folder)
    return run


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def settings(path: str) -> Any:
    with tensorcap.open_archive(path) as archive:
        return archive.info.settings


def read(path: str, key: str) -> Any:
    with tensorcap.open_archive(path) as archive:
        return archive.read(archive.get(key))


Tcap = Callable[..., Result]


@pytest.mark.slow
@pytest.mark.spec("CAI-44", "CAI-53")
def test_a_function_is_converted_and_its_settings_are_kept(tcap: Tcap) -> None:
    assert settings("half.h5") == {
        "device_target": "host",
        "function": "main",
        "compute_units": "cpu",
        "precision": "fp16",
        "mode": "debug",
        "inputs": "of the workload",
    }
    assert read("half.h5", "0/up:addmm/output").dtype == np.float16
    tcap("capture", "coreai", "net.aimodel", "--like", "tgt.h5", "-o", "again.h5")
    assert np.array_equal(read("again.h5", "0/@root/output"), read("tgt.h5", "0/@root/output"))
    assert settings("again.h5")["inputs"] == {"x": "of the archive", "kinds": "of the archive"}


@pytest.mark.slow
@pytest.mark.spec("CAI-44")
def test_show_tells_the_settings(tcap: Tcap) -> None:
    tcap("capture", "coreai", "net.aimodel", "--inputs", "ones", "--inputs", "x=zeros", "-o", "shown.h5")
    lines = tcap("show", "shown.h5").output.splitlines()
    (line,) = (line for line in lines if line.startswith("  settings"))
    assert line.split()[1:] == [
        "device_target=host",
        "function=main",
        "compute_units=cpu",
        "precision=fp32",
        "mode=debug",
        "inputs=x:zeros,kinds:ones",
    ]


@pytest.mark.slow
@pytest.mark.spec("CAI-44")
def test_a_function_draws_the_weights_that_it_draws_under_torch(tcap: Tcap) -> None:
    np.testing.assert_allclose(
        read("tgt.h5", "0/@root/output"), read("ref.h5", "0/@root/output"), rtol=0, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.spec("CAI-44")
@pytest.mark.parametrize(
    ("options", "x", "kinds", "kept"),
    [
        pytest.param(
            ["--inputs", "zeros"], np.zeros((2, 8)), [0, 0], {"x": "zeros", "kinds": "zeros"}, id="zeros"
        ),
        pytest.param(
            ["--inputs", "ones", "--inputs", "kinds=zeros"],
            np.ones((2, 8)),
            [0, 0],
            {"x": "ones", "kinds": "zeros"},
            id="each",
        ),
        pytest.param(
            ["--inputs", "x=random", "--inputs", "kinds=ones", "--seed", "7"],
            np.random.default_rng(7).standard_normal((2, 8)).astype("f4"),
            [1, 1],
            {"x": "random, seed 7", "kinds": "ones"},
            id="random",
        ),
        pytest.param(
            ["--inputs", "both.npz"],
            np.full((2, 8), 0.5),
            [1, 0],
            {"x": "both.npz", "kinds": "both.npz"},
            id="file",
        ),
        pytest.param(
            ["--inputs", "ones", "--inputs", "x=x.npy"],
            np.full((2, 8), 0.25),
            [1, 1],
            {"x": "x.npy", "kinds": "ones"},
            id="file of one",
        ),
    ],
)
def test_inputs_are_made_as_asked_for_and_said(
    options: list[str], x: Any, kinds: Any, kept: dict[str, str], tcap: Tcap
) -> None:
    np.savez("both.npz", x=np.full((2, 8), 0.5, np.float32), kinds=np.array([1, 0], np.int32))
    np.save("x.npy", np.full((2, 8), 0.25, np.float32))
    tcap("capture", "coreai", "net.aimodel", *options, "-o", "made.h5")
    assert np.array_equal(read("made.h5", "0/@root/input.x"), np.asarray(x, np.float32))
    assert np.array_equal(read("made.h5", "0/@root/input.kinds"), kinds)
    assert settings("made.h5")["inputs"] == kept


@pytest.mark.slow
@pytest.mark.spec("CAI-44")
def test_random_integers_are_rows_that_any_table_has(tcap: Tcap) -> None:
    tcap("capture", "coreai", "net.aimodel", "--inputs", "random", "-o", "random.h5")
    assert set(read("random.h5", "0/@root/input.kinds")) <= {0, 1}


@pytest.mark.slow
@pytest.mark.spec("CAI-46")
def test_a_run_is_repeated_with_its_settings_and_inputs(tcap: Tcap) -> None:
    options = ["--inputs", "random", "--seed", "3", "--only", "0/@root/*"]
    tcap("capture", "coreai", "net.aimodel", *options, "-o", "first.h5")
    tcap("capture", "coreai", "--like", "first.h5", "-o", "second.h5")
    with tensorcap.open_archive("first.h5") as first, tensorcap.open_archive("second.h5") as second:
        assert [r.key.text for r in second.records] == [r.key.text for r in first.records]
        assert second.info.workload == first.info.workload
        for record in first.records:
            assert np.array_equal(second.read(second.get(record.key.text)), first.read(record))
    tcap("capture", "coreai", "--like", "first.h5", "--inputs", "zeros", "-o", "third.h5")
    assert settings("third.h5")["inputs"] == {"x": "zeros", "kinds": "zeros"}


@pytest.mark.slow
@pytest.mark.spec("CAI-46")
def test_a_torch_run_is_repeated_as_a_conversion_on_its_inputs(tcap: Tcap) -> None:
    tcap("capture", "coreai", "--like", "ref.h5", "-o", "converted.h5")
    assert np.array_equal(read("converted.h5", "0/@root/input.x"), read("ref.h5", "0/@root/input.x"))
    assert "0/up:addmm/output" in [r.key.text for r in tensorcap.open_archive("converted.h5").records]


@pytest.mark.slow
@pytest.mark.spec("CAI-46")
def test_a_dry_run_lists_and_writes_nothing_and_json_is_one_object(tcap: Tcap, folder: Path) -> None:
    before = sorted(folder.iterdir())
    result = tcap("capture", "coreai", "net.aimodel", "--inputs", "ones", "--dry-run", "--json")
    assert "0/Linear-1:addmm/output" in {record["key"] for record in json.loads(result.stdout)["records"]}
    assert sorted(folder.iterdir()) == before
    tcap("capture", "coreai", "net.aimodel", "--inputs", "ones", "-o", "plain.h5")
    (folder / "plain.h5").unlink()


@pytest.mark.slow
@pytest.mark.spec("CAI-20", "CAI-21", "CAI-47", "CAI-53")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["net.aimodel"],
            "net.aimodel: no inputs for x, kinds, expected --inputs FILE, zeros, ones or random",
            id="no inputs",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "x=ones"],
            "net.aimodel: no inputs for kinds, expected --inputs FILE, zeros, ones or random",
            id="an input without",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "y=ones"],
            "net.aimodel: --inputs y=ones: no input 'y', expected one of: x, kinds",
            id="no such input",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--inputs", "zeros"],
            "net.aimodel: --inputs zeros: found 'ones' for all inputs too, expected one",
            id="two for all",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "lacks.npz"], "lacks.npz: no input 'kinds', found x", id="lacks"
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "more.npz"],
            "more.npz: found 'z', expected the inputs x, kinds",
            id="more",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--inputs", "x=wide.npy"],
            "net.aimodel: input x: found float32[2, 9], expected float32[2, 8]",
            id="shape",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--inputs", "kinds=floats.npy"],
            "net.aimodel: input kinds: found float32[2], expected int32[2]",
            id="dtype",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--inputs", "kinds=large.npy"],
            "net.aimodel: input kinds: found int64[2], expected int32[2]",
            id="integers without room",
        ),
        pytest.param(
            ["none.aimodel", "--inputs", "ones"],
            "none.aimodel: found nothing, expected a Core AI asset, a folder NAME.aimodel",
            id="no asset",
        ),
        pytest.param(
            ["net.onnx", "--inputs", "ones"],
            "net.onnx: expected NAME.aimodel or FILE.py:FUNCTION",
            id="another file",
        ),
        pytest.param(
            ["port.py:nothing"],
            "len: expected a torch module, an ExportedProgram or a CoreAIModel",
            id="another model",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--compute-units", "gpu"],
            "compute units 'gpu': SpecializationOptions of Core AI is for macOS only",
            id="compute units",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--device-target", "iPhone"],
            "device target 'iPhone': to run on another device is for macOS only",
            id="device target",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--precision", "fp16"],
            "net.aimodel: precision fp16: an asset has the precision it was converted in",
            id="precision of an asset",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--function", "decode"],
            "net.aimodel: no function 'decode', expected one of: main",
            id="function",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--num-hidden-layers", "2"],
            "net.aimodel: takes no --num-hidden-layers, which is for torch models",
            id="layers of an asset",
        ),
        pytest.param(
            ["net.aimodel", "--from", "port.py:module"],
            "MODEL net.aimodel and --from port.py:module are both what is run, expected one",
            id="two models",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "ones", "--keep", "other.aimodel"],
            "other.aimodel: there is nothing to keep, since net.aimodel is an asset already",
            id="keep an asset",
        ),
        pytest.param(
            ["net.aimodel", "--inputs", "randm"],
            "--inputs randm: found no such file, expected FILE, zeros, ones or random",
            id="a misspelt word",
        ),
        pytest.param([], "no model, expected MODEL or --like ARCHIVE", id="no model"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tcap: Tcap, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, kinds = np.ones((2, 8), np.float32), np.zeros(2, np.int32)
    np.savez("lacks.npz", x=x)
    np.savez("more.npz", x=x, kinds=kinds, z=kinds)
    np.save("wide.npy", np.ones((2, 9), np.float32))
    np.save("floats.npy", np.ones(2, np.float32))
    np.save("large.npy", np.array([0, 1 << 31]))
    result = tcap("capture", "coreai", *arguments, "-o", "bad.h5", status=2)
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert errors == [f"Error: {message}"]
    assert not Path("bad.h5").exists()


@pytest.mark.slow
@pytest.mark.spec("PRE-110")
def test_one_asset_in_two_precisions_differs_in_settings_that_explain_nothing(tcap: Tcap) -> None:
    for name in ("net", "half"):
        tcap("capture", "coreai", f"{name}.aimodel", "--like", "tgt.h5", "-o", f"of {name}.h5")
    text = tcap("preflight", "of net.h5", "of half.h5").output
    assert "settings precision: fp32 in the reference, fp16 in the target. Rounding differs" in text
    assert "these alone make outputs differ" not in text
    text = tcap("compare", "of net.h5", "of half.h5").output
    assert "Within rounding (not proven)." in text
    assert "tcap capture torch" not in text
    assert "also different: precision (fp32 / fp16)" in text


@pytest.mark.slow
@pytest.mark.spec("PRE-110")
def test_inputs_made_otherwise_are_told_by_their_values_and_side_by_side(tcap: Tcap) -> None:
    for kind in ("zeros", "ones"):
        tcap("capture", "coreai", "net.aimodel", "--inputs", kind, "-o", f"{kind}.h5")
    text = tcap("preflight", "zeros.h5", "ones.h5", status=1).output
    assert text.index("these alone make outputs differ") < text.index("inputs")
    assert (
        "settings inputs: x: zeros, kinds: zeros in the reference, x: ones, kinds: ones in the target."
        in text
    )


@pytest.mark.slow
def test_the_help_teaches(tcap: Tcap) -> None:
    text = tcap("capture", "coreai", "--help").output
    assert "tcap capture coreai net.aimodel --inputs inputs.npz -o tgt.h5" in text
    assert "tcap capture coreai --from port.py:module --precision fp16 --keep net.aimodel -o fp16.h5" in text
