"""A command on several ranks: processes that know of each other, and end together."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tensorcap.session import run_on_ranks
from tensorcap_formats.errors import CaptureError

SECONDS = 60  # that a process sleeps which nobody ends


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{code}"]


def logs(folder: Path, count: int) -> list[Path]:
    return [folder / f"tgt.rank{rank}.log" for rank in range(count)]


@pytest.mark.spec("NRN-153")
def test_each_process_has_the_environment_of_a_launcher(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    path = str(tmp_path / "out")
    run_on_ranks(
        python(f"open({path!r} + str(rank), 'w').write(' '.join(os.environ[n] for n in {names}))"),
        logs(tmp_path, 2),
    )
    first, second = (Path(f"{path}{rank}").read_text().split() for rank in range(2))
    assert (first[:4], second[:4]) == (["0", "0", "2", "127.0.0.1"], ["1", "1", "2", "127.0.0.1"])
    assert first[4] == second[4]
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.spec("NRN-154")
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("sys.exit('Error: no shard of rank 1')", "rank 1 of 3 ended with status 1: no shard of rank 1"),
        (
            "print('[rank1]: out of memory', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 of 3 died of SIGKILL: out of memory",
        ),
        ("os._exit(7)", "rank 1 of 3 ended with status 7: it printed nothing"),
    ],
)
def test_a_process_that_fails_ends_the_others(tmp_path: Path, end: str, text: str) -> None:
    paths, started = logs(tmp_path, 3), time.monotonic()
    with pytest.raises(CaptureError) as refused:
        run_on_ranks(python(f"if rank == 1:\n    {end}\ntime.sleep({SECONDS})"), paths)
    assert str(refused.value) == text
    assert refused.value.hint == f"The other ranks were ended; its log is {paths[1]}."
    assert time.monotonic() - started < SECONDS / 2
    assert list(tmp_path.iterdir()) == [paths[1]]
