"""Commands that write, killed before each of their steps in the file system: the old or the new one is there.

Then the same command, after `tcap recover` where it is told to, leaves what it leaves when nothing kills it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap_cli.main import main
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import NotAnArchiveError, UnfinishedArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path
from tensorcap_formats.writing import Writer
from tests.support.archives import write_archive

Content = dict[str, bytes]
OLD = {"previous": np.arange(3, dtype="f4")}
NEW = {"model.norm": np.arange(6, dtype="f4").reshape(2, 3), "model.lm_head": np.ones((4, 5), "f4")}
OTHER = {"model.norm": np.arange(6, dtype="f4").reshape(2, 3), "model.lm_head": np.full((4, 5), 2, "f4")}


@dataclass(frozen=True)
class Case:
    """A command, and the outputs that it replaces."""

    command: str
    outputs: tuple[str, ...]
    prepare: Callable[[Path], object] = lambda folder: None


def add_dump(folder: Path) -> None:
    add_old("out.zarr")(folder)
    (folder / "dump").mkdir()
    for name, array in NEW.items():
        np.save(folder / "dump" / f"{name}.npy", array)


def add_ranks(folder: Path) -> None:
    for rank in range(2):
        write_archive(folder / f"r.rank{rank}.h5", NEW, run={"ranks": {"rank": rank, "size": 2}})
    add_old("out.zarr")(folder)


def add_killed(name: str) -> Callable[[Path], object]:
    def add(folder: Path) -> None:
        (folder / "out.h5").unlink(missing_ok=True)
        writer = Writer(folder / name)
        for site, array in NEW.items():
            writer.add(Key(site, "output"), array, dtype("float32"), array.shape)
        writer.abandon()

    return add


def add_old(name: str) -> Callable[[Path], object]:
    return lambda folder: write_archive(folder / name, OLD)


def add_texts(*names: str) -> Callable[[Path], object]:
    """Results of a comparison of other archives, in the place of those of this one."""

    def add(folder: Path) -> None:
        options = [part for name in names for part in (f"--{name}", f"result.{name}")]
        write_archive(folder / "old.h5", OLD)
        run(folder, f"compare old.h5 old.h5 {' '.join(options)}")
        (folder / "old.h5").unlink()

    return add


CASES = {
    "convert to .h5": Case("convert new.h5 out.h5", ("out.h5",), add_old("out.h5")),
    "convert to .zarr": Case("convert new.h5 out.zarr", ("out.zarr",), add_old("out.zarr")),
    "convert to .safetensors": Case(
        "convert new.h5 out.safetensors", ("out.safetensors",), add_old("out.safetensors")
    ),
    "convert to a new .zarr": Case("convert new.h5 out.zarr", ("out.zarr",)),
    "recover": Case("recover out.h5", ("out.h5",), add_killed("out.h5")),
    "recover a .zarr": Case("recover out.zarr", ("out.zarr",), add_killed("out.zarr")),
    "recover elsewhere": Case("recover out.h5 -o saved.zarr", ("saved.zarr",), add_killed("out.h5")),
    "import": Case("import dump -o out.zarr", ("out.zarr",), add_dump),
    "align": Case("align new.h5 other.h5 -o map.toml --force", ("map.toml",)),
    "compare --save": Case("compare new.h5 other.h5 --save result.save", ("result.save",), add_texts("save")),
    "compare --csv --junit": Case(
        "compare new.h5 other.h5 --csv result.csv --junit result.junit",
        ("result.csv", "result.junit"),
        add_texts("csv", "junit"),
    ),
    "export": Case("export new.h5 dump --format max", ("dump",)),
    "show --npy": Case("show new.h5::0/model.norm/output --npy x.npy --force", ("x.npy",)),
    "merge": Case("merge r.rank0.h5 r.rank1.h5 -o out.zarr", ("out.zarr",), add_ranks),
    "report --png": Case("report new.h5 other.h5 --png -o plots", ("plots",)),
    "report": Case("report new.h5 other.h5 -o report.html", ("report.html",)),
}


def run(folder: Path, command: str) -> int:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(main, command.split()).exit_code
    finally:
        os.chdir(before)


def content(path: Path) -> Content | None:
    """Tensors of an archive or bytes of other files, by name; None if there is nothing."""
    if not path.exists():
        return None
    if path.suffix in {".h5", ".zarr", ".safetensors"}:
        with open_archive(path) as archive:
            return {record.key.text: archive.read(record).tobytes() for record in archive.records}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in files}


def recover_if_told(path: Path) -> None:
    try:
        open_archive(path).close()
    except NotAnArchiveError:
        assert not path.exists()
    except UnfinishedArchiveError:
        assert run(path.parent, f"recover {path.name}") == 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_a_command_killed_before_any_of_its_steps_loses_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    start = tmp_path / "start"
    start.mkdir()
    write_archive(start / "new.h5", NEW)
    write_archive(start / "other.h5", OTHER)
    case.prepare(start)
    subprocess.run(
        [sys.executable, "-m", "tests.hostile.kill_at_steps", str(tmp_path), *case.command.split()],
        check=True,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
    )
    kills = sorted(tmp_path.glob("kill-*"))
    assert len(kills) >= 2  # it is built beside its place, and renamed
    for folder in kills:
        for output in case.outputs:
            path = folder / output
            archive = folder / case.command.split()[1]
            if case.command.startswith("recover"):
                assert journal_path(archive).exists() or content(path) == content(tmp_path / "end" / output)
            else:
                if path.suffix in {".h5", ".zarr", ".safetensors"}:
                    recover_if_told(path)
                expected = [content(tmp_path / part / output) for part in ("start", "end")]
                assert content(path) in expected, f"{folder.name}: {output} is neither"
        if not case.command.startswith("recover") or journal_path(folder / case.command.split()[1]).exists():
            assert run(folder, case.command) in {0, 1}, folder.name
        assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "end")), folder.name
        for output in case.outputs:
            assert content(folder / output) == content(tmp_path / "end" / output), folder.name
