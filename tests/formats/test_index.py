"""The index: what it holds, and what is refused of it."""

from __future__ import annotations

import gc
import hashlib
import json
import random
from typing import Any

import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError, NewerVersionError, TensorcapError
from tensorcap_formats.index import Index, decode_index, decode_json, encode_index, encode_json, index_of
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics

INDEX: dict[str, Any] = {
    "tensorcap": "1.0",
    "complete": True,
    "ordered": False,
    "algorithm": "xxh3_128",
    "root": "c0815ddf8b87cc6b59f0cba76cb5851a",
    "count": 2,
    "key": ["0/fc/output", "0/ids/output"],
    "dtype": ["float32", "int64"],
    "shape": [[2], []],
    "order": [0, 3],
    "stored": [1, 0],
    "digest": "d11372a3f8d4096998cd4bf727a9d2ae" + "0" * 32,
    "minimum": [-2.0, 2**53 + 1],
    "maximum": [1.0, 2**53 + 1],
    "mean": [-0.5, 2.0**53],
    "l2": [2.23606797749979, None],
    "nan": [0, 0],
    "posinf": [0, 0],
    "neginf": [0, 0],
    "zeros": [0, 0],
    "values": {"0/fc/input.mask": None, "0/fc/input.scale": 0.5},
}
RECORDS = [
    Record(
        Key("fc", "output"),
        dtype("float32"),
        (2,),
        0,
        "d11372a3f8d4096998cd4bf727a9d2ae",
        Statistics(-2.0, 1.0, -0.5, 2.23606797749979, 0, 0, 0, 0),
        stored=True,
        row=0,
    ),
    Record(
        Key("ids", "output"),
        dtype("int64"),
        (),
        3,
        "0" * 32,
        Statistics(2**53 + 1, 2**53 + 1, 2.0**53, None, 0, 0, 0, 0),
        stored=False,
        row=1,
    ),
]


def shortly(value: object) -> str:
    return repr(value)[:20]


def decode(**changes: Any) -> Any:
    index = {k: v for k, v in {**INDEX, **changes}.items() if v is not ...}
    data = json.dumps(index).encode()
    return index_of(decode_json(data, "run.h5: index"), "run.h5", size=len(data))


@pytest.mark.spec("ARC-31")
def test_an_index_says_all_of_its_records() -> None:
    index = decode()
    assert list(index.records) == RECORDS
    assert (index.algorithm, index.is_complete, index.is_ordered) == ("xxh3_128", True, False)
    assert index.values == {"0/fc/input.mask": None, "0/fc/input.scale": 0.5}
    assert type(index.records[1].statistics.minimum) is int


@pytest.mark.spec("ARC-31", "ARC-36")
def test_records_are_written_as_columns() -> None:
    written, run = encode_index(Index(RECORDS, INDEX["values"], {}, "xxh3_128", is_ordered=False))
    assert run == b"{}"
    assert written.startswith(b'{"tensorcap":"1.0",')
    index = json.loads(written)
    del index["seal"]
    assert index == INDEX


def sealed(body: bytes, run: bytes) -> bytes:
    seal = hashlib.blake2b(body + run, digest_size=16).hexdigest()
    return body + f',"seal":"{seal}"}}'.encode()


@pytest.mark.spec("ARC-37")
def test_the_seal_is_over_the_index_before_it_and_the_run() -> None:
    written, run = encode_index(Index(RECORDS, INDEX["values"], {"seed": 1}, "xxh3_128", is_ordered=False))
    assert run == b'{"seed":1}'
    assert written == sealed(written[:-43], run)
    index = decode_index(written, run, "run.h5")
    assert (list(index.records), index.run) == (RECORDS, {"seed": 1})
    for data, other in ((written, b'{"seed":2}'), (written[:-43] + b"}", run), (written + b" ", run)):
        with pytest.raises(CorruptArchiveError, match=r"^run\.h5: index or run was altered: .*\(ARC-37\)$"):
            decode_index(data, other, "run.h5")


@pytest.mark.spec("ARC-37")
def test_no_altered_byte_of_a_sealed_index_goes_unseen() -> None:
    whole = sealed(json.dumps(INDEX).encode()[:-1], b"{}")
    for at in range(len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 1
        with pytest.raises(TensorcapError):
            decode_index(bytes(altered), b"{}", "run.h5")


@pytest.mark.spec("ARC-5")
@pytest.mark.parametrize(
    "version", [None, 1, 1.0, "", "1", "1.", ".0", "1.0.0", "-1.0", "٣.0", "9" * 6000 + ".0"]
)
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=r"expected MAJOR\.MINOR \(ARC-5\)$") as caught:
        decode(tensorcap=version)
    assert len(str(caught.value)) < 300


