"""Logs of MAX's debug prints, as MAX 26.7 printed them, are archives of what they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.errors import NotAnArchiveError
from tensorcap_formats.open import open_archive

# Printed by MAX 26.7.0, of 2x3, 4, (), 8x2x3, 7x8, 2x2, 3, 0x3 and 8x7x2x9 elements
DOTS = " ..., "  # with a space that ends the line
COMPACT = f"""\
Building model...
model.layers.layers.0-output = tensor([[1.0000, 2.5000, -0.0000],
[nan, INF, -INF]], dtype=f32, shape=[2,3])
ids = tensor([[0, 1, 2, 3]], dtype=si64, shape=[4])
a/scalar = tensor([[10000000000.0000]], dtype=f32, shape=[])
cube = tensor([[[0.0000, 1.0000, 2.0000],
[3.0000, 4.0000, 5.0000]],

[[6.0000, 7.0000, 8.0000],
[9.0000, 10.0000, 11.0000]],

[[12.0000, 13.0000, 14.0000],
[15.0000, 16.0000, 17.0000]]
{DOTS}
,

[[30.0000, 31.0000, 32.0000],
[33.0000, 34.0000, 35.0000]],

[[36.0000, 37.0000, 38.0000],
[39.0000, 40.0000, 41.0000]],

[[42.0000, 43.0000, 44.0000],
[45.0000, 46.0000, 47.0000]]], dtype=f32, shape=[8,2,3])
wide = tensor([[0.0000, 1.0000, 2.0000, ..., 5.0000, 6.0000, 7.0000],
[8.0000, 9.0000, 10.0000, ..., 13.0000, 14.0000, 15.0000],
[16.0000, 17.0000, 18.0000, ..., 21.0000, 22.0000, 23.0000],
{DOTS}

[32.0000, 33.0000, 34.0000, ..., 37.0000, 38.0000, 39.0000],
[40.0000, 41.0000, 42.0000, ..., 45.0000, 46.0000, 47.0000],
[48.0000, 49.0000, 50.0000, ..., 53.0000, 54.0000, 55.0000]], dtype=f32, shape=[7,8])
flags = tensor([[True, False],
[False, True]], dtype=bool, shape=[2,2])
half = tensor([[1.0000, 3.1406, -123.5000]], dtype=bf16, shape=[3])
empty = tensor([], dtype=f32, shape=[0,3])
small = tensor([[0.0001, 0.0002]], dtype=f32, shape=[2])
odd = tensor([[1.0000]], dtype=q4, shape=[1])
cut = tensor([[1.0000, 2.00"""
FULL = """\
model.norm-output = tensor<2x3xf32> [1.000000e+00, 2.500000e+00, -1.000000e-07, nan, INF, -INF]
ids = tensor<4xsi64> [0, 1, 2, 3]
model.norm-output = tensor<2xf32> [3.141593e+00, 1.000000e+10]
flags = tensor<2x2xbool> [True, False, False, True]
half = tensor<3xbf16> [1.000000e+00, 3.140625e+00, -1.235000e+02]
a/scalar = tensor<f32> [1.000000e+10]
empty = tensor<0x3xf32> []
dbl = tensor<2xf64> [3.333333e-01, 2.000000e-300]
"""
NAN, INF = np.nan, np.inf


def log(folder: Path, text: str) -> Path:
    path = folder / "max_tensors.log"
    path.write_text(text)
    return path


@pytest.mark.spec("MXF-110")
def test_a_compact_log_is_read_as_far_as_it_is_printed(tmp_path: Path) -> None:
    with open_archive(log(tmp_path, COMPACT)) as archive:
        assert [(r.key.text, r.dtype.name, r.shape) for r in archive.records] == [
            ("0/layers.0/output", "float32", (2, 3)),
            ("0/probe:ids/value", "int64", (4,)),
            ("0/probe:a%2Fscalar/value", "float32", ()),
            ("0/probe:cube/value", "float32", (6, 2, 3)),
            ("0/probe:wide/value", "float32", (6, 6)),
            ("0/probe:flags/value", "bool", (2, 2)),
            ("0/probe:half/value", "bfloat16", (3,)),
            ("0/probe:empty/value", "float32", (0, 3)),
        ]
        assert archive.is_ordered
        np.testing.assert_array_equal(
            archive.load(archive.get("0/layers.0/output")), np.array([[1, 2.5, 0], [NAN, INF, -INF]])
        )
        wide = archive.load(archive.get("0/probe:wide/value"))
        kept = [0, 1, 2, 5, 6, 7]
        np.testing.assert_array_equal(wide, np.arange(56).reshape(7, 8)[[0, 1, 2, 4, 5, 6]][:, kept])
        np.testing.assert_array_equal(
            archive.load(archive.get("0/probe:cube/value")),
            np.arange(48).reshape(8, 2, 3)[[0, 1, 2, 5, 6, 7]],
        )
        assert archive.load(archive.get("0/probe:half/value")).astype(float).tolist() == [
            1.0,
            3.140625,
            -123.5,
        ]
        assert archive.load(archive.get("0/probe:flags/value")).tolist() == [[True, False], [False, True]]
        assert archive.skipped == {
            "small": "is printed with too few digits for values as small as its own",
            "odd": "dtype q4",
            "cut": "its print is cut short, or holds something else",
        }
        assert not archive.is_complete
        assert archive.run["error"] == {
            "message": "1 part of it could not be read: cut: its print is cut short, or holds something else"
        }
        assert archive.info.dump == "abbreviated log"


@pytest.mark.spec("MXF-110")
def test_a_full_log_has_all_elements_and_each_print_of_a_label_is_a_step(tmp_path: Path) -> None:
    with open_archive(log(tmp_path, FULL)) as archive:
        assert [r.key.text for r in archive.records][-1] == "1/norm/output"
        assert len(archive.records) == 8
        first = archive.load(archive.get("0/norm/output"))
        np.testing.assert_array_equal(first, np.array([[1, 2.5, -1e-7], [NAN, INF, -INF]], np.float32))
        assert archive.load(archive.get("1/norm/output")).tolist() == [np.float32(3.141593), np.float32(1e10)]
        assert archive.load(archive.get("0/probe:dbl/value")).tolist() == [0.3333333, 2e-300]
        assert archive.skipped == {}
        assert archive.is_complete
        assert (archive.info.dump, archive.info.framework) == ("log", "max")


@pytest.mark.spec("MXF-111")
@pytest.mark.parametrize(
    ("line", "precision"),
    [
        pytest.param("x = tensor<2xf32> [1.234567e+00, 1.000000e-03]", "float32", id="full"),
        pytest.param("x = tensor<2xf32> [1.235e+00, 1.000e-03]", "bfloat16", id="full, three decimals"),
        pytest.param("x = tensor([[1.2346, 0.0010]], dtype=f32, shape=[2])", "float16", id="compact"),
        pytest.param("x = tensor([[0.0235, 0.0210]], dtype=f32, shape=[2])", "bfloat16", id="small"),
        pytest.param("x = tensor<1xbf16> [1.234567e+00]", "bfloat16", id="of bfloat16"),
    ],
)
def test_values_are_judged_in_the_precision_in_which_they_were_printed(
    tmp_path: Path, line: str, precision: str
) -> None:
    with open_archive(log(tmp_path, f"{line}\n")) as archive:
        assert archive.info.compute_dtype == precision


@pytest.mark.spec("MXF-110")
def test_a_text_without_prints_is_none_of_these_logs(tmp_path: Path) -> None:
    with pytest.raises(NotAnArchiveError, match="is a text file"):
        open_archive(log(tmp_path, "x = torch.tensor([1.0])\n"))


@pytest.mark.spec("MXF-110")
def test_a_damaged_print_leaves_the_others_their_steps(tmp_path: Path) -> None:
    numbers = ("1.000000e+00", "2.x00000e+00", "3.000000e+00")
    text = "".join(f"model.norm-output = tensor<1xf32> [{number}]\n" for number in numbers)
    with open_archive(log(tmp_path, text)) as archive:
        values = {record.key.text: archive.load(record).tolist() for record in archive.records}
        assert values == {"0/norm/output": [1.0], "2/norm/output": [3.0]}
        assert not archive.is_complete
