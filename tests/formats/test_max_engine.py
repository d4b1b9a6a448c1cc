"""MAX's own engine and reader, and ours: each reads what the other wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.foreign import MAX_DTYPE_CODES, write_max
from tensorcap_formats.open import open_archive

pytestmark = pytest.mark.slow

# One graph of prints only, which compiles in seconds, in a process of its own: a compile cannot be stopped.
PROGRAM = r"""
import sys
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

names = ["float32", "float16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
         "uint64", "bool"]
cpu = DeviceRef.CPU()
types = [TensorType(DType[name], ["n", 3], cpu) for name in names]
types += [TensorType(DType.bfloat16, ["n", 3], cpu), TensorType(DType.float32, [], cpu)]
with Graph("prints", input_types=types) as graph:
    for name, value in zip([*names, "bfloat16"], graph.inputs):
        value.tensor.print(f"model.layers.layers.0.{name}-output")
    graph.inputs[-1].tensor.print("model.layers.layers.0.scalar(2)-input_scale")
    graph.inputs[0].tensor.print("with/slash")
    graph.output(graph.inputs[0])
session = InferenceSession(devices=[CPU()])
session.set_debug_print_options("BINARY_MAX_CHECKPOINT", output_directory=sys.argv[1])
model = session.load(graph)
base = np.arange(6).reshape(2, 3)
buffers = [Buffer.from_numpy(np.ascontiguousarray(base.astype(np.dtype(name)))) for name in names]
halves = (base.astype(np.float32) - 2.5).view(np.uint32) >> 16
buffers.append(Buffer.from_numpy(halves.astype(np.uint16)).view(DType.bfloat16))
buffers.append(Buffer.from_numpy(np.array(7.5, np.float32)))
model.execute(*buffers)
session.set_debug_print_options("BINARY", output_directory=sys.argv[2])
model.execute(*buffers)
"""


@pytest.mark.spec("MXF-1", "MXF-6")
def test_files_that_the_engine_wrote_are_read_as_what_was_printed(tmp_path: Path) -> None:
    pytest.importorskip("max")
    dump, raw = tmp_path / "dump", tmp_path / "raw"
    command = [sys.executable, "-c", PROGRAM, str(dump), str(raw)]
    here = dict(os.environ)  # where MAX was imported before, it has changed what a child would inherit
    subprocess.run(command, check=True, capture_output=True, timeout=500, env=here)
    with open_archive(dump) as archive:
        assert archive.is_complete
        assert not archive.skipped
        values = {
            record.key.text: (record.dtype.name, archive.load(record).tolist()) for record in archive.records
        }
    base = [[0, 1, 2], [3, 4, 5]]
    plain = ["float32", "float16", "float64", "int8", "int16", "int32", "int64", "uint8"]
    plain += ["uint16", "uint32", "uint64"]
    assert values == {
        **{f"0/layers.0.{name}/output": (name, base) for name in plain},
        "0/layers.0.bool/output": ("bool", [[False, True, True], [True, True, True]]),
        "0/layers.0.bfloat16/output": ("bfloat16", [[-2.5, -1.5, -0.5], [0.5, 1.5, 2.5]]),
        "0/layers.0.scalar@1/input.scale": ("float32", 7.5),
        "0/probe:with_slash/value": ("float32", base),
    }
    with open_archive(f"{raw / 'model.layers.layers.0.int16-output'}:int16:2,3") as archive:
        assert archive.read(archive.records[0]).tolist() == base


@pytest.mark.spec("MXF-1", "MXF-6")
def test_files_of_ours_are_read_by_the_reader_of_max(tmp_path: Path) -> None:
    driver, max_dtype = pytest.importorskip("max.driver"), pytest.importorskip("max.dtype")
    for name, code in MAX_DTYPE_CODES.items():
        assert max_dtype.DType(code) == max_dtype.DType[name]
        path, dtype = tmp_path / f"{name}.max", DTYPES[name]
        bits = np.arange(6 * dtype.itemsize, dtype="u1") & (1 if name == "bool" else 255)
        write_max(path, f"model.{name}-output", dtype, (2, 3), [bits.view(dtype.storage)])
        if name.startswith(("float4_", "float6_")):  # it knows the code, and has no array of these
            with pytest.raises(ValueError, match=rf"DType\.{name}$"):
                driver.load_max_buffer(path)
            continue
        buffer = driver.load_max_buffer(path)
        given = "uint8" if name.startswith("float8") else name  # as numpy, through which it maps files
        assert (buffer.dtype, tuple(buffer.shape)) == (max_dtype.DType[given], (2, 3))
        as_bytes = buffer.view(max_dtype.DType.uint8, (6 * dtype.itemsize,)).to_numpy()
        assert as_bytes.tobytes() == bits.tobytes()
