"""Every file and folder that a command writes: nothing of anybody else is written over."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Final

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main
from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer
from tests.support.archives import write_archive

X: Final = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
ARCHIVES: Final = (".h5", ".zarr", ".safetensors", ".npz")


@dataclass(frozen=True)
class Output:
    """A command, the name of what it writes, which stands as `{}` in it, and of something that it reads."""

    command: str
    name: str
    input: str = "ref.h5"
    package: str = "numpy"  # without which it writes nothing

    @property
    def is_text(self) -> bool:
        """Whether it is a stream of text, which may go to a pipe or a device."""
        return Path(self.name).suffix in {".json", ".toml", ".csv", ".xml", ".html", ".md"}


OUTPUTS: Final = {
    **{f"convert to {suffix}": Output("convert ref.h5 {}", f"out{suffix}") for suffix in ARCHIVES},
    **{f"import to {suffix}": Output("import dump -o {}", f"out{suffix}", "dump") for suffix in ARCHIVES[:3]},
    **{
        f"merge to {suffix}": Output("merge r.rank0.h5 r.rank1.h5 -o {}", f"out{suffix}", "r.rank1.h5")
        for suffix in ARCHIVES[:3]
    },
    **{f"recover to {suffix}": Output("recover dead.h5 -o {}", f"out{suffix}") for suffix in ARCHIVES[:3]},
    "show --npy": Output("show ref.h5::0/layers.0.mlp/output --npy {}", "out.npy"),
    "compare --save": Output("compare ref.h5 tgt.h5 --save {}", "out.json"),
    "compare --csv": Output("compare ref.h5 tgt.h5 --csv {}", "out.csv"),
    "compare --junit": Output("compare ref.h5 tgt.h5 --junit {}", "out.xml"),
    "align to .toml": Output("align ref.h5 tgt.h5 -o {}", "out.toml"),
    "align to .json": Output("align ref.h5 tgt.h5 -o {}", "out.json"),
    "report": Output("report ref.h5 tgt.h5 -o {}", "out.html", package="jinja2"),
    "report --markdown": Output("report ref.h5 tgt.h5 --markdown -o {}", "out.md", package="jinja2"),
    "report --png": Output("report ref.h5 tgt.h5 --png -o {}", "out", package="matplotlib"),
    "plan": Output("plan modules.txt --points points.txt -o {}", "out.json", "modules.txt"),
    "calibrate": Output("calibrate of20.h5 a20.h5 of20.h5 b20.h5 -o {}", "out.toml", "of20.h5"),
    "verify": Output("verify ref.h5 tgt.h5 -o {}", "out"),
    "export --format max": Output("export ref.h5 {} --format max", "out"),
    "export --format torch": Output("export ref.h5 {} --format torch", "out", package="torch"),
    "export --format neuron": Output(
        "export ref.h5 {} --format neuron --only */output", "out", package="torch"
    ),
    "export --format model-explorer": Output("export ref.h5 {} --format model-explorer", "out"),
    "equivalence localize --stage3": Output(
        "equivalence localize --from stage2.json --stage3 {}", "out.json"
    ),
    "equivalence init": Output(
        "equivalence init experiment --source-model-path m.py:ref --target-modeling-file m.py "
        "--target-causal-class target",
        "experiment/equivalence.toml",
        "m.py",
    ),
}
TAKEN: Final[dict[str, Callable[[Path], object]]] = {
    "a text": lambda path: path.write_text("precious\n"),
    "a JSON object": lambda path: path.write_text('{"precious": 1}\n'),
    "a link to a text": lambda path: link(path, "precious.txt"),
    "a folder": lambda path: add_folder(path),
    "an archive": lambda path: link(path, "precious.h5"),
}


def link(path: Path, name: str) -> None:
    path.symlink_to(f"../{name}" if path.parent.name == "experiment" else name)


def add_folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("precious\n")


def run(folder: Path, line: str) -> tuple[int, str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(main, line.split())
    finally:
        os.chdir(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of everything that the commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, error in (
        ("ref", 0),
        ("tgt", 2e-3),
        ("precious", 0.5),
        ("of20", 0),
        ("a20", 2e-3),
        ("b20", 3e-3),
    ):
        sites = [f"layers.{number}.mlp" for number in range(20 if name.endswith("20") else 2)]
        tensors = {site: X * np.float32(1 + error) for site in sites}
        write_archive(folder / f"{name}.h5", tensors, run={"dtype": "bfloat16" if error else "float32"})
    for rank in range(2):
        write_archive(folder / f"r.rank{rank}.h5", {"m": X}, run={"ranks": {"rank": rank, "count": 2}})
    writer = Writer(folder / "dead.h5")
    writer.add(Key("m", "output"), bits_of(X), dtype_of(X), X.shape)
    writer.abandon()
    (folder / "dump").mkdir()
    np.save(folder / "dump/m.npy", X)
    (folder / "precious.txt").write_text("precious\n")
    (folder / "modules.txt").write_text("layers: ModuleList\nlayers.0: Layer\n")
    (folder / "points.txt").write_text("layers.0\n")
    entry = {"component": "mlp", "r_ratio": 7.0, "passed": False}
    results = {"results": [entry], "passed": 0, "failed": 1, "total": 1}
    (folder / "stage2.json").write_text(json.dumps(results))
    (folder / "experiment").mkdir()
    (folder / "m.py").write_text("target = None\n")
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path) -> Path:
    """Another folder of the same."""
    return Path(shutil.copytree(inputs, tmp_path / "work"))


def content(folder: Path) -> dict[str, bytes | str]:
    """All files and links below a folder, and what is in them."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_there_and_is_none_of_its_kind_stays(name: str, folder: Path) -> None:
    output = OUTPUTS[name]
    pytest.importorskip(output.package)
    path = folder / output.name
    kinds: dict[str, Callable[[Path], object]] = {**TAKEN, "an input": lambda path: link(path, output.input)}
    for kind, put in kinds.items():
        if kind == "an archive" and path.suffix in ARCHIVES:
            continue  # an older archive of ours is replaced
        put(path)
        before = content(folder)
        status, text = run(folder, output.command.format(output.name))
        assert status in {1, 2, 3}, f"{kind}: {text}"
        assert content(folder) == before, kind
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    status, text = run(folder, output.command.format(output.name))
    assert status in {0, 1}, text
    assert path.exists(), text


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device that takes everything: one of the test's own, if root could replace the system's."""
    path = tmp_path_factory.mktemp("devices") / "null"
    if os.geteuid():
        return Path(os.devnull)
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
        path.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"root may not make devices here: {error}")
    return path


@pytest.mark.parametrize("name", OUTPUTS)
def test_pipes_and_devices_stay_what_they_are(name: str, folder: Path, null: Path) -> None:
    output = OUTPUTS[name]
    pytest.importorskip(output.package)
    path = folder / output.name
    path.symlink_to(null)
    status, text = run(folder, output.command.format(output.name))
    assert status in ({0, 1} if output.is_text else {1, 2, 3}), text
    assert path.is_symlink()
    assert stat.S_ISCHR(null.stat().st_mode)
    path.unlink()
    os.mkfifo(path)
    before = content(folder)
    with reading(path) as received:
        status, text = run(folder, output.command.format(output.name))
        assert status in ({0, 1} if output.is_text else {1, 2, 3}), text
    assert bool(received) == output.is_text
    assert stat.S_ISFIFO(os.stat(path).st_mode)
    assert content(folder) == before


@contextmanager
def reading(pipe: Path) -> Iterator[bytearray]:
    """Read what is written to a pipe, whether or not anybody opens it, for as long as a block lasts."""
    received, is_over = bytearray(), Event()
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(0.01)
            with suppress(BlockingIOError):
                received.extend(os.read(descriptor, 1 << 20))

    thread = Thread(target=read)
    thread.start()
    try:
        yield received
    finally:
        is_over.set()
        thread.join()
        os.close(descriptor)
