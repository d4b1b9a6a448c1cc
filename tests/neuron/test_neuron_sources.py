"""Sources of NxD Inference in a folder that a user names, and stand-ins for the runtime that they import.

The sources are of our own, a few lines each, under the names of the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import tensorcap
from tensorcap.adapters.neuron import explain_import_error, stand_in_calls, use_neuron_sources
from tensorcap_formats.errors import CaptureError, UsageError

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
NXD, NXDI = "neuronx_distributed", "neuronx_distributed_inference"
SOURCES = {
    f"neuronx-distributed/src/{NXD}/__init__.py": "",
    f"neuronx-distributed/src/{NXD}/_version.py": '__version__ = "0.18.0"\n',
    f"neuronx-distributed/src/{NXD}/groups.py": """
        from neuronxcc.nki._pre_prod_kernels.collectives import CollectivesConfig
        from torch_neuronx.utils import get_platform_target

        def pairs():
            return CollectivesConfig(replica_groups=[[0]]).pairs[0], get_platform_target()
        """,
    f"neuronx-distributed-inference/src/{NXDI}/__init__.py": "",
    f"neuronx-distributed-inference/src/{NXDI}/_version.py": '__version__ = "0.9.0"\n',
    f"neuronx-distributed-inference/src/{NXDI}/net.py": """
        from typing import Optional

        import nki
        import nki.language as nl
        import torch
        from nkilib.core.moe import MoE
        from torch import nn
        from torch_neuronx.xla_impl.ops import Argmax
        from neuronx_distributed.groups import pairs

        KINDS = (nl.float32, Optional[torch.classes.neuron.SPMDModel], nl.int8 | None)

        @nki.jit
        def kernel(x):
            return nl.exp(x)

        @nki.jit(mode="trace")
        def traced(x):
            return nl.exp(x)

        class Experts(MoE):
            pass

        class Net(nn.Module):
            def __init__(self, ways=()):
                super().__init__()
                self.ways = ways
                self.linear = nn.Linear(2, 2)

            def forward(self, x):
                pairs()
                return self.linear(x)
        """,
}
FILE = f"{NXDI}/net.py"


def write(folder: Path, sources: Mapping[str, str]) -> Path:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two checkouts in a folder; what was imported of them, and the stand-ins, are gone behind the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield write(tmp_path / "checkouts", SOURCES)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (NXD, NXDI, "neuronxcc", "nki", "nkilib", "torch_neuronx"):
            del sys.modules[name]


@pytest.fixture
def net(sources: Path) -> Any:
    use_neuron_sources([str(sources)])
    return import_module(f"{NXDI}.net")


def line_of(name: str) -> int:
    """The line of this function in this file, in which a lambda of `USES` calls."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(text, 1) if line.startswith(f'    "{name}": '))


USES: dict[str, Callable[[Any], Any]] = {
    "kernel": lambda net: net.kernel(1.0),
    "traced": lambda net: net.traced(1.0),
    "Argmax": lambda net: net.Argmax.apply(1.0),
    "Experts": lambda net: net.Experts(),
    "truth": lambda net: bool(net.nl.is_on_device),
    "equal": lambda net: net.nl.float32 == "float32",
    "loop": lambda net: list(net.nl.affine_range),
    "with": lambda net: net.nl.scope.__enter__(),
    "runtime": lambda net: net.torch.classes.neuron.SPMDModel(),
}
NAMES = {
    "kernel": f"{NXDI}.net.kernel",
    "traced": f"{NXDI}.net.traced",
    "Argmax": "torch_neuronx.xla_impl.ops.Argmax.apply",
    "Experts": "Experts, which derives from nkilib.core.moe.MoE,",
    "truth": "nki.language.is_on_device",
    "equal": "nki.language.float32",
    "loop": "nki.language.affine_range",
    "with": "nki.language.scope",
    "runtime": "torch.classes.neuron.SPMDModel",
}


@pytest.mark.spec("NRN-171")
@pytest.mark.parametrize("use", USES)
def test_what_would_compute_with_a_stand_in_is_refused_with_its_name_and_place(net: Any, use: str) -> None:
    with pytest.raises(CaptureError) as error:
        USES[use](net)
    place = f"{Path(__file__).name}:{line_of(use)}"
    assert str(error.value) == (
        f"{place}: {NAMES[use]} is a stand-in, expected a port that a CPU runs without it"
    )


