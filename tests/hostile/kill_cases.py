"""Commands that write, and what is right after a kill before any of their steps in the file system.

The old or the new output is there; or what a killed writer had confirmed is saved by `tcap recover`. Then the
same command leaves what it leaves when nothing kills it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from tensorcap_cli.main import main
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, UnfinishedArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path
from tensorcap_formats.writing import Writer
from tensorcap_formats.writing.journal import read_journal
from tests.support.archives import write_archive

ARCHIVES = (".h5", ".zarr", ".safetensors")
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
    packages: tuple[str, ...] = ()
    has_times: bool = False  # in its output, which then is another in each run
    least_kills: int = 2  # it is built beside its place, and renamed


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
    if path.suffix in ARCHIVES:
        with open_archive(path) as archive:
            return {record.key.text: archive.read(record).tobytes() for record in archive.records}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in files}


def state(case: Case, path: Path) -> object:
    """What is compared of an output: its content, or the names in it if it has times."""
    found = content_now(path)
    return found if found is None or not case.has_times else sorted(found)


def content_now(path: Path) -> Content | None:
    """The content; None also if `tcap recover` has to say first what it is."""
    try:
        return content(path)
    except UnfinishedArchiveError:
        return None


def recover_if_told(path: Path) -> None:
    try:
        open_archive(path).close()
    except NotAnArchiveError:
        assert not path.exists()
    except UnfinishedArchiveError:
        assert run(path.parent, f"recover {path.name}") == 0


def check_kills(name: str, case: Case, folder: Path, *options: str) -> int:
    """Kill a command before each of its steps, in folders below an empty one.

    Args:
        name: Of the case.
        case: The command.
        folder: The empty one.
        options: Of `kill_at_steps`.

    Returns:
        How many kills there were.

    Raises:
        AssertionError: Something was lost, or stays.
    """
    start = folder / "start"
    start.mkdir()
    write_archive(start / "new.h5", NEW)
    write_archive(start / "other.h5", OTHER)
    case.prepare(start)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.kill_at_steps", *options, str(folder), *case.command.split()],
        check=False,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    kills = sorted(folder.glob("kill-*"))
    assert len(kills) >= case.least_kills, f"{name}: is not built beside its place, and renamed"
    for killed in kills:
        _check_one(case, killed, folder / "end")
        shutil.rmtree(killed)
    return len(kills)


def _check_one(case: Case, killed: Path, end: Path) -> None:
    """Check what a kill left, run the command again, and check what that leaves."""
    start = end.with_name("start")
    is_recovery = case.command.startswith("recover")
    archive = killed / case.command.split()[1]
    for output in case.outputs:
        path = killed / output
        found = state(case, path)
        if is_recovery:
            assert journal_path(archive).exists() or found == state(case, end / output), killed.name
        elif case.command.startswith("capture"):
            assert found in (None, state(case, start / output), state(case, end / output)), killed.name
            save_confirmed(path, end / output)
        else:
            if path.suffix in ARCHIVES:
                recover_if_told(path)
                found = state(case, path)
            assert found in [state(case, place / output) for place in (start, end)], killed.name
    if not is_recovery or journal_path(archive).exists():
        assert (
            run(killed, case.command) in {0, 1, 2} if case.has_times else run(killed, case.command) in {0, 1}
        )
    assert names(killed) == names(end), f"{killed.name}: {names(killed)}, expected {names(end)}"
    for output in case.outputs:
        assert state(case, killed / output) == state(case, end / output), killed.name


def names(folder: Path) -> list[str]:
    """What is in a folder, without what Python compiled."""
    return sorted(name for name in os.listdir(folder) if name != "__pycache__")


def save_confirmed(path: Path, end: Path) -> None:
    """Recover what a killed capture had confirmed: all of that, and nothing that is not right."""
    if not journal_path(path).exists():
        return
    try:
        confirmed = {placed.record.key.text for placed in read_journal(path).placed}
    except CorruptArchiveError:  # killed before its first line
        confirmed = set()
    saved = path.with_name("saved.h5")
    status = run(path.parent, f"recover {path.name} -o {saved.name}")
    assert status == 0 or not confirmed
    if status == 0 and saved.exists():
        right, got = content(end) or {}, content(saved) or {}
        assert confirmed <= got.keys()
        assert got.items() <= right.items()
        saved.unlink()


def _grid() -> dict[str, Case]:
    """The commands that write archives, in each container, in the place of an older one and of none."""
    cases: dict[str, Case] = {}
    for suffix in (".h5", ".zarr", ".safetensors"):
        for name, add in (("", add_old(f"out{suffix}")), ("new ", lambda folder: None)):
            out = f"out{suffix}"
            cases |= {
                f"convert to a {name}{suffix}": Case(f"convert new.h5 {out}", (out,), add),
                f"import a {name}{suffix}": Case(f"import dump -o {out}", (out,), both(add_dump, add)),
                f"merge to a {name}{suffix}": Case(
                    f"merge r.rank0.h5 r.rank1.h5 -o {out}", (out,), both(add_ranks, add)
                ),
                f"capture to a {name}{suffix}": Case(
                    f"capture torch model.py:make -o {out}", (out,), both(add_model, add), ("torch",)
                ),
            }
        cases[f"recover a {suffix}"] = Case(
            f"recover out{suffix}", (f"out{suffix}",), add_killed(f"out{suffix}")
        )
        for other in (".h5", ".zarr", ".safetensors"):
            command = f"recover out{suffix} -o saved{other}"
            cases[f"recover a {suffix} as {other}"] = Case(
                command, (f"saved{other}",), add_killed(f"out{suffix}")
            )
    for compress in ("zstd", "blosc2"):
        command = f"convert new.h5 out.h5 --codec {compress}"
        cases[f"convert --codec {compress}"] = Case(
            command, ("out.h5",), add_old("out.h5"), ("hdf5plugin",), least_kills=1
        )  # the HDF5 library opens what it writes
    cases["convert to a .npz"] = Case("convert new.h5 out.npz", ("out.npz",))
    for form in ("torch", "model-explorer"):
        command = f"export new.h5 dump --format {form}"
        cases[f"export --format {form}"] = Case(
            command, ("dump",), packages=("torch",) if form == "torch" else ()
        )
    cases["verify"] = Case("verify new.h5 other.h5 -o report", ("report",), has_times=True)
    cases["verify --force"] = Case(
        "verify new.h5 other.h5 -o report --force",
        ("report",),
        lambda folder: run(folder, "verify other.h5 new.h5 -o report"),
        has_times=True,
    )
    cases["report --markdown"] = Case("report new.h5 other.h5 --markdown -o report.md", ("report.md",))
    cases["align to .json"] = Case("align new.h5 other.h5 -o map.json --force", ("map.json",))
    return cases


def both(one: Callable[[Path], object], other: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: (one(folder), other(folder))


def add_model(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)


MODEL = """
import torch
import tensorcap


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    return tensorcap.Workload(model, (torch.ones(2, 4),))
"""


ALL_CASES = {**CASES, **_grid()}