@pytest.mark.spec("ARC-5")
@pytest.mark.parametrize("version", ["2.0", "10.3", "999999999.0"])
def test_a_newer_major_version_is_refused(version: str) -> None:
    with pytest.raises(NewerVersionError, match=rf"format is {version}, expected 1\.0 or older \(ARC-5\)$"):
        decode(tensorcap=version)


@pytest.mark.spec("ARC-5")
def test_a_newer_minor_version_with_entries_that_nobody_knows_is_read() -> None:
    assert len(decode(tensorcap="1.7", colour="blue", must_understand=[]).records) == 2


@pytest.mark.spec("ARC-6")
@pytest.mark.parametrize("needed", [["sparse"], ["x" * 65536], "all", {"a": 1}, 5, True])
def test_an_extension_that_must_be_understood_is_refused(needed: Any) -> None:
    with pytest.raises(NewerVersionError, match=r"unknown here \(ARC-6\)$") as caught:
        decode(must_understand=needed)
    assert len(str(caught.value)) < 300


COLUMNS = ["key", "dtype", "shape", "order", "stored", "minimum", "maximum", "mean", "l2", "nan", "posinf"]
COLUMNS += ["neginf", "zeros"]


@pytest.mark.spec("ARC-30")
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("column", [..., None, "ab", {"0": 0, "1": 1}, [], [0], [0, 0, 0]], ids=shortly)
def test_a_column_with_another_number_of_entries_is_refused(name: str, column: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=rf"column '{name}' has no entry .*\(ARC-30\)"):
        decode(**{name: column})


@pytest.mark.spec("ARC-31")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", 5),
        ("key", None),
        ("dtype", 5),
        ("shape", 5),
        ("shape", "2"),
        ("order", "1"),
        ("order", 0.5),
        ("order", None),
        ("stored", "1"),
        ("minimum", "0"),
        ("maximum", [0]),
        ("mean", {}),
        ("l2", "x"),
        ("nan", None),
        ("zeros", 0.5),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=rf"column '{name}' holds .* wrong type \(ARC-31\)"):
        decode(**{name: [INDEX[name][0], value]})


@pytest.mark.spec("ARC-31")
@pytest.mark.parametrize("name", ["float17", "", "x" * 65536])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(CorruptArchiveError, match=r"record 1: dtype .* is unknown \(ARC-31\)") as caught:
        decode(dtype=["float32", name])
    assert len(str(caught.value)) < 300


@pytest.mark.spec("ARC-30")
@pytest.mark.parametrize("count", [..., None, "2", 2.0, True, -1, 10**12, 10**4000], ids=shortly)
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=r"count is .*, expected the number of records \(ARC-30\)"):
        decode(count=count)


@pytest.mark.spec("ARC-32")
def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(CorruptArchiveError, match=r"key '0/fc/output' stands twice \(ARC-32\)$"):
        decode(key=["0/fc/output"] * 2)


@pytest.mark.spec("NAM-3", "NAM-4", "NAM-6")
@pytest.mark.parametrize(
    ("key", "clause"),
    [
        ("../../evil", "NAM-4"),
        ("0/../output", "NAM-4"),
        ("a\0b", "NAM-4"),
        ("0/a b/output", "NAM-4"),
        ("\ud800", "NAM-4"),
        ("rank0/0/a/output", "NAM-3"),
        ("", "NAM-6"),
        ("x" * 65536, "NAM-6"),
    ],
)
def test_a_key_that_is_none_is_refused(key: str, clause: str) -> None:
    with pytest.raises(CorruptArchiveError, match=rf"run\.h5: index: record 1: key .*\({clause}\)") as caught:
        decode(key=["0/fc/output", key])
    assert len(str(caught.value)) < 400


@pytest.mark.spec("ARC-33")
@pytest.mark.parametrize("digest", [..., None, "", "0" * 63, "0" * 65, ["0" * 32] * 2], ids=shortly)
def test_digests_of_another_length_are_refused(digest: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=r"digest has no 32 digits .*\(ARC-33\)"):
        decode(digest=digest)