@pytest.mark.spec("NRN-171")
def test_a_short_list_of_calls_is_answered_and_recorded(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    before = {(call.name, call.place): call.times for call in stand_in_calls()}
    assert net.pairs()[1] == "trn2"
    net.pairs()
    added = {
        call.name: call.times - before.get((call.name, call.place), 0)
        for call in stand_in_calls()
        if call.place == f"{NXD}/groups.py:6"
    }
    assert added == {
        "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig": 2,
        "torch_neuronx.utils.get_platform_target": 2,
    }


@pytest.mark.spec("NRN-171")
def test_an_installed_package_does_not_see_stand_ins(net: Any) -> None:
    code = compile("import libneuronxla", str(Path(pytest.__file__)), "exec")
    with pytest.raises(ModuleNotFoundError):
        exec(code, {"__name__": "pytest"})


@pytest.mark.spec("NRN-170")
def test_sources_that_are_missing_or_doubled_are_said_so(sources: Path, tmp_path: Path) -> None:
    one = sources / "neuronx-distributed"
    with pytest.raises(UsageError) as error:
        use_neuron_sources([str(one)])
    assert str(error.value) == (
        f"--neuron-src {one}: there is no package {NXDI}, expected it there or in src, *, */src"
    )
    copy = write(tmp_path / "copy", SOURCES)
    with pytest.raises(UsageError) as error:
        use_neuron_sources([str(sources), str(copy)])
    checkout = "neuronx-distributed-inference/src"
    assert str(error.value) == (
        f"--neuron-src {sources} and {copy}: {NXDI} is in {sources / checkout} and {copy / checkout}, "
        "expected one of them"
    )


@pytest.mark.spec("NRN-170")
@pytest.mark.parametrize("form", ["{0}", "{0}/neuronx-distributed;{0}/neuronx-distributed-inference/src"])
def test_folders_of_checkouts_checkouts_and_their_folders_are_searched(sources: Path, form: str) -> None:
    use_neuron_sources(form.format(sources).split(";"))
    assert import_module(f"{NXDI}.net").__file__ == str(
        sources / "neuronx-distributed-inference" / "src" / NXDI / "net.py"
    )


def failed_import(sources: Path, text: str) -> ImportError:
    write(sources, {f"neuronx-distributed-inference/src/{NXDI}/broken.py": text})
    with pytest.raises(ImportError) as error:
        import_module(f"{NXDI}.broken")
    return error.value


@pytest.mark.spec("NRN-172")
def test_sources_of_another_release_are_said_so_with_those_that_were_tried(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / f"neuronx-distributed/src/{NXD}/_version.py").write_text('__version__ = "0.16.0"\n')
    monkeypatch.setattr("tensorcap.adapters.neuron.sources.version", {"transformers": "4.51.3"}.__getitem__)
    monkeypatch.setattr("tensorcap.adapters.neuron.sources.PackageNotFoundError", KeyError)
    releases = f"{NXDI} 0.9.0 (tried: 0.9), {NXD} 0.16.0 (tried: 0.18), transformers 4.51.3 (tried: 4.57)"
    assert use_neuron_sources([str(sources)]) == f"other releases than were tried: {releases}"
    error = failed_import(sources, "from neuronx_distributed.groups import KVQuantizationConfig")
    assert str(explain_import_error(error)) == (
        f"{NXDI}/broken.py:1: cannot import name 'KVQuantizationConfig' from '{NXD}.groups': "
        f"releases that do not fit each other: {releases}"
    )


@pytest.mark.spec("NRN-172")
def test_a_package_that_sources_need_is_named_and_what_has_no_part_in_it_stays(sources: Path) -> None:
    use_neuron_sources([str(sources)])
    error = failed_import(sources, "\nimport no_such_package.of_theirs")
    explained = explain_import_error(error)
    assert str(explained) == f"{NXDI}/broken.py:2: imports no_such_package, which is not installed"
    assert explained is not None
    assert explained.hint == "Sources of NxD need it: pip install no_such_package"
    with pytest.raises(ImportError) as other:
        import_module("no_such_package")
    assert explain_import_error(other.value) is None


@pytest.mark.spec("NRN-172")
def test_sources_that_were_not_named_are_asked_for() -> None:
    with pytest.raises(ImportError) as error:
        import_module(NXDI)
    explained = explain_import_error(error.value)
    assert explained is not None
    assert str(explained).endswith(f": imports {NXDI}, which is not installed, expected --neuron-src DIR")
    assert "aws-neuron/neuronx-distributed-inference" in (explained.hint or "")


def run(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run `tcap`; return its status and the lines of its errors."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.spec("NRN-170", "NRN-171", "NRN-172")
def test_a_port_is_captured_and_its_archive_lists_stand_ins(sources: Path, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "port.py": """
                import tensorcap
                import torch
                from neuronx_distributed_inference.net import Net, kernel

                def port():
                    return tensorcap.Workload(Net(), {"x": torch.ones(1, 2)})

                class OnDevice(Net):
                    def forward(self, x):
                        return kernel(x)

                def device():
                    return tensorcap.Workload(OnDevice(), {"x": torch.ones(1, 2)})
                """
        },
    )
    capture = ("capture", "neuron", "-o", "port.h5")
    source = ("--neuron-src", str(sources))
    status, lines = run(tmp_path, *capture, "port.py:port", *source)
    note = (
        "stand-ins for the Neuron runtime, which is not installed, were called: "
        "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig (1 call: configuration that only "
        "kernels read); torch_neuronx.utils.get_platform_target (1 call: the name of a device, for sizes of "
        "kernels)"
    )
    assert status == 0
    with tensorcap.open_archive(tmp_path / "port.h5") as archive:
        assert archive.info.notes == (note,)
    status, lines = run(tmp_path, "capture", "neuron", "-o", "device.h5", "port.py:device", *source)
    assert status == 1
    assert (
        f"Error: port.py:11: {NXDI}.net.kernel is a stand-in, expected a port that a CPU runs without it"
        in lines
    )
