"""A compilation reports itself, says what is kept if it is cut, and is made ahead for all runs of a model."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.dtype import DType
from max.graph import TensorType

from tensorcap import MaxModel, Workload
from tensorcap.adapters import adapter_for, native_call
from tensorcap.adapters.max import compilation
from tensorcap.rerun import inject
from tensorcap.session import capture_workload
from tests.max.nets import AFTER, ON_CPU, X, chain


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of MAX with an entry of before; reports come without a pause."""
    folder = tmp_path / "cache" / ".max_cache"
    folder.mkdir(parents=True)
    (folder / "before").write_bytes(b"x")
    os.utime(folder / "before", (1, 1))
    monkeypatch.setattr(compilation, "cache_folder", lambda: folder)
    monkeypatch.setattr(native_call, "REPORT_SECONDS", 0.0)
    return folder


@pytest.mark.spec("MAX-111")
def test_lines_say_what_is_compiled_for_how_long_and_where_it_is_kept(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_() -> str:
        time.sleep(0.5)
        (cache / "graph").write_bytes(b"x" * 10)
        return "compiled"

    with caplog.at_level(logging.INFO, "tensorcap"):
        assert compilation.compile_reported("Net with 3 taps", compile_) == ("compiled", False)
    assert caplog.messages[0] == (
        f"MAX compiles Net with 3 taps, for 0 s by now; what it has compiled is kept in {cache.parent}"
    )
    assert compilation.compile_reported("Net", lambda: "again") == ("again", True)


@pytest.mark.spec("MAX-111")
def test_a_compilation_that_is_cut_says_what_is_kept(cache: Path) -> None:
    release = threading.Event()

    def compile_() -> None:
        (cache.parent / "kernel").write_bytes(b"x" * 2_500_000)
        signal.raise_signal(signal.SIGINT)  # as a terminal does meanwhile
        release.wait(60)

    with pytest.raises(KeyboardInterrupt) as caught:
        compilation.compile_reported("Net with 3 taps", compile_)
    assert native_call.is_any_left()
    release.set()
    assert caught.value.__notes__ == [
        f"MAX was compiling Net with 3 taps, for 0 s; kept of it in {cache.parent}: 1 file, 2.5 MB; "
        "graphs that were compiled before are kept"
    ]


@pytest.mark.slow
@pytest.mark.spec("MAX-112", "MAX-31")
def test_what_is_compiled_ahead_serves_all_runs_of_a_model(tmp_path: Path) -> None:
    model = MaxModel(chain(), input_types=[TensorType(DType.float32, ["rows", 4], ON_CPU)])
    ahead = adapter_for(model).compile_ahead(Workload(model, (X,)))
    assert [one.text.partition("Chain ")[2] for one in ahead] == [
        "with 6 taps and switches at 6 values",  # 3 results, and 3 values behind switches
        "without taps",
    ]
    capture_workload(Workload(model, (X,)), tmp_path / "ref.h5", injectable=("input",))
    for outputs in ((), ("*layers.0",)):
        inject(tmp_path / "ref.h5", Workload(model, (X,)), tmp_path / f"{len(outputs)}.h5", outputs=outputs)
    other = model.with_weights({f"layers.{i}.weight": np.ones(4, np.float32) for i in range(3)})
    capture_workload(Workload(other, (X,)), tmp_path / "other.h5", injectable=("output",))
    assert len(model.compiled.graphs) == 2
    once = MaxModel(chain(), input_types=model.input_types, control=False)
    seen: list[Any] = []
    alone = Workload(once, (X,), lambda found, x: seen.extend(found(x)))
    assert [one.is_cached for one in adapter_for(once).compile_ahead(alone)] == [True]
    np.testing.assert_array_equal(seen[0].to_numpy(), AFTER[2])


@pytest.mark.spec("MAX-113")
def test_floating_inputs_are_rounded_to_the_precision_of_the_port() -> None:
    inputs: dict[str, Any] = {"x": np.array([1.0, 1.001], np.float32), "ids": np.array([3])}
    prepared = adapter_for(chain()).prepare(Workload(chain(), inputs), input_dtype="bfloat16")
    values: Any = prepared.inputs
    assert values["x"].dtype == DType.bfloat16
    assert values["x"].view(DType.uint16, [2]).to_numpy().tolist() == [0x3F80, 0x3F80]
    assert values["ids"] is inputs["ids"]
