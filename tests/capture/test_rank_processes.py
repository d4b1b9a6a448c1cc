"""A command on several ranks: processes that know of each other, and end together."""

from __future__ import annotations

import os
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
def test_what_has_the_name_of_a_log_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tgt.rank1.log").write_text("precious")
    run_on_ranks(python("print('chatter')"), logs(tmp_path, 2))
    with pytest.raises(CaptureError, match="no shard") as refused:
        run_on_ranks(python("time.sleep(60) if rank == 0 else sys.exit('no shard')"), logs(tmp_path, 2))
    assert str(tmp_path / "tgt.rank1.1.log") in (refused.value.hint or "")
    assert (tmp_path / "tgt.rank1.log").read_text() == "precious"


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


@pytest.mark.spec("NRN-154")
def test_a_process_that_ends_without_its_archive_has_failed(tmp_path: Path) -> None:
    outputs = [tmp_path / f"tgt.rank{rank}.h5" for rank in range(2)]
    outputs[1].write_text("of an earlier run")
    os.utime(outputs[1], (1, 1))
    code = f"if rank == 0:\n    open({str(outputs[0])!r}, 'w').close()\n    time.sleep({SECONDS})"
    with pytest.raises(
        CaptureError, match="rank 1 of 2 ended before its archive was written: it printed nothing"
    ):
        run_on_ranks(python(code), logs(tmp_path, 2), outputs)


@pytest.mark.spec("NRN-154")
def test_the_rank_that_takes_others_with_it_is_the_cause(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = (
        "if rank == 1:\n    print('[rank1]: ValueError: no weights', flush=True)\n"
        f"    open({str(done)!r}, 'w').close()\n"
        "    print('[rank1]: tensorcap: what was captured until then is in x', flush=True); os._exit(1)\n"
        f"while not os.path.exists({str(done)!r}): time.sleep(0.005)\n"
        "time.sleep(0.02)\nprint('Connection reset by peer', flush=True); os._exit(1)"
    )
    with pytest.raises(CaptureError, match="rank 1 of 2 ended with status 1: ValueError: no weights"):
        run_on_ranks(python(code), logs(tmp_path, 2))
