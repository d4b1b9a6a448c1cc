"""Where two archives part is found by reading few of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry
from tensorcap.localization import Bisection, bisect, bisect_archives, localize
from tensorcap.workload import Workload
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

FLOAT32 = DTYPES["float32"]
SITES = [f"layers.{i}" for i in range(40)]


def run(path: Path, errors: Callable[[int], float], *, sites: list[str] = SITES, seed: int = 0) -> Path:
    """A run whose results are those of the reference but for a relative error of each."""
    tensors: dict[str, Array] = {}
    for i, site in enumerate(sites):
        values = np.random.default_rng(i).standard_normal((4, 16)).astype(np.float32)
        noise = np.random.default_rng(1000 * (seed + 1) + i).standard_normal((4, 16))
        output = (values * (1 + errors(i) * noise)).astype(np.float32)
        tensors |= {f"0/{site}/input.x": np.tanh(values), f"0/{site}/output": output}
    modules = [{"path": site, "class": "Layer"} for site in sites]
    return write_archive(path, tensors, run={"compute_dtype": "float32", "modules": modules})


def search(folder: Path, errors: Callable[[int], float]) -> Bisection:
    return bisect_archives(run(folder / "r.h5", lambda i: 0), run(folder / "t.h5", errors))


@pytest.mark.spec("BIS-1")
@pytest.mark.parametrize("first", [0, 1, 17, 38, 39])
def test_the_first_bad_result_is_found_in_about_log2_reads(tmp_path: Path, first: int) -> None:
    found = search(tmp_path, lambda i: 1e-7 if i < first else 0.3)
    assert found.first is not None
    assert (found.first.key, found.how, found.against) == (f"0/layers.{first}/output", "search", "")
    assert (found.last_green.key if found.last_green else "") == (
        f"0/layers.{first - 1}/output" if first else ""
    )
    results = [key for key in found.read if key.endswith("/output")]
    assert len(results) <= 1 + math.ceil(math.log2(40)) + 4
    assert found.results == 40
    assert found.exit_status == 1


@pytest.mark.spec("BIS-1")
def test_what_digests_settle_is_not_read(tmp_path: Path) -> None:
    found = search(tmp_path, lambda i: 0 if i < 30 else 0.3)
    assert found.first is not None
    assert found.first.key == "0/layers.30/output"
    assert all(int(key.split(".")[1].partition("/")[0]) >= 30 for key in found.read)
    alike = bisect_archives(tmp_path / "r.h5", tmp_path / "r.h5")
    assert (alike.first, alike.how, alike.read, alike.exit_status) == (None, "index", (), 0)


@pytest.mark.spec("BIS-3")
def test_results_that_recover_make_it_read_all_up_to_the_first_bad_one(tmp_path: Path) -> None:
    def errors(i: int) -> float:
        return 0.3 if 5 <= i < 15 or i >= 30 else 1e-7

    found = search(tmp_path, errors)
    assert found.first is not None
    assert (found.first.key, found.how) == ("0/layers.5/output", "scan")
    assert int(found.against.split(".")[1].partition("/")[0]) in (*range(5, 15), *range(15, 30))


@pytest.mark.spec("BIS-3")
def test_a_last_result_that_is_green_is_not_taken_for_all(tmp_path: Path) -> None:
    found = search(tmp_path, lambda i: 0.3 if 10 <= i < 20 else 1e-7)
    assert found.first is not None
    assert (found.first.key, found.how, found.against) == ("0/layers.10/output", "scan", "0/layers.13/output")
    clean = search(tmp_path, lambda i: 1e-7)
    assert (clean.first, clean.how, len(clean.read)) == (None, "search", 3)


@pytest.mark.spec("BIS-2")
def test_a_tolerance_says_what_is_bad(tmp_path: Path) -> None:
    one, other = run(tmp_path / "r.h5", lambda i: 0), run(tmp_path / "t.h5", lambda i: 1e-3 * (i + 1))
    found = bisect_archives(one, other, rtol=0.1)
    with open_archive(one) as reference, open_archive(other) as target:
        worst = [
            float(np.max(np.abs(target.load(t) - reference.load(r)) / np.abs(reference.load(r))))
            for r, t in zip(reference.records, target.records, strict=True)
            if r.key.slot == "output"
        ]
    assert found.first is not None
    at = SITES.index(found.first.reference.key.site) if found.first.reference else -1
    assert worst[at] > 0.1 >= worst[at - 1]


@pytest.mark.spec("BIS-4")
def test_the_call_that_made_it_is_compared_with_its_inputs(tmp_path: Path) -> None:
    found = search(tmp_path, lambda i: 1e-7 if i < 17 else 0.3)
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.class_name) == ("layers.17", "Layer")
    assert "0/layers.17/input.x" in found.read


def test_a_thousand_records_are_bisected_by_at_most_eighteen_tensors(tmp_path: Path) -> None:
    sites = [f"layers.{i}" for i in range(1000)]
    one = run(tmp_path / "r.h5", lambda i: 0, sites=sites)
    other = run(tmp_path / "t.h5", lambda i: 1e-7 if i < 718 else 0.3, sites=sites)
    found = bisect_archives(one, other)
    assert found.first is not None
    assert found.first.key == "0/layers.718/output"
    assert len(found.read) <= 18


@pytest.mark.spec("BIS-1")
def test_other_names_are_searched_through_a_mapping(tmp_path: Path) -> None:
    one = run(tmp_path / "r.h5", lambda i: 0)
    other = run(
        tmp_path / "t.h5", lambda i: 1e-7 if i < 20 else 0.3, sites=[f"h.{i}.block" for i in range(40)]
    )
    entry = Entry(("layers.{i}",), ("h.{i}.block",), {"i": tuple(map(str, range(40)))})
    found = bisect_archives(one, other, mapping=Alignment((entry,)))
    assert found.first is not None
    assert found.first.key == "0/layers.20/output"
    assert found.first.target is not None


@pytest.mark.spec("BIS-5")
def test_a_file_without_an_order_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(3), b=np.ones(3))
    with pytest.raises(UsageError, match="has no order of execution, expected a captured run"):
        bisect_archives(tmp_path / "x.npz", tmp_path / "x.npz")
    one, other = run(tmp_path / "r.h5", lambda i: 0), run(tmp_path / "t.h5", lambda i: 0.3, sites=["z.0"])
    with pytest.raises(UsageError, match="have no results of modules in common"):
        bisect_archives(one, other, mapping="none")


@pytest.mark.spec("BIS-5")
def test_a_result_that_the_target_lacks_is_no_success(tmp_path: Path) -> None:
    one, other = run(tmp_path / "r.h5", lambda i: 0), run(tmp_path / "t.h5", lambda i: 0, sites=SITES[:39])
    found = bisect_archives(one, other)
    assert (found.first, found.lacking, found.exit_status) == (None, ("0/layers.39/output",), 1)


def test_bisecting_takes_archives_or_a_model_and_the_options_of_either(tmp_path: Path) -> None:
    reference, target = run(tmp_path / "r.h5", lambda i: 0), run(tmp_path / "t.h5", lambda i: 0.3 * (i > 4))
    found = bisect(reference, target, rtol=0.01)
    assert found.to_json()["first"] == "0/layers.5/output"
    model = Workload(abs, (-1,))
    for options, message in (
        ({}, "expected target, an archive, or target_model"),
        ({"target": target, "target_model": model}, "and not both"),
        ({"target": target, "check": "true"}, "are for runs, expected target_model"),
        ({"target_model": model, "rtol": 0.1}, "are for archives, expected target"),
    ):
        with pytest.raises(UsageError, match=message):
            bisect(reference, **options)  # type: ignore[arg-type] # each is wrong in its way


@pytest.mark.spec("BIS-5")
@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_run_that_ended_early_is_no_success(tmp_path: Path, side: str) -> None:
    tensors = {"0/@root/input.x": np.ones(16, np.float32), "0/a/output": np.arange(16, dtype=np.float32)}
    paths = [
        write_archive(tmp_path / f"{name}.h5", tensors, complete=name != side)
        for name in ("reference", "target")
    ]
    bisection = bisect_archives(*paths)
    assert (bisection.first, bisection.incomplete, bisection.exit_status) == (None, (side,), 1)
    localization = localize(*paths)
    assert f"The {side} is incomplete: its run ended early." in localization.notes
    assert localization.exit_status == 1
