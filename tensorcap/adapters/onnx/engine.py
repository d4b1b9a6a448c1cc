"""Sessions of ONNX Runtime, and its values as stored bits; nothing else imports the runtime."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap_formats.dtypes import DTYPES, Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate

VERSION: Final = ort.__version__
ONNX_VERSION: Final = onnx.__version__
_QUIET: Final = 3  # errors alone
_LEVELS: Final = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_SHARED: Final = "session.use_env_allocators"
_SEPARATE: Final = (
    "session.disable_quant_qdq"  # of Q and DQ, not moved past transpositions: 1.32 ends at switches
)
_FOLDER: Final = "session.model_external_initializers_file_folder_path"
PACKED: Final = ("int4", "uint4", "int2", "uint2", "float4e2m1")  # of which a byte holds several
_OF_RUNTIME: Final = {"float": "float32", "double": "float64"}  # its names of types, where they are its own


def dtype_name(text: str) -> str:
    """The dtype in a type of a tensor as the runtime writes it, or in a name of an element type of ONNX.

    Example:
        >>> dtype_name("tensor(float)"), dtype_name("int64"), dtype_name("float8e4m3fn")
        ('float32', 'int64', 'float8_e4m3fn')
    """
    name = text.removeprefix("tensor(").removesuffix(")")
    return _OF_RUNTIME.get(name, name.replace("float8e", "float8_e"))


def type_name(element_type: int) -> str:
    """The dtype of an element type of ONNX, as numpy names it: `float32`."""
    return dtype_name(TensorProto.DataType.Name(element_type).lower())


def element_type_of(dtype: str) -> int | None:
    """The element type of ONNX of a dtype; None if it has none."""
    return _ELEMENT_TYPES.get(dtype)


_ELEMENT_TYPES: Final = {type_name(number): number for number in TensorProto.DataType.values()}


def refuse_absent_providers(name: str, providers: Sequence[str]) -> None:
    """Refuse providers that this installation of the runtime does not have.

    Raises:
        UsageError: One is absent.
    """
    available = ort.get_available_providers()
    for provider in providers:
        if provider not in available:
            raise UsageError(
                f"{name}: provider {provider}: not in this onnxruntime {VERSION}, "
                f"expected of: {', '.join(available)}"
            )


class Session:
    """A session of the runtime.

    Attributes:
        outputs: Type of each output by name, as the runtime writes it: `tensor(float)`.
    """

    def __init__(
        self,
        name: str,
        model: str | bytes,
        *,
        providers: Sequence[str],
        optimization: str,
        folder: Path | None = None,
        weights: Mapping[str, Any] | None = None,
        is_tapped: bool = False,
        is_profiled: bool = False,
    ) -> None:
        """Make a session.

        Args:
            name: The model, for messages.
            model: Path of a file, or the bytes of a model.
            providers: Names of execution providers.
            optimization: One of `OPTIMIZATIONS`.
            folder: Where files of external weights are, for a model of bytes.
            weights: Values of weights that the bytes call external, by name.
            is_tapped: Whether it is one of several of a graph with taps: it is run in the order of its nodes,
                shapes first, and shares memory with the others.
            is_profiled: Whether `kernels` will be asked.

        Raises:
            UsageError: The runtime refuses the model.
        """
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        options.graph_optimization_level = _LEVELS[optimization]
        if folder is not None:
            options.add_session_config_entry(_FOLDER, str(folder))
        if weights:
            options.add_external_initializers(list(weights), list(weights.values()))
        if is_tapped:
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            _share_memory()
            options.add_session_config_entry(_SHARED, "1")
            options.add_session_config_entry(_SEPARATE, "1")
            options.enable_mem_pattern = False
        self._name = name
        self._profiles = tempfile.TemporaryDirectory(prefix="tensorcap-") if is_profiled else None
        if self._profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = f"{self._profiles.name}/profile"
        try:
            self._session = ort.InferenceSession(model, options, providers=list(providers))
        except Exception as error:
            raise UsageError(f"{name}: onnxruntime {VERSION} cannot load it: {_reason(error)}") from None
        self.outputs = {output.name: str(output.type) for output in self._session.get_outputs()}

    def run(self, wanted: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model on values of the runtime; return outputs by name.

        Raises:
            CaptureError: The runtime failed.
        """
        try:
            return dict(
                zip(wanted, self._session.run_with_ort_values(list(wanted), dict(values)), strict=True)
            )
        except Exception as error:
            raise CaptureError(f"{self._name}: onnxruntime cannot run it: {_reason(error)}") from None

    def kernels(self) -> dict[str, int]:
        """How many kernels of each operator the run had, which ends the profile."""
        assert self._profiles is not None
        path = Path(self._session.end_profiling())
        events = json.loads(path.read_text())
        self._profiles.cleanup()
        names = {
            (event["name"], event["args"].get("op_name"))
            for event in events
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
        }
        return dict(sorted(Counter(str(op) for _, op in names).items()))


@cache
def _share_memory() -> None:
    """Give the process an arena of memory for all sessions that ask for it."""
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, None)


def _reason(error: Exception) -> str:
    """The first line of a message of the runtime, without its prefix."""
    line = str(error).strip().partition("\n")[0]
    return abbreviate(line.rpartition("[ONNXRuntimeError] : ")[2], 400)


def to_runtime(array: Array) -> Any:
    """A value of the runtime that shares the memory of an array."""
    return ort.OrtValue.ortvalue_from_numpy(np.require(array, requirements=["C", "A"]))


def from_stored(bits: Array, dtype: DType, element_type: int) -> Any:
    """A value of the runtime of stored elements."""
    if dtype.is_native:
        return to_runtime(bits)
    raw = np.require(bits, requirements=["C", "A"]).view(f"u{dtype.itemsize}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element_type)


def stored(value: Any) -> tuple[Array, DType]:
    """The stored elements of a value of the runtime, and their dtype.

    Raises:
        NotCapturableError: It is no tensor of numbers.
    """
    if not value.is_tensor():
        raise NotCapturableError("it is no tensor but a sequence or a map")
    text = str(value.data_type()).removeprefix("tensor(").removesuffix(")")
    if text == "string":
        raise NotCapturableError("its elements are text")
    dtype = DTYPES.get(dtype_name(text))
    if dtype is None or text in PACKED:
        raise NotCapturableError(f"dtype {text}")
    if dtype.is_native or dtype.kind == "bool":
        array = np.asarray(value.numpy(), order="C")
        return bits_of(array), dtype_of(array)
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not count:
        return np.zeros(shape, dtype.storage), dtype
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(value.data_ptr())).copy()
    return raw.view(dtype.storage).reshape(shape), dtype
