"""Stored bits of torch tensors; expected bytes are spelt out, or put in as bytes and read back."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.tensors import equal_values, from_stored, stored
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError

RAW = bytes(range(0x40, 0x50)) + bytes(range(0x80, 0x90))  # 32 bytes, no NaN among their float32 forms

VALUES = [
    pytest.param(torch.tensor([True, False]), "bool", "0100", id="bool"),
    pytest.param(torch.tensor([-2, 1], dtype=torch.int8), "int8", "fe01", id="int8"),
    pytest.param(torch.tensor([258], dtype=torch.int16), "int16", "0201", id="int16"),
    pytest.param(torch.tensor([-1], dtype=torch.int64), "int64", "ffffffffffffffff", id="int64"),
    pytest.param(torch.tensor([1.5], dtype=torch.float16), "float16", "003e", id="float16"),
    pytest.param(
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), "bfloat16", "c03fc07f", id="bfloat16"
    ),
    pytest.param(torch.tensor([1.5]), "float32", "0000c03f", id="float32"),
    pytest.param(torch.tensor([1.5], dtype=torch.float64), "float64", "000000000000f83f", id="float64"),
    pytest.param(
        torch.tensor([1.5 - 2j], dtype=torch.complex64), "complex64", "0000c03f000000c0", id="complex64"
    ),
    pytest.param(
        torch.view_as_complex(torch.tensor([[1.5, -2.0]], dtype=torch.float16)),
        "complex32",
        "003e00c0",
        id="complex32",
    ),
    pytest.param(torch.tensor([1.5]).to(torch.float8_e4m3fn), "float8_e4m3fn", "3c", id="float8_e4m3fn"),
    pytest.param(torch.tensor([1.5]).to(torch.float8_e5m2), "float8_e5m2", "3e", id="float8_e5m2"),
    pytest.param(
        torch.tensor([1.5]).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz", "44", id="float8_e4m3fnuz"
    ),
    pytest.param(
        torch.tensor([1.5]).to(torch.float8_e5m2fnuz), "float8_e5m2fnuz", "42", id="float8_e5m2fnuz"
    ),
]


@pytest.mark.parametrize(("tensor", "name", "expected"), VALUES)
def test_stored_elements_are_the_tensors_bytes(tensor: torch.Tensor, name: str, expected: str) -> None:
    found = stored(tensor)
    assert (found.dtype.name, found.shape, found.bits.dtype.str) == (
        name,
        tuple(tensor.shape),
        found.dtype.storage,
    )
    assert found.bits.tobytes().hex() == expected


@pytest.mark.parametrize(
    "dtype",
    [d for n, d in vars(torch).items() if isinstance(d, torch.dtype) and n == str(d)[6:] and n in DTYPES],
)
def test_every_dtype_that_both_sides_know_goes_out_and_in_bit_for_bit(dtype: torch.dtype) -> None:
    raw = bytearray(b"\x00\x01" * 16) if dtype is torch.bool else bytearray(RAW)
    tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    found = stored(tensor)
    assert found.bits.tobytes() == bytes(raw)
    back = from_stored(found.bits, found.dtype)
    assert back.dtype == dtype
    assert back.view(torch.uint8).numpy().tobytes() == bytes(raw)


@pytest.mark.parametrize(
    ("tensor", "shape", "expected"),
    [
        pytest.param(torch.tensor(1.5, dtype=torch.bfloat16), (), "c03f", id="0-d"),
        pytest.param(torch.empty(0, 3, dtype=torch.bfloat16), (0, 3), "", id="empty"),
        pytest.param(
            torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t(), (2, 2), "01030204", id="transposed"
        ),
        pytest.param(torch.tensor([7], dtype=torch.uint8).expand(3), (3,), "070707", id="expanded"),
        pytest.param(torch.tensor([1, 2, 3], dtype=torch.uint8)[1:], (2,), "0203", id="offset"),
        pytest.param(
            torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
            (1,),
            "0000803f000000c0",
            id="conjugate-view",
        ),
        pytest.param(
            torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag, (1,), "000000c0", id="negative-view"
        ),
        pytest.param(nn.Parameter(torch.tensor([1.5])), (1,), "0000c03f", id="parameter"),
    ],
)
def test_views_are_stored_as_what_they_show(
    tensor: torch.Tensor, shape: tuple[int, ...], expected: str
) -> None:
    found = stored(tensor)
    assert found.shape == shape
    assert found.bits.tobytes().hex() == expected


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.ones(4, dtype=torch.bfloat16)
    assert stored(tensor).bits.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_was_captured_can_be_resized_by_its_owner(
    path: Path, level: Any, dtype: torch.dtype
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], out=x + 1)

    model, x = Model(), torch.ones(2, dtype=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather that nobody did it
        with tensorcap.capture(model, path, level=level):
            output = model(x)
            output.resize_(6)
    assert output.tolist()[:4] == [1, 1, 1, 1]
    assert x.resize_(9).tolist()[:2] == [1, 1]


class Tagged(torch.Tensor):
    """A subclass that adds nothing to the values."""


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: torch.eye(2).to_sparse(), "layout sparse_coo", id="sparse"),
        pytest.param(lambda: torch.ones(2, device="meta"), "on the meta device, without values", id="meta"),
        pytest.param(fake, "a torch._subclasses.fake_tensor.FakeTensor holds no plain values", id="fake"),
        pytest.param(
            nested, "a torch.nested._internal.nested_tensor.NestedTensor holds no plain values", id="nested"
        ),
        pytest.param(
            lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
            "dtype bits8",
            id="dtype-without-values",
        ),
        pytest.param(
            lambda: np.ma.masked_array([1.0], [True]), "a masked array, whose mask would be lost", id="masked"
        ),
        pytest.param(
            lambda: np.array(["a"]), "dtype 'str32' of a numpy array is no tensor dtype", id="numpy-text"
        ),
    ],
)
def test_what_has_no_dense_values_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(NotCapturableError) as caught:
        stored(make())
    assert str(caught.value) == reason


def test_a_quantised_tensor_is_refused_with_the_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that quantisation will go
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(NotCapturableError, match=r"dtype qint8|a quantised tensor \(qint8\)"):
        stored(tensor)


def test_a_subclass_without_values_of_its_own_is_stored() -> None:
    assert stored(torch.ones(1).as_subclass(Tagged)).bits.tolist() == [1]


def test_a_dtype_that_torch_lacks_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no dtype 'float6_e2m3fn'"):
        from_stored(np.zeros(1, "u1"), DTYPES["float6_e2m3fn"])


class Mixed(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"good": x + 1, "bad": torch.eye(2).to_sparse(), "array": np.arange(3)}


def test_a_tensor_that_cannot_be_captured_is_a_point_and_no_error(path: Path) -> None:
    with tensorcap.capture(Mixed(), path) as cap:
        model = cap._model
        model(torch.ones(1))
        model(torch.ones(1))
    with tensorcap.open_archive(path) as archive:
        slots = [r.key.text for r in archive.records if r.key.slot.startswith("output")]
        assert slots == [
            "0/@root/output.good",
            "0/@root/output.array",
            "1/@root/output.good",
            "1/@root/output.array",
        ]
        assert archive.run["points"] == [
            {"site": "@root", "status": "captured", "calls": 2},
            {
                "site": "@root",
                "slots": ["output.bad"],
                "status": "not-capturable",
                "calls": 2,
                "reason": "layout sparse_coo",
            },
        ]
    assert cap.summary is not None
    assert cap.summary.not_capturable == {"@root/output.bad": "layout sparse_coo"}


def test_tensors_inside_a_function_transform_are_not_capturable(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad(), tensorcap.capture(model, path):
        plain = model(torch.ones(3, 2))
        mapped = torch.func.vmap(model)(torch.ones(3, 2))
    assert torch.equal(plain, mapped)
    with tensorcap.open_archive(path) as archive:
        reasons = {p["site"]: p["reason"] for p in archive.run["points"] if p["status"] == "not-capturable"}
        assert set(reasons.values()) == {"inside a function transform (vmap, grad, …)"}


def test_a_scripted_module_and_what_it_holds_is_not_capturable(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that scripting will go
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(scripted, nn.ReLU())
    with torch.no_grad(), tensorcap.capture(model, path):
        model(torch.ones(1, 2))
    with tensorcap.open_archive(path) as archive:
        found = [(p["site"], p["status"], p.get("reason")) for p in archive.run["points"]]
    scripted_reason = "scripted or traced (torch.jit); capture the module that it was made from"
    assert found == [
        ("@root", "captured", None),
        ("0", "not-capturable", scripted_reason),
        ("0.0", "not-capturable", scripted_reason),
        ("1", "captured", None),
    ]


def test_what_runs_inside_a_compiled_graph_is_not_capturable(path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(2, 2), nn.Linear(2, 2)
            self.compiled = torch.compile(self._half, backend="eager", fullgraph=True)

        def _half(self, x: torch.Tensor) -> Any:
            return self.inside(x)

        def forward(self, x: torch.Tensor) -> Any:
            return self.outside(self.compiled(x))

    model = Half()
    wrapped: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    whole = nn.Sequential(model, wrapped)
    with torch.no_grad(), tensorcap.capture(whole, path):
        whole(torch.ones(1, 2))
    with tensorcap.open_archive(path) as archive:
        found = [(p["site"], p["status"], p.get("reason")) for p in archive.run["points"]]
    compiled = "inside a compiled graph (torch.compile); --eager runs it as plain code"
    assert found == [
        ("@root", "captured", None),
        ("0", "captured", None),
        ("0.inside", "not-capturable", compiled),
        ("0.outside", "captured", None),
        ("1", "captured", None),
        ("1.0", "not-capturable", compiled),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_values_are_equal_if_all_are_and_nan_to_nan(dtype: torch.dtype) -> None:
    one, same, other, nan = (
        torch.tensor([1.0, fill, -2.0]).to(dtype) for fill in (torch.nan, torch.nan, 0.5, torch.nan)
    )
    nan[0] = torch.tensor(2.0).to(dtype)
    assert equal_values(one, same)
    assert not any(equal_values(one, each) for each in (other, nan, one[:2], one.double()))
    assert not equal_values(other, one)


def test_whole_numbers_and_complex_values_are_equal_if_all_are() -> None:
    whole, numbers = torch.tensor([1, 2]), torch.tensor([complex(1, math.nan), 2j])
    assert equal_values(whole, whole.clone())
    assert not equal_values(whole, whole + 1)
    assert equal_values(numbers, numbers.clone())
    assert not equal_values(numbers, numbers * 2)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize(
    "form", ["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"]
)
def test_sparse_tensors_are_equal_by_indices_and_values(form: str) -> None:
    plain = torch.tensor([[1.0, 0, 0, torch.nan], [0, 2, 0, 0]])
    size = ((1, 2),) if "bs" in form else ()
    one, same, other, denser = (
        getattr(each, form)(*size) for each in (plain, plain.clone(), plain * 2, plain + 1)
    )
    assert equal_values(one, same)
    assert not any(equal_values(one, each) for each in (other, denser, plain))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values_are_equal_to_none() -> None:
    plain = torch.ones(2, 2)
    for empty in (plain.to("meta"), torch.nested.nested_tensor([plain, plain])):
        assert not equal_values(empty, empty)
        assert not equal_values(plain, empty)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no floats of 4 bits")
def test_floats_of_4_bits_are_equal_if_their_bits_are() -> None:
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    one, same, other = (side.view(torch.float4_e2m1fn_x2) for side in (packed, packed.clone(), packed + 1))
    assert equal_values(one, same)
    assert not equal_values(one, other)
