"""Tensors that come from a device: in order, in bounded memory, as they were at the call.

A stand-in takes the place of the device (`Late`): when a copy arrives, and what goes wrong with it, cannot
be chosen on a real one. tests/benchmarks/capture_cuda.py holds the same against a real one.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters.torch.staging_buffer import StagingBuffer
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.recording import Call, CaptureOptions, Point, Recorder, RecordFilter
from tensorcap_formats.dtypes import DType
from tensorcap_formats.errors import UsageError, WriteError
from tensorcap_formats.keys import Key

KIB = 1024


class Late:
    """Stands in for a device: bytes arrive when somebody waits for them, or when they were asked for often.

    Attributes:
        asks: How often `has_arrived` says no to each copy.
        error: What a copy ends with, in place of arriving.
        refusal: What `send` raises.
        alive_bytes: Bytes of copies on the device now.
        peak_bytes: The most there ever were.
        sends: How many copies were begun.
        settled: How often somebody waited for all of them.
        threads: Names of the threads that asked the device for anything.
    """

    def __init__(self, asks: int = 3) -> None:
        self.asks = asks
        self.error: Exception | None = None
        self.refusal: BaseException | None = None
        self.alive_bytes = self.peak_bytes = 0
        self.memories: list[int] = []
        self.sends = self.settled = 0
        self.lock = threading.RLock()
        self.threads: set[str] = set()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self.memories.append(size_bytes)
        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def start(self, tensor: torch.Tensor, destination: torch.Tensor) -> LateCopy:
        self.threads.add(threading.current_thread().name)
        if self.refusal is not None:
            raise self.refusal
        self.sends += 1
        return LateCopy(self, tensor.clone(memory_format=torch.contiguous_format), destination)

    def synchronize(self) -> None:
        self.settled += 1


class LateCopy:
    def __init__(self, device: Late, private: torch.Tensor, place: torch.Tensor) -> None:
        self.device, self.private, self.place = device, private, place
        self.asks = device.asks
        self.is_there = False
        place.fill_(0xEE)  # what a reader that comes too early sees
        with device.lock:
            device.alive_bytes += private.nbytes
            device.peak_bytes = max(device.peak_bytes, device.alive_bytes)

    def __del__(self) -> None:
        with self.device.lock:
            self.device.alive_bytes -= self.private.nbytes

    def has_arrived(self) -> bool:
        self.device.threads.add(threading.current_thread().name)
        self.asks -= 1
        if self.asks < 0:
            self.wait()
        return self.is_there

    def wait(self) -> None:
        self.device.threads.add(threading.current_thread().name)
        if self.device.error is not None:
            raise self.device.error
        with self.device.lock:
            if not self.is_there:
                self.place.copy_(self.private.reshape(-1).view(torch.uint8))
                self.is_there = True


class Shelf:
    """A sink that keeps what it is given, and takes its time over it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.stored_bytes = 0
        self.kept: list[tuple[int | None, str, bytes, str, tuple[int, ...]]] = []
        self.gate = threading.Event()  # nothing is taken before it is set
        self.gate.set()

    def add(
        self, key: Key, bits: Any, dtype: DType, shape: tuple[int, ...], *, order: int | None = None
    ) -> None:
        assert self.gate.wait(600)
        before = bits.tobytes()
        time.sleep(self.seconds)
        assert bits.tobytes() == before, "somebody wrote where this is read"
        self.stored_bytes += len(before)
        self.kept.append((order, key.slot, before, dtype.name, shape))

    def add_value(self, key_text: str, value: object) -> None:
        pass

    @property
    def slots_in_order(self) -> list[str]:
        return [slot for _, slot, *_ in sorted(self.kept)]


class Stage:
    def __init__(
        self,
        shelf: Any = None,
        device: Late | None = None,
        bound_bytes: int = 4 * KIB,
        small_bytes: int = 0,
    ) -> None:
        self.shelf = Shelf() if shelf is None else shelf
        self.device = Late() if device is None else device
        self.point = Point("site")
        self.recorder = Recorder(self.shelf, {"site": self.point}, RecordFilter(CaptureOptions()))
        self.staging = StagingBuffer(
            self.recorder,
            bound_bytes=bound_bytes,
            small_bytes=small_bytes,
            host_copy_of=lambda _: self.device,
        )
        self.leaves = TensorLeaves(self.recorder, self.staging)
        self.call = Call(self.point, 0, 0)

    def take(self, slot: str, tensor: torch.Tensor) -> bool:
        return self.staging.take(self.call, slot, tensor)


