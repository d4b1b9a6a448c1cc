"""What `tcap compare` writes for later and for others: saved results, JSON, JUnit, CSV; and its extras."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import stat
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tensorcap_formats.dtypes import Array

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "specs/result.schema.json").read_text())
RUN = {
    "model": {"class": "zoo.Model", "config": {"vocab_size": 6, "rms_norm_eps": 1e-6}},
    "modules": [{"path": "", "class": "zoo.Model"}, {"path": "mlp", "class": "zoo.MLP"}],
    "dtype": "float32",
    "compute_dtype": "float32",
}


def tensors(scale: float = 1.0) -> dict[str, Array]:
    values = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    return {
        "0/@root/input.ids": np.arange(4),
        "0/mlp/input.x": values,
        "0/mlp/output": values * np.float32(scale),
        "0/gate/output": np.array([[0, 1], [2, 3]]),
        "0/masked/output": np.array([1, 2, 3], np.float32),
        "0/phase/output": np.array([1 + 2j, 3], np.complex64),
        "0/gone/output": np.ones(2),
        "0/turned/output": np.ones((2, 3)),
        "0/@root/output.logits": values * np.float32(2 * scale),
    }


@pytest.fixture
def pair(write: Callable[..., Path]) -> None:
    """ref.h5 and a tgt.h5 that differs in every way."""
    write("ref.h5", tensors(), run=RUN, values={"0/mlp/input.causal": True})
    target = tensors(1.01)
    del target["0/gone/output"]
    target["0/gate/output"] = np.array([[1, 0], [2, 5]])
    target["0/masked/output"] = np.array([1, math.nan, 3], np.float32)
    target["0/phase/output"] = np.array([1 + 2j, 3.5 - 1j], np.complex64)
    target["0/turned/output"] = np.ones((3, 2))
    target["0/extra/output"] = np.ones(1)
    config = {"vocab_size": 6, "rms_norm_eps": 1e-5}
    write("tgt.h5", target, run={**RUN, "model": {"class": "zoo.Model", "config": config}})


def validate(found: Mapping[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)


@pytest.mark.spec("RES-1", "RES-2")
@pytest.mark.usefixtures("pair")
def test_json_is_as_the_schema_says(tcap_json: Callable[..., Any]) -> None:
    found = tcap_json("compare", "ref.h5", "tgt.h5", status=1)
    validate(found)
    assert list(found)[-1] == "pairs"
    by_key = {entry["key"]: entry for entry in found["pairs"]}
    assert {key: entry["status"] for key, entry in by_key.items()} == {
        "0/@root/input.ids": "identical",
        "0/mlp/input.x": "identical",
        "0/mlp/output": "diverged",
        "0/gate/output": "suspect",
        "0/masked/output": "nonfinite",
        "0/phase/output": "diverged",
        "0/gone/output": "missing-in-target",
        "0/turned/output": "shape-mismatch",
        "0/@root/output.logits": "diverged",
        "0/extra/output": "missing-in-reference",
    }
    assert by_key["0/mlp/output"]["class"] == "zoo.MLP"
    assert by_key["0/mlp/output"]["location"]["axes"][0]["size"] == 4
    assert by_key["0/masked/output"]["location"]["of"] == "mask mismatches"
    assert by_key["0/gate/output"]["routing"]["share"] == 0.5
    assert by_key["0/@root/output.logits"]["logits"]["vocabulary"] == 6
    assert [item["name"] for item in found["preflight"]["items"]] == ["rms_norm_eps"]
    assert found["preflight"]["items"][0]["explains"] is True


@pytest.mark.spec("RES-2")
def test_json_has_the_locations_that_text_shows_and_all_when_asked_for(
    write: Callable[..., Path], tcap_json: Callable[..., Any], folder: Path
) -> None:
    values = np.linspace(1, 2, 100, dtype=np.float32)
    names = [f"0/layers.{i}/output" for i in range(8)]
    write("ref.h5", {name: values + i for i, name in enumerate(names)}, run=RUN)
    errors = (0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.8, 0.7)  # the first one is where they part
    factors = [np.float32(1 + error) for error in errors]
    write("tgt.h5", {n: (values + i) * factors[i] for i, n in enumerate(names)}, run=RUN)

    def located(pairs: list[dict[str, Any]]) -> list[str]:
        return [pair["key"] for pair in pairs if pair["location"]]

    few = [names[0], names[5], names[6], names[7]]
    found = tcap_json("compare", "ref.h5", "tgt.h5", "--save", "few.json", status=1)
    assert located(found["pairs"])[0] == names[0]
    assert set(few) <= set(located(found["pairs"])) <= {*few, names[4]}
    assert located(json.loads((folder / "few.json").read_text())["pairs"]) == located(found["pairs"])
    assert located(tcap_json("compare", "ref.h5", "tgt.h5", "--where", status=1)["pairs"]) == names


@pytest.mark.spec("RES-1")
@pytest.mark.parametrize("keep", [["pairs"], ["version"], ["pairs", 2, "difference", "needed_rtol"]])
def test_the_schema_sees_what_is_missing(tcap_json: Callable[..., Any], pair: None, keep: list[Any]) -> None:
    found = tcap_json("compare", "ref.h5", "tgt.h5", status=1)
    part = found
    for step in keep[:-1]:
        part = part[step]
    del part[keep[-1]]
    with pytest.raises(jsonschema.ValidationError):
        validate(found)


@pytest.mark.spec("RES-3", "RES-10")
@pytest.mark.usefixtures("pair")
def test_a_saved_result_reads_back_as_it_was(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], folder: Path
) -> None:
    direct = tcap(
        "compare", "ref.h5", "tgt.h5", "--where", "--by-module", "--save", "r.json", status=1
    ).stdout
    for archive in ("ref.h5", "tgt.h5"):
        (folder / archive).unlink()
    assert tcap("compare", "--from", "r.json", "--by-module", status=1).stdout == direct
    again = tcap_json("compare", "--from", "r.json", status=1)
    assert again == json.loads((folder / "r.json").read_text())
    validate(again)


@pytest.mark.spec("RES-10")
def test_a_saved_result_of_a_rewritten_port_reads_back_as_it_was(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], folder: Path
) -> None:
    pytest.importorskip("transformers")
    for source, archive in (("models.py:reference", "ref.h5"), ("rewritten.py:port", "other.h5")):
        tcap("capture", "torch", str(ROOT / "examples" / source), "-o", archive)
    direct = tcap("compare", "ref.h5", "other.h5", "--save", "r.json").stdout
    assert "104 of 142 reference tensors compared" in direct
    assert tcap("compare", "--from", "r.json").stdout == direct
    again = tcap_json("compare", "--from", "r.json")
    assert again == json.loads((folder / "r.json").read_text())
    assert (again["mapping"]["path"], again["mapping"]["reference"]["mapped"]) == ("", 104)
    validate(again)
    found = tcap_json("compare", "--from", "r.json", "--atol", "1e-12", status=1)
    assert found["counts"]["diverged"] > 0


@pytest.mark.spec("RES-10")
def test_a_saved_result_keeps_the_calibration_that_judged(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], write: Callable[..., Path], folder: Path
) -> None:
    values = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    for name, factor in (("ref.h5", 1.0), ("good.h5", 1.001), ("again.h5", 1.001), ("bad.h5", 1.003)):
        run = {"dtype": "float32" if name == "ref.h5" else "bfloat16"}
        write(name, {f"0/{i}.mlp/output": values * np.float32(factor) for i in range(20)}, run=run)
    tcap("calibrate", "ref.h5", "good.h5", "ref.h5", "again.h5", "-o", "c.toml")
    direct = tcap("compare", "ref.h5", "bad.h5", "--calibration", "c.toml", "--save", "r.json", status=1)
    assert "by 40 of known-good ports" in direct.stdout
    assert tcap("compare", "--from", "r.json", status=1).stdout == direct.stdout
    kept = tcap_json("compare", "--from", "r.json", status=1)["calibration"]
    assert (kept["path"], kept["runs"], kept["margin"]) == ("c.toml", 2, 1.5)
    assert [(entry["module"], entry["slot"], entry["metric"]) for entry in kept["limit"]] == [
        ("mlp", "output", metric)
        for metric in ("row_error_median", "row_error_p95", "relative_frobenius", "outlier")
    ]
    kept["limit"][0]["limit"] = "low"
    saved = json.loads((folder / "r.json").read_text())
    (folder / "r.json").write_text(json.dumps({**saved, "calibration": kept}))
    message = tcap("compare", "--from", "r.json", status=3).stderr
    assert "limit 1: limit is 'low', expected a finite number of at least 0" in message


@pytest.mark.spec("RES-11", "RES-12")
def test_a_saved_result_is_judged_by_other_tolerances(
    tcap: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write("ref.h5", {"0/a/output": np.array([1.0, 2.0, 4.0])})
    write("tgt.h5", {"0/a/output": np.array([1.5, 2.0, 4.25])})
    tcap("compare", "ref.h5", "tgt.h5", "--save", "r.json", status=1)
    assert "1 match\nNo divergence." in tcap("compare", "--from", "r.json", "--atol", "0.5").stdout
    assert "1 match\nNo divergence." in tcap("compare", "--from", "r.json", "--rtol", "0.51").stdout
    output = tcap("compare", "--from", "r.json", "--atol", "0.3", status=1).stdout
    assert "FIRST DIVERGENCE  0/a/output  (diverged)" in output
    assert "  1 to 2 of 3 elements are outside rtol 0, atol 0.3\n" in output
    output = tcap("compare", "--from", "r.json", "--rtol", "0.2", "--atol", "0.45", status=1).stdout
    assert "FIRST DIVERGENCE  0/a/output  (unjudged)\n" in output
    assert "whether rtol 0.2, atol 0.45 passes cannot be told without the tensors" in output


@pytest.mark.spec("RES-11", "RES-14")
def test_a_saved_result_is_judged_by_a_file_of_thresholds(
    tcap: Callable[..., Any], pair: None, folder: Path
) -> None:
    tcap("compare", "ref.h5", "tgt.h5", "--save", "r.json", status=1)
    (folder / "t.toml").write_text(
        '[[threshold]]\nmatch = "mlp"\nmetric = "relative_frobenius"\nlimit = 0.02\n'
    )
    output = tcap("compare", "--from", "r.json", "--thresholds", "t.toml", status=1).stdout
    rows = {line.split()[-3]: line.split()[0] for line in output.splitlines() if line.startswith("match")}
    assert list(rows.values()) == ["match"]
    (folder / "t.toml").write_text('[[threshold]]\nmatch = "mpl"\natol = 1\n')
    assert (
        "matches no key of 10"
        in tcap("compare", "--from", "r.json", "--thresholds", "t.toml", status=2).stderr
    )


@pytest.mark.spec("RES-14")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["ref.h5", "--from", "r.json"], "expected no archives beside it", id="archives"),
        pytest.param(["--from", "r.json", "--only", "x"], "--only needs the tensors", id="only"),
        pytest.param(["--from", "r.json", "--where"], "--where needs the tensors", id="where"),
        pytest.param(["ref.h5"], "expected REF and TGT, or --from FILE", id="one"),
        pytest.param(["a", "b", "--metric", "cosin"], "Did you mean cosine?", id="metric"),
    ],
)
def test_wrong_usage_is_said(
    tcap: Callable[..., Any], folder: Path, arguments: list[str], message: str
) -> None:
    assert message in tcap("compare", *arguments, status=2).stderr


@pytest.mark.spec("RES-4")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "r.json: cannot be read: No such file", id="absent"),
        pytest.param("{", "r.json: is no JSON, expected a saved comparison (RES-1)", id="no-json"),
        pytest.param("[" * 100_000, "r.json: is no JSON", id="deep"),
        pytest.param("[]", "r.json: is no saved comparison (RES-1)", id="list"),
        pytest.param(
            '{"format":"tensorcap-comparison","version":2}', "has version 2, expected at most 1", id="newer"
        ),
        pytest.param(
            '{"format":"tensorcap-comparison","version":1}', "contradicts the schema of a saved", id="empty"
        ),
    ],
)
def test_what_is_no_result_is_refused(
    tcap: Callable[..., Any], folder: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (folder / "r.json").write_text(text)
    assert message in tcap("compare", "--from", "r.json", status=3).stderr


@pytest.mark.spec("RES-4")
@pytest.mark.usefixtures("pair")
def test_members_that_are_not_known_are_ignored(tcap: Callable[..., Any], folder: Path) -> None:
    tcap("compare", "ref.h5", "tgt.h5", "--save", "r.json", status=1)
    found = json.loads((folder / "r.json").read_text())
    found["later"] = found["pairs"][2]["later"] = found["pairs"][2]["difference"]["later"] = 1
    (folder / "r.json").write_text(json.dumps(found))
    tcap("compare", "--from", "r.json", status=1)
    found["pairs"][2]["difference"]["max_abs"] = "much"
    (folder / "r.json").write_text(json.dumps(found))
    tcap("compare", "--from", "r.json", status=3)


@pytest.mark.spec("RES-4")
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        pytest.param(["account", "blind"], None, "'blind'", id="default"),
        pytest.param(["pairs", 2, "reason"], None, "'reason'", id="pair"),
        pytest.param(["pairs", 2, "difference", "rmse"], None, "lacks 'rmse' @ $.difference", id="inner"),
        pytest.param(["pairs", 2, "difference", "rmse"], 10**400, "beyond float64", id="huge"),
        pytest.param(["pairs", 2, "is_optional"], "no", "'no' is no bool @ $.is_optional", id="text"),
        pytest.param(
            ["pairs", 2, "reference", "order"], 1.5, "1.5 is no int @ $.reference.order", id="float"
        ),
        pytest.param(["pairs", 2, "status"], "good", "good not in literal", id="literal"),
    ],
)
def test_a_result_that_contradicts_the_schema_is_refused(
    tcap: Callable[..., Any], folder: Path, at: list[Any], value: Any, message: str
) -> None:
    tcap("compare", "ref.h5", "tgt.h5", "--save", "r.json", status=1)
    found = json.loads((folder / "r.json").read_text())
    part = found
    for step in at[:-1]:
        part = part[step]
    if value is None:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    (folder / "r.json").write_text(json.dumps(found))
    assert message in tcap("compare", "--from", "r.json", status=3).stderr


@pytest.mark.spec("RES-6")
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("option", ["--save", "--junit", "--csv"])
def test_a_file_that_cannot_be_written_is_status_1(
    tcap: Callable[..., Any], folder: Path, option: str
) -> None:
    (folder / "r").mkdir()
    stderr = tcap("compare", "ref.h5", "tgt.h5", option, "r", status=1).stderr
    assert "r: is a folder and is not overwritten" in stderr
    assert not list(folder.glob("*.building"))


@pytest.mark.spec("RES-6")
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("option", ["--save", "--junit", "--csv"])
def test_what_is_no_report_is_not_overwritten(tcap: Callable[..., Any], folder: Path, option: str) -> None:
    shutil.copy(folder / "ref.h5", folder / "other.h5")
    (folder / "notes").write_text("precious")
    (folder / "link").symlink_to("notes")
    before = {name: (folder / name).read_bytes() for name in ("ref.h5", "other.h5", "notes")}
    for name, status, message in (
        ("ref.h5", 2, "is the source or overlaps with it"),
        ("other.h5", 1, "it is not overwritten"),
        ("notes", 1, "begins with b'precious', expected"),
        ("link", 1, "begins with b'precious', expected"),
    ):
        stderr = tcap("compare", "ref.h5", "tgt.h5", option, name, status=status).stderr
        assert message in stderr
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert (folder / "link").is_symlink()
    assert not list(folder.glob("*.building"))


@pytest.mark.spec("RES-6")
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("option", ["--save", "--junit", "--csv"])
def test_pipes_and_devices_are_written_to_and_stay_what_they_are(
    tcap: Callable[..., Any], folder: Path, option: str
) -> None:
    tcap("compare", "ref.h5", "tgt.h5", option, "file", status=1)
    os.mkfifo(folder / "pipe")
    with ThreadPoolExecutor() as threads:
        reading = threads.submit((folder / "pipe").read_bytes)
        tcap("compare", "ref.h5", "tgt.h5", option, "pipe", status=1)
        assert reading.result(60) == (folder / "file").read_bytes()
    tcap("compare", "ref.h5", "tgt.h5", option, "/dev/null", status=1)
    assert stat.S_ISFIFO(os.stat(folder / "pipe").st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.spec("RES-6")
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("option", ["--save", "--junit", "--csv"])
def test_an_earlier_report_and_an_empty_file_are_replaced(
    tcap: Callable[..., Any], folder: Path, option: str
) -> None:
    (folder / "r").touch()
    (folder / "link").symlink_to("r")
    tcap("compare", "ref.h5", "tgt.h5", option, "link", status=1)
    first = (folder / "r").read_bytes()
    assert first
    (folder / "r").write_bytes(first[:-10])
    tcap("compare", "ref.h5", "tgt.h5", option, "r", status=1)
    assert (folder / "r").read_bytes() == first
    assert (folder / "link").is_symlink()


@pytest.mark.spec("RES-6")
@pytest.mark.usefixtures("pair")
def test_two_reports_do_not_go_to_one_file(tcap: Callable[..., Any], folder: Path) -> None:
    options = ["--save", "r", "--csv", "./r"]
    assert (
        "--csv ./r: is the file of --save" in tcap("compare", "ref.h5", "tgt.h5", *options, status=2).stderr
    )
    tcap("compare", "ref.h5", "tgt.h5", "--save", "r", status=1)
    assert "is the source" in tcap("compare", "--from", "r", "--save", "r", status=2).stderr


@pytest.mark.spec("RES-6")
@pytest.mark.parametrize("option", ["--save", "--junit", "--csv"])
def test_a_folder_that_is_not_there_is_said_before_anything_is_read(
    tcap: Callable[..., Any], option: str
) -> None:
    found = tcap("compare", "no-ref.h5", "no-tgt.h5", option, "no/r", status=2)
    assert f"{option} no/r: there is no folder no." in found.stderr


@pytest.mark.spec("RES-20")
@pytest.mark.usefixtures("pair")
def test_junit_has_a_case_for_each_pair(tcap: Callable[..., Any], folder: Path) -> None:
    tcap("compare", "ref.h5", "tgt.h5", "--exclude", "phase", "--junit", "r.xml", status=1)
    suite = ElementTree.parse(folder / "r.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["10", "6", "0", "2"]
    outcomes = {case.get("name"): [child.tag for child in case] for case in suite}
    assert outcomes["0/mlp/input.x"] == []
    assert outcomes["0/mlp/output"] == ["failure"]
    assert outcomes["0/extra/output"] == outcomes["0/phase/output"] == ["skipped"]
    (case,) = [case for case in suite if case.get("name") == "0/mlp/output"]
    assert (case.get("classname"), case[0].get("message")) == ("zoo.MLP", "diverged")
    assert "would pass with rtol" in (case[0].text or "")


@pytest.mark.spec("RES-20")
def test_junit_reads_back_whatever_names_have(
    tcap: Callable[..., Any], write: Callable[..., Path], folder: Path
) -> None:
    write("a<&'\".h5", {"0/b/output": np.ones(2)})
    write("b\x01é.h5", {"0/b/output": np.zeros(2)})
    tcap("compare", "a<&'\".h5", "b\x01é.h5", "--junit", "r.xml", status=1)
    text = (folder / "r.xml").read_bytes()
    assert text.startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n  <testsuite name="a&lt;')
    suite = ElementTree.fromstring(text)[0]
    assert suite.get("name") == "a<&'\".h5 b?é.h5"
    (case,) = suite
    assert list(case.attrib.items()) == [("classname", "b"), ("name", "0/b/output")]
    assert "max abs 1.0 at (0,), relative Frobenius 1.0\n" in (case[0].text or "")


@pytest.mark.spec("RES-20")
def test_junit_fails_where_nothing_was_compared(
    tcap: Callable[..., Any], write: Callable[..., Path], folder: Path
) -> None:
    write("ref.h5", {"0/a/output": np.ones(1)})
    write("tgt.h5", {"0/b/output": np.ones(1)})
    tcap("compare", "ref.h5", "tgt.h5", "--junit", "r.xml", status=1)
    cases = list(ElementTree.parse(folder / "r.xml").getroot()[0])
    assert [case[0].get("message") for case in cases if case[0].tag == "failure"] == [
        "missing-in-target",
        "nothing was compared",
    ]


@pytest.mark.spec("RES-21")
@pytest.mark.usefixtures("pair")
def test_csv_has_a_line_for_each_pair(tcap: Callable[..., Any], folder: Path) -> None:
    tcap("compare", "ref.h5", "tgt.h5", "--csv", "r.csv", status=1)
    with open(folder / "r.csv", newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert len(rows) == 10
    row = rows["0/mlp/output"]
    assert (row["class"], row["status"], row["is_required"], row["shape"]) == (
        "zoo.MLP",
        "diverged",
        "1",
        "4x6",
    )
    assert float(row["max_abs"]) == pytest.approx(0.02, rel=1e-3)
    assert rows["0/phase/output"]["max_abs_reference"] == "3.0 0.0"
    assert rows["0/gone/output"]["max_abs"] == rows["0/mlp/input.x"]["max_abs"] == ""
    assert rows["0/masked/output"]["nonfinite_target"] == "nan=1 posinf=0 neginf=0"


@pytest.mark.spec("RES-30")
@pytest.mark.usefixtures("pair")
def test_text_tells_what_explains_before_what_differs(tcap: Callable[..., Any]) -> None:
    output = tcap("compare", "ref.h5", "tgt.h5", status=1).stdout
    headings = [
        "reference  ref.h5",
        "BEFORE ANY TENSOR",
        "  config rms_norm_eps: 1e-06 in the reference, 1e-05 in the target. Norms divide by another number.",
        "FIRST DIVERGENCE  0/mlp/output  (diverged)",
        "WORST",
        "status ",
        "LOGITS  0/@root/output.logits",
        "ROUTING  0/gate/output",
        "note: 1 argument or result that is no tensor differs:",
        "What this run cannot see:",
        "7 of 9 reference tensors compared: ",
    ]
    places = [output.index(heading) for heading in headings]
    assert places == sorted(places)


@pytest.mark.spec("RES-31")
@pytest.mark.usefixtures("pair")
def test_the_smallest_tolerances_that_are_shown_do_pass(tcap: Callable[..., Any]) -> None:
    output = tcap("compare", "ref.h5", "tgt.h5", "--only", "0/mlp/*", status=1).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("  would pass with")]
    words = line.replace(",", "").split()
    rtol, atol = words[words.index("rtol") + 1], words[words.index("atol") + 1]
    tcap("compare", "ref.h5", "tgt.h5", "--only", "0/mlp/*", "--rtol", rtol)
    tcap("compare", "ref.h5", "tgt.h5", "--only", "0/mlp/*", "--atol", atol)
    tcap("compare", "ref.h5", "tgt.h5", "--only", "0/mlp/*", "--atol", str(float(atol) * 0.99), status=1)
    tcap("compare", "ref.h5", "tgt.h5", "--only", "0/mlp/*", "--rtol", str(float(rtol) * 0.99), status=1)


@pytest.mark.usefixtures("pair")
def test_errors_are_summed_up_by_class_of_module(tcap: Callable[..., Any]) -> None:
    output = tcap("compare", "ref.h5", "tgt.h5", "--by-module", status=1).stdout
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "module pairs min median max statuses worst" in rows
    assert "MLP 2 0 0.005 0.01 1 identical, 1 diverged 0/mlp/output" in rows


@pytest.mark.usefixtures("pair")
def test_metrics_that_are_asked_for_are_columns(tcap: Callable[..., Any]) -> None:
    output = tcap("compare", "ref.h5", "tgt.h5", "--metric", "kl", "--metric", "max_ulp", status=1).stdout
    rows = [line.split() for line in output.splitlines()]
    assert ["status", "kl", "max_ulp", "key", "where"] in rows
    (row,) = [row for row in rows if row[:1] == ["diverged"] and "0/mlp/output" in row]
    assert 0 < float(row[1]) < 0.01


def test_rows_are_sorted_by_the_metric_that_is_asked_for(tcap: Callable[..., Any], write: Any) -> None:
    small, large = np.full((2, 4), 0.01, np.float32), np.full((2, 4), 100.0, np.float32)
    signs = np.array([[1, -1, 1, -1]] * 2, np.float32)
    write("ref.h5", {"0/a/output": large * signs, "0/b/output": small, "0/c/output": small * signs})
    write("tgt.h5", {"0/a/output": large * signs + 1, "0/b/output": small * 2, "0/c/output": small})

    def keys(*metrics: str) -> list[str]:
        options = [text for metric in metrics for text in ("--metric", metric)]
        output = tcap("compare", "ref.h5", "tgt.h5", "--sort", "error", *options, status=1).stdout
        return [
            cell
            for line in output.splitlines()
            for cell in line.split()
            if cell in ("0/a/output", "0/b/output", "0/c/output")
        ]

    assert keys("max_abs")[-3:] == ["0/a/output", "0/c/output", "0/b/output"]  # 1, 0.02, 0.01
    assert keys("cosine")[-3:] == ["0/c/output", "0/a/output", "0/b/output"]  # 0, 0.99995, 1
    assert keys("relative_frobenius")[-3:] == ["0/c/output", "0/b/output", "0/a/output"]  # 1.4, 1, 0.01


@pytest.mark.spec("RES-33")
@pytest.mark.usefixtures("pair")
def test_preflight_is_a_command_of_its_own(
    tcap: Callable[..., Any],
    tcap_json: Callable[..., Any],
    shell: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    output = tcap("preflight", "ref.h5", "tgt.h5", "--reference-repeat", "ref.h5", status=1).stdout
    assert "BEFORE ANY TENSOR" in output
    assert "\nequal        inputs, repeat, " in output
    assert "\nnot checked  attention: not both runs say how attention is computed\n" in output
    found = tcap_json("preflight", "ref.h5", "tgt.h5", status=1)
    assert (found["format"], found["exit_status"], len(found["items"])) == ("tensorcap-preflight", 1, 1)
    assert "Nothing explains a divergence." in tcap("preflight", "ref.h5", "ref.h5").stdout
    piped = shell("tcap preflight ref.h5 tgt.h5 | cat").stdout
    assert "\x1b" not in piped


@pytest.mark.spec("PRE-9", "PRE-10")
@pytest.mark.usefixtures("folder")
def test_preflight_does_not_change_the_outcome_and_alarms_nobody_if_all_agrees(
    tcap: Callable[..., Any], write: Callable[..., Path]
) -> None:
    for name, eps in (("ref.h5", 1e-6), ("tgt.h5", 1e-5)):
        write(name, {"0/a/output": np.ones(2)}, run={"model": {"config": {"rms_norm_eps": eps}}})
    output = tcap("compare", "ref.h5", "tgt.h5").stdout
    assert "BEFORE ANY TENSOR" not in output
    assert "differs, though all that was compared agrees: rms_norm_eps (1e-06 / 1e-05)\n" in output
    tcap("preflight", "ref.h5", "tgt.h5", status=1)


def test_a_target_of_other_names_is_no_pass(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    one = np.ones(2)  # case 66
    write("ref.h5", {f"0/{site}/output": one for site in "abc"})
    write("none.h5", {f"0/{site}/output": one for site in ("model.a", "x", "y")})
    write("some.h5", {f"0/{site}/output": one for site in ("a", "x", "y")})
    assert "0 of 3 reference tensors compared" in tcap("compare", "ref.h5", "none.h5", status=1).stdout
    output = tcap("compare", "ref.h5", "some.h5", status=1).stdout
    assert "1 of 3 reference tensors compared: 1 identical, 2 missing-in-target" in output


def test_a_line_for_several_tensors_of_one_reason_speaks_of_each(
    write: Callable[..., Path], tcap: Callable[..., Any]
) -> None:
    values = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    copies = {f"0/{name}/output": values for name in ("a", "b", "c")}
    modules = [{"path": path, "class": "zoo.Copy"} for path in ("", "mlp", "a", "b", "c")]
    tensors = {"0/mlp/output": values, "0/@root/output": 2 * values}
    write("ref.h5", {**tensors, **copies}, run={**RUN, "modules": modules})
    write("tgt.h5", tensors, run=RUN)
    output = tcap("compare", "ref.h5", "tgt.h5").output
    each = "  3 tensors, each holds what 0/mlp/output holds, which agrees: 0/a/output, 0/b/output, 0/c/output"
    assert each in output
    del copies["0/b/output"], copies["0/c/output"]
    write("ref.h5", {**tensors, **copies}, run={**RUN, "modules": modules})
    output = tcap("compare", "ref.h5", "tgt.h5").output
    assert "  1 tensor, it holds what 0/mlp/output holds, which agrees: 0/a/output" in output