@pytest.mark.spec("ARC-12")
@pytest.mark.parametrize("algorithm", [..., None, "md5", ["xxh3_128"], "x" * 65536], ids=shortly)
def test_an_unknown_digest_algorithm_is_refused(algorithm: Any) -> None:
    with pytest.raises(CorruptArchiveError, match="known are xxh3_128, blake2b_128") as caught:
        decode(algorithm=algorithm)
    assert len(str(caught.value)) < 300


@pytest.mark.spec("ARC-34")
@pytest.mark.parametrize(
    "shape",
    [[-1], [1.0], ["1"], [True], [None], [[1]], [1] * 33, [2**62], [2**40, 2**40], [2**62, 0], [10**4000]],
    ids=shortly,
)
def test_an_absurd_shape_is_refused(shape: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=r"record 1: shape is .*\(ARC-34\)$") as caught:
        decode(shape=[[2], shape])
    assert len(str(caught.value)) < 400


@pytest.mark.spec("ARC-34")
@pytest.mark.parametrize("one", [True, 1.0], ids=repr)
def test_a_shape_is_refused_that_equals_the_one_before_it(one: object) -> None:
    with pytest.raises(CorruptArchiveError, match=r"record 1: shape is .*\(ARC-34\)$"):
        decode(shape=[[1], [one]], dtype=["float32", "float32"])


@pytest.mark.spec("ARC-35")
@pytest.mark.parametrize("values", [..., None, [], "a", 5], ids=shortly)
def test_values_that_are_no_object_are_refused(values: Any) -> None:
    with pytest.raises(CorruptArchiveError, match=r"values is no object \(ARC-35\)"):
        decode(values=values)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"\xff\xfe\x00", b"null", b"[]", b'"x"', b"{}x", b"\x00" * 1000, b"1" * 5000),
        *(b"[" * 100_000, b'{"a":' * 50_000, b'{"a":NaN}', b'{"a":-Infinity}'),
        *(b'{"a":1e999}', b'{"a":[-1e400]}', b'{"a":' + b"9" * 400 + b".0}"),
    ],
    ids=shortly,
)
def test_anything_but_a_json_object_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(CorruptArchiveError, match=r"^run\.h5: run: is ") as caught:
        decode_json(data, "run.h5: run")
    assert "\n" not in str(caught.value)
    assert gc.isenabled()


def test_any_json_at_all_gives_an_index_or_one_error() -> None:
    r = random.Random(5)
    scraps: list[Any] = [None, True, 0, -1, 2.5, "x", "", [], {}, [[1]], [0, 0], "0" * 64, [None] * 2]
    scraps.append(["0/fc/output"] * 2)
    outcomes = set()
    for _ in range(3000):
        changes = {r.choice(list(INDEX)): r.choice([..., *scraps]) for _ in range(r.randrange(1, 4))}
        try:
            decode(**changes)
            outcomes.add("opened")
        except TensorcapError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"opened", "CorruptArchiveError"}


def test_text_of_any_kind_survives_json() -> None:
    value = {"a": 'quote " ü \u2028 \\ \n \x00 \U0001f600', "b": [1, 2**70, -0.0, 1e300, None, True]}
    assert decode_json(encode_json(value), "x") == value
    assert repr(decode_json(encode_json(value), "x")["b"][2]) == "-0.0"


@pytest.mark.parametrize("digits", [309, 400, 9000])
def test_an_integer_that_no_float64_is_near_is_a_text(digits: int) -> None:
    number, hexadecimal = "-" + "7" * digits, "0" * digits
    read = decode_json(b'{"a": %s, "b": [2, "%s"]}' % (number.encode(), hexadecimal.encode()), "x")
    assert read == {"a": number, "b": [2, hexadecimal]}


def test_a_lone_surrogate_is_written_as_an_escape_of_json() -> None:
    written = encode_json({"a": "x\ud800y"})
    assert written == b'{"a":"x\\ud800y"}'
    assert json.loads(written)["a"] == "x\ud800y"


def test_records_are_equal_by_what_they_hold_though_nothing_hinders_an_assignment() -> None:
    one, other = (Record(Key("a", "output"), dtype("int8"), (2,), 0, "", None, True, 0) for _ in range(2))
    assert one == other
    assert len({one, other}) == 1
    assert one != Record(Key("b", "output"), dtype("int8"), (2,), 0, "", None, True, 0)
    assert not hasattr(one, "__dict__")