def float32() -> DType:
    return DType("float32", "<f4", "float")


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tensorcap"]


def test_what_is_recorded_is_what_the_tensor_held_when_it_was_taken() -> None:
    stage = Stage()
    tensor = torch.tensor([1.0, 2.0])
    with stage.staging:
        assert stage.take("before", tensor)
        tensor.fill_(9)
        assert stage.take("after", tensor)
        tensor.fill_(0)
    kept = {slot: np.frombuffer(data, "<f4").tolist() for _, slot, data, _, _ in stage.shelf.kept}
    assert kept == {"before": [1, 2], "after": [9, 9]}
    assert not workers()


def test_tensors_on_the_host_keep_their_place_among_those_from_a_device() -> None:
    stage = Stage(device=Late(asks=1000))
    with stage.staging:
        for i in range(6):
            if i % 2:
                bits = np.zeros(1, np.float32)
                stage.recorder.tensor(stage.call, str(i), bits, float32(), (1,))
            else:
                assert stage.take(str(i), torch.ones(1))
        assert [slot for _, slot, *_ in stage.shelf.kept] == ["1", "3", "5"]
    assert stage.shelf.slots_in_order == ["0", "1", "2", "3", "4", "5"]
    assert [order for order, *_ in sorted(stage.shelf.kept)] == [0, 1, 2, 3, 4, 5]


def test_memory_stays_within_the_bound_however_slow_the_disk_is() -> None:
    stage = Stage(Shelf(0.002), bound_bytes=8 * KIB)
    with stage.staging:
        for i in range(40):
            assert stage.take(str(i), torch.full((KIB,), i, dtype=torch.uint8))
            assert len(stage.shelf.kept) >= i - 7  # eight are all that the ring holds
    assert stage.device.memories == [8 * KIB]
    assert stage.device.peak_bytes <= 8 * KIB
    assert [data for *_, data, _, _ in sorted(stage.shelf.kept)] == [bytes([i]) * KIB for i in range(40)]


def test_copies_on_the_device_are_freed_on_arrival_not_on_writing() -> None:
    stage = Stage(device=Late(asks=0), bound_bytes=8 * KIB)
    stage.shelf.gate.clear()
    with stage.staging:
        for i in range(8):
            stage.take(str(i), torch.zeros(KIB, dtype=torch.uint8))
        assert stage.device.peak_bytes <= 2 * KIB
        assert not stage.shelf.kept
        stage.shelf.gate.set()
    assert len(stage.shelf.kept) == 8


@pytest.mark.parametrize("small", [0, 5 * KIB, 64 * KIB])
@pytest.mark.parametrize("asks", [0, 2, 1000])
def test_no_place_is_used_again_before_it_was_read(asks: int, small: int) -> None:
    stage = Stage(Shelf(0.0005), Late(asks), bound_bytes=10 * KIB, small_bytes=small)
    sizes = np.random.default_rng(0).integers(1, 9 * KIB, 200).tolist()

    def take(part: int) -> None:
        for i in range(part, len(sizes), 2):
            assert stage.take(str(i), torch.full((sizes[i],), i, dtype=torch.uint8))

    with stage.staging:
        threads = [threading.Thread(target=take, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {int(slot): data for _, slot, data, _, _ in stage.shelf.kept}
    assert found == {i: bytes([i]) * size for i, size in enumerate(sizes)}


def test_the_worker_asks_the_device_for_nothing() -> None:
    """An event that another thread asks for would spoil a CUDA graph under capture."""
    stage = Stage(Shelf(0.001), bound_bytes=2 * KIB)
    with stage.staging:
        for i in range(20):
            stage.take(str(i), torch.zeros(KIB, dtype=torch.uint8))
    assert stage.device.threads == {threading.current_thread().name}
    assert len(stage.shelf.kept) == 20


def test_small_tensors_are_handed_over_by_hooks_and_large_ones_by_the_worker() -> None:
    class Signed(Shelf):
        def add(self, key: Key, *arguments: Any, **options: Any) -> None:
            signed.append((key.slot, threading.current_thread().name))
            super().add(key, *arguments, **options)

    signed: list[tuple[str, str]] = []
    stage = Stage(Signed(), Late(asks=0), small_bytes=64)
    with stage.staging:
        for i, size in enumerate((64, 64, 65, 64)):
            stage.take(str(i), torch.zeros(size, dtype=torch.uint8))
    own = threading.current_thread().name
    assert signed[:3] == [("0", own), ("1", own), ("2", "tensorcap")]
    assert stage.shelf.slots_in_order == ["0", "1", "2", "3"]


@pytest.mark.parametrize("elements", [0, 4 * KIB + 1], ids=["none", "more-than-the-ring"])
def test_a_tensor_that_the_ring_is_not_for_is_copied_in_the_hook(elements: int) -> None:
    stage = Stage()
    with stage.staging:
        stage.leaves.tensor(stage.call, "first", torch.zeros(1))
        stage.leaves.tensor(stage.call, "second", torch.ones(elements, dtype=torch.uint8))
        stage.leaves.tensor(stage.call, "third", torch.zeros(1))
    assert stage.shelf.slots_in_order == ["first", "second", "third"]
    assert sorted(stage.shelf.kept)[1][2:] == (b"\1" * elements, "uint8", (elements,))


@pytest.mark.parametrize(
    ("tensor", "data", "dtype"),
    [
        pytest.param(torch.tensor(1.5), "0000c03f", "float32", id="0-d"),
        pytest.param(torch.tensor([[1, 2], [3, 4]]).int().t()[1:], "0200000004000000", "int32", id="strided"),
        pytest.param(torch.tensor([1.0, -2.0]).bfloat16(), "803f00c0", "bfloat16", id="bfloat16"),
        pytest.param(torch.tensor([True, False]), "0100", "bool", id="bool"),
        pytest.param(torch.tensor([1.0]).to(torch.float8_e4m3fn), "38", "float8_e4m3fn", id="float8"),
        pytest.param(torch.tensor([1 + 2j]).conj(), "0000803f000000c0", "complex64", id="conjugated"),
        pytest.param(torch.tensor([1 + 2j]).conj().imag, "000000c0", "float32", id="negated"),
        pytest.param(nn.Parameter(torch.tensor([2.0])), "00000040", "float32", id="parameter"),
    ],
)
def test_every_element_arrives_bit_for_bit(tensor: torch.Tensor, data: str, dtype: str) -> None:
    stage = Stage()
    with stage.staging:
        stage.leaves.tensor(stage.call, "output", tensor)
    assert stage.shelf.kept == [(0, "output", bytes.fromhex(data), dtype, tuple(tensor.shape))]
    assert stage.device.threads


def test_a_failure_of_the_disk_ends_the_recording_and_nothing_waits() -> None:
    class Full(Shelf):
        has_ended = False

        def add(self, *arguments: Any, **options: Any) -> None:
            if self.has_ended:
                raise UsageError("the writer has ended")
            if len(self.kept) == 2:
                self.has_ended = True
                raise WriteError("the disk is full")
            super().add(*arguments, **options)

    stage = Stage(Full(0.001), bound_bytes=2 * KIB)
    with stage.staging:
        for i in range(50):
            assert stage.take(str(i), torch.zeros(KIB, dtype=torch.uint8))
    assert str(stage.recorder.failure) == "the disk is full"
    assert stage.shelf.slots_in_order == ["0", "1"]
    assert not stage.point.lost
    assert stage.device.sends < 10  # nothing is copied for nothing
    assert not workers()


def test_an_error_that_nobody_foresaw_is_reported_and_the_rest_is_recorded() -> None:
    class Odd(Shelf):
        def add(self, key: Key, *arguments: Any, **options: Any) -> None:
            if key.slot == "1":
                raise MemoryError("no memory")
            super().add(key, *arguments, **options)

    stage = Stage(Odd())
    with stage.staging:
        for i in range(3):
            stage.take(str(i), torch.zeros(1))
    assert stage.shelf.slots_in_order == ["0", "2"]
    assert stage.point.lost == {"1": ("MemoryError: no memory", 1)}
    assert stage.point.records == 2


def test_a_copy_that_fails_is_reported() -> None:
    stage = Stage(device=Late(asks=0))
    stage.device.error = RuntimeError("an illegal memory access\nand how to debug it")
    with stage.staging:
        stage.take("output", torch.zeros(1))
        stage.take("output.1", torch.zeros(1))
    reason = ("RuntimeError: an illegal memory access", 1)
    assert stage.point.lost == {"output": reason, "output.1": reason}
    assert not stage.shelf.kept
    assert not workers()


def test_without_memory_on_the_device_the_tensor_is_copied_in_the_hook() -> None:
    stage = Stage()
    with stage.staging:
        stage.leaves.tensor(stage.call, "0", torch.zeros(1))
        stage.device.refusal = torch.cuda.OutOfMemoryError("no memory")
        stage.leaves.tensor(stage.call, "1", torch.ones(1))
    assert stage.shelf.slots_in_order == ["0", "1"]
    assert not stage.point.lost


def test_without_pinned_memory_tensors_are_copied_in_the_hook() -> None:
    class Without(Late):
        def allocate(self, size_bytes: int) -> torch.Tensor:
            raise RuntimeError("cannot pin")

    stage = Stage(device=Without())
    with stage.staging:
        stage.leaves.tensor(stage.call, "output", torch.ones(1))
        assert not workers()
    assert stage.shelf.slots_in_order == ["output"]


def test_memory_made_in_inference_mode_is_written_outside_it() -> None:
    stage = Stage()
    with stage.staging:
        with torch.inference_mode():
            stage.leaves.tensor(stage.call, "0", torch.zeros(1))
        stage.leaves.tensor(stage.call, "1", torch.zeros(1))
    assert stage.shelf.slots_in_order == ["0", "1"]
    assert not stage.point.lost


def test_an_interrupt_in_the_copy_leaves_no_gap_that_is_waited_for() -> None:
    stage = Stage()
    with stage.staging:
        stage.take("0", torch.zeros(1))
        stage.device.refusal = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            stage.take("1", torch.zeros(1))
        assert stage.device.settled == 1  # before its place is used again
        stage.device.refusal = None
        stage.take("2", torch.zeros(1))
    assert stage.shelf.slots_in_order == ["0", "2"]


def test_an_interrupt_while_the_end_waits_discards_the_rest_and_ends_the_worker() -> None:
    class Interrupted(Late):
        def start(self, tensor: torch.Tensor, destination: torch.Tensor) -> LateCopy:
            copy = super().start(tensor, destination)
            if tensor[0] == 1:
                copy.wait = self.interrupt  # type: ignore[method-assign]  # this one alone
            return copy

        def interrupt(self) -> None:
            raise KeyboardInterrupt

    stage = Stage(device=Interrupted(asks=1000))
    for i in range(3):
        stage.take(str(i), torch.full((1,), float(i)))
    with pytest.raises(KeyboardInterrupt):
        stage.staging.close()
    assert not workers()
    assert "1" not in stage.shelf.slots_in_order


@pytest.mark.parametrize("taken", [0, 1])
def test_nothing_is_taken_after_the_end(taken: int) -> None:
    stage = Stage()
    with stage.staging:
        for i in range(taken):
            stage.take(str(i), torch.zeros(1))
    assert not stage.take("late", torch.zeros(1))
    assert not workers()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Let every capture take what is on the host for something on a device, with a ring of 64 KiB."""
    late = Late()
    staged = functools.partial(StagingBuffer, bound_bytes=64 * KIB, host_copy_of=lambda _: late)
    monkeypatch.setattr("tensorcap.adapters.torch.adapter.StagingBuffer", staged)
    return late


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = self.second(self.first(x).relu_()).mul_(0.5)
        return x


def test_a_staged_capture_holds_what_an_unstaged_one_holds(
    path: Path, device: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = InPlace(), torch.randn(16, 64)
    with torch.no_grad():
        alone = model(x)
        with tensorcap.capture(model, path):
            assert torch.equal(model(x), alone)
        assert device.peak_bytes
        monkeypatch.undo()
        plain = path.with_name("plain.h5")
        with tensorcap.capture(model, plain):
            model(x)
    with tensorcap.open_archive(path) as found, tensorcap.open_archive(plain) as expected:
        assert [(r.key, r.digest, r.order) for r in found.records] == [
            (r.key, r.digest, r.order) for r in expected.records
        ]
        assert len(found.records) == 82


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_everything_taken_is_in_the_archive_of_a_run_that_failed(
    path: Path, device: Late, error: type[BaseException]
) -> None:
    device.asks = 1000
    model = InPlace()

    def fail() -> None:
        model(torch.randn(1, 64))
        raise error

    with pytest.raises(error), torch.no_grad(), tensorcap.capture(model, path):
        fail()
    with tensorcap.open_archive(path) as archive:
        assert len(archive.records) == 82
        assert not archive.is_complete
    assert not workers()


def test_a_full_disk_is_raised_when_the_block_ends(
    path: Path, device: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = InPlace()
    ended = []

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run() -> None:
        monkeypatch.setattr("tensorcap_formats.writing.writer.write_at", write)
        model(torch.randn(16, 64))
        ended.append("the run was not stopped")

    said = "No space left on device; 0 tensors are safe"
    with pytest.raises(WriteError, match=said), torch.no_grad(), tensorcap.capture(model, path):
        run()
    assert ended
    assert not workers()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_worker_that_it_does_not_have(path: Path, device: Late) -> None:
    device.asks = 1000
    model = InPlace()
    with torch.no_grad(), tensorcap.capture(model, path) as cap:
        model(torch.randn(1, 64))
        pid = os.fork()
        if pid == 0:
            model(torch.randn(1, 64))
            cap.__exit__(None, None, None)
            os._exit(0)
        assert wait_for(pid) == 0
    with tensorcap.open_archive(path) as archive:
        assert len(archive.records) == 82
        assert archive.is_complete


def wait_for(pid: int) -> int:
    for _ in range(6000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


class Slowly(Point):
    """Lets other threads in between reading a count and writing it back."""

    __slots__ = ("count",)

    @property
    def records(self) -> int:
        found: int = getattr(self, "count", 0)
        time.sleep(1e-5)
        return found

    @records.setter
    def records(self, value: int) -> None:
        self.count = value


class SlowDict(dict[str, tuple[str, int]]):
    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        time.sleep(1e-5)
        return found


def test_recorders_count_right_when_several_threads_record() -> None:
    stage = Stage()
    point = Slowly("site", lost=SlowDict())
    call = Call(point, 0, 0)
    bits = np.zeros(1, np.float32)

    def record(name: str) -> None:
        for i in range(100):
            stage.recorder.tensor(call, f"{name}.{i}", bits, float32(), (1,))
            stage.recorder.lose(point, "lost", "why")

    threads = [threading.Thread(target=record, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert point.records == 400
    assert point.lost == {"lost": ("why", 400)}
    assert sorted(order for order, *_ in stage.shelf.kept if order is not None) == list(range(400))


@pytest.mark.parametrize(
    ("losses", "absent"),
    [
        pytest.param(
            [("it is fused", "fused"), ("it is fused", "fused")], {"output": "fused"}, id="by-nature"
        ),
        pytest.param([("it is fused", "fused"), ("it is sparse", None)], {}, id="then-lost"),
        pytest.param([("it is sparse", None), ("it is fused", "fused")], {}, id="lost-before"),
    ],
)
def test_a_slot_is_absent_by_nature_if_it_is_so_in_all_calls(losses: Any, absent: Any) -> None:
    stage = Stage()
    for reason, absence in losses:
        stage.recorder.lose(stage.point, "output", reason, absence=absence)
    assert stage.point.absent == absent
    assert stage.point.lost == {"output": ("it is fused" if absent else "it is sparse", 2)}
