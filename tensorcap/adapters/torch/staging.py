"""From a device's memory to the recorder, without making the model wait for the copy or for the disk.

In the hook a tensor is copied on its device, and from there into a ring of pinned host memory on a stream
of its own, which the model's stream never waits for; one thread hands what has arrived to the recorder.
Small tensors are handed over by the hooks that come by later: most of that work is Python's, and two threads
that pass its lock back and forth take longer than one.
Parcels leave the ring in the order in which they came in, so its two ends are those of the oldest and of
the newest one. A hook waits only where the ring is full.

The worker makes no call to the device: an event that another thread asks for spoils a CUDA graph under
capture (mode `global`). Hooks ask, as they come by, and the end of the capture waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tensorcap.adapters.torch.host_copy import HostCopy, PendingTransfer, host_copy_for
from tensorcap.adapters.torch.tensors import logical_dtype
from tensorcap.recording.recorder import Call, Recorder
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import WriteError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

SMALL_BYTES: Final = 64 << 10
BOUND_BYTES: Final = 256 << 20  # a power of two, to which torch rounds pinned memory up
_ALIGNMENT: Final = 256  # as torch aligns memory on a device


@dataclass(slots=True)
class _PendingCopy:
    """A tensor on its way; `transfer` is None once it has arrived, `loss` says why it never will."""

    call: Call
    slot: str
    dtype: DType
    shape: tuple[int, ...]
    required: bool
    order: int
    start: int
    size: int
    transfer: PendingTransfer | None
    loss: str = ""

    @property
    def end(self) -> int:
        """Where the next parcel may begin."""
        return self.start + -(-self.size // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """The ring and its worker; both are made when the first tensor comes, and gone after the block."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        bound_bytes: int = BOUND_BYTES,
        small_bytes: int = SMALL_BYTES,
        lane_of: Callable[[torch.device], HostCopy | None] = host_copy_for,
    ) -> None:
        """Prepare for tensors.

        Args:
            recorder: Takes them.
            bound_bytes: How much host memory they may fill. Their copies on all devices fill no more, and
                what a hook that waits holds.
            small_bytes: Up to this size they are handed over by hooks.
            lane_of: Makes the lane of a device, or None where there is none.
        """
        self._recorder = recorder
        self._bound = bound_bytes
        self._small = small_bytes
        self._lane_of = lane_of
        self._lanes: dict[torch.device, HostCopy | None] = {}
        self._memory: torch.Tensor | None = None
        self._held: deque[_PendingCopy] = deque()  # all that are in the ring, the oldest first
        self._flying: deque[_PendingCopy] = deque()  # those that had not arrived when last asked
        self._claimant: int | None = None  # the thread that hands the oldest over
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)  # something has left the ring
        self._for_worker = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None
        self._is_closed = False
        self._discards = False
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, call: Call, slot: str, tensor: torch.Tensor, *, required: bool = False) -> bool:
        """Take a tensor that the recorder wants, with the values that it has now.

        Args:
            call: As for `Recorder.tensor`.
            slot: As for `Recorder.tensor`.
            tensor: Plain, of any strides, on a device.
            required: As for `Recorder.tensor`.

        Returns:
            Whether it was taken. It is not where there is no lane, where there are no bytes or more than
            the ring holds, and where the device has no memory for a copy.
        """
        device = tensor.device
        lane = self._lanes[device] if device in self._lanes else self._open(device)
        if lane is None:
            return False
        size = tensor.nbytes
        if not 0 < size <= self._bound:
            return False
        dtype, shape = logical_dtype(tensor.dtype), tuple(tensor.shape)
        while True:
            self._hand_over_small()
            with self._lock:
                if self._memory is None:
                    return False  # it has ended
                if self._recorder.failure is not None or self._recorder.stopped is not None:
                    return True  # nothing is recorded any more
                start = self._room_for(size)
                if start is not None:
                    try:
                        transfer = lane.send(tensor, self._memory[start : start + size])
                    except torch.cuda.OutOfMemoryError:
                        lane.settle()
                        self._pass_on()  # which frees memory there
                        return False
                    except BaseException:  # nobody else is given the place while a copy may be under way
                        lane.settle()
                        raise
                    order = self._recorder.next_order()
                    parcel = _PendingCopy(call, slot, dtype, shape, required, order, start, size, transfer)
                    self._held.append(parcel)
                    self._flying.append(parcel)
                    return True
                oldest = self._held[0]
                if oldest.transfer is None:
                    if self._claimant is not None or oldest.size > self._small:
                        self._room.wait()
                    continue
            self._await(oldest)

    def close(self) -> None:
        """Hand over everything that was taken, and end; after an interrupt, what is left is discarded."""
        if os.getpid() != self._process:
            return  # in a forked process there is no worker, and a lock may be held for ever
        try:
            with self._lock:
                if self._claimant == threading.get_ident():
                    self._claimant = None  # an interrupt came before it handed anything over
                left = list(self._held)
            for parcel in left:
                self._await(parcel)
            self._end()
        except BaseException:
            self._discards = True
            with self._lock:
                for parcel in self._held:
                    parcel.transfer = None
            self._end()
            raise

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True
            self._for_worker.notify()
        if self._worker is not None:
            self._worker.join()
        self._memory = None

    def _open(self, device: torch.device) -> HostCopy | None:
        """Make the lane of a device; what cannot be had is done without."""
        with self._lock:
            if device not in self._lanes:
                lane = None
                try:
                    lane = None if self._is_closed else self._lane_of(device)
                    if lane is not None and self._worker is None:
                        self._start(lane)
                except RuntimeError:  # no pinned memory is left, or no thread
                    lane = None
                self._lanes[device] = lane
            return self._lanes[device]

    def _start(self, lane: HostCopy) -> None:
        with torch.inference_mode(False):  # else only that mode could write there
            memory = lane.memory(self._bound)
        worker = threading.Thread(target=self._work, name="tensorcap", daemon=True)
        worker.start()
        self._memory, self._worker = memory, worker

    def _room_for(self, size: int) -> int | None:
        """Where so many bytes of the ring are free; the lock is held."""
        if not self._held:
            return 0
        first, last = self._held[0].start, self._held[-1]
        if last.start < first:  # what is held goes round the end
            return last.end if size <= first - last.end else None
        if size <= self._bound - last.end:
            return last.end
        return 0 if size <= first else None

    def _pass_on(self) -> None:
        """Give the worker what has arrived in the meantime; the lock is held."""
        while self._flying:
            parcel = self._flying[0]
            try:
                if parcel.transfer is not None and not parcel.transfer.has_arrived():
                    break
            except RuntimeError as error:
                parcel.loss = _reason(error)
            self._flying.popleft()
            self._arrived(parcel)

    def _await(self, parcel: _PendingCopy) -> None:
        """Wait until a parcel has arrived; the lock is not held, so that the worker goes on."""
        transfer = parcel.transfer
        if transfer is None:
            return
        try:
            transfer.wait()
        except RuntimeError as error:
            parcel.loss = _reason(error)
        with self._lock:
            self._arrived(parcel)

    def _arrived(self, parcel: _PendingCopy) -> None:
        parcel.transfer = None  # the copy on the device is free again
        self._call_worker()

    def _is_ready(self) -> bool:
        """Whether the oldest has arrived and nobody hands it over; the lock is held."""
        return bool(self._held) and self._held[0].transfer is None and self._claimant is None

    def _call_worker(self) -> None:
        """Wake the worker if there is something for it alone; the lock is held."""
        if self._is_closed or (self._is_ready() and self._held[0].size > self._small):
            self._for_worker.notify()

    def _work(self) -> None:
        """Hand parcels over, one after another, until the end; then the small ones too."""
        while True:
            with self._lock:
                while not (self._is_ready() and (self._is_closed or self._held[0].size > self._small)):
                    if self._is_closed and not self._held:
                        return
                    self._for_worker.wait()
                parcel = self._claim()
            self._finish(parcel)

    def _hand_over_small(self) -> None:
        """Hand over what is small and next."""
        while True:
            with self._lock:
                self._pass_on()
                if not self._is_ready() or self._held[0].size > self._small:
                    return
                parcel = self._claim()
            self._finish(parcel)

    def _claim(self) -> _PendingCopy:
        self._claimant = threading.get_ident()
        return self._held[0]

    def _finish(self, parcel: _PendingCopy) -> None:
        try:
            self._hand_over(parcel)
        finally:
            with self._lock:
                self._held.popleft()
                self._claimant = None
                self._room.notify_all()
                self._call_worker()

    def _hand_over(self, parcel: _PendingCopy) -> None:
        recorder, memory = self._recorder, self._memory
        if self._discards or memory is None or recorder.failure is not None:
            return
        reason = parcel.loss
        if not reason:
            raw: Array = memory[parcel.start : parcel.start + parcel.size].numpy()
            try:
                recorder.tensor(
                    parcel.call,
                    parcel.slot,
                    raw.view(parcel.dtype.storage),
                    parcel.dtype,
                    parcel.shape,
                    required=parcel.required,
                    order=parcel.order,
                )
            except WriteError:
                return  # the recorder has it, and the end of the block tells it
            except Exception as error:
                reason = _reason(error)
            else:
                return
        recorder.lose(parcel.call.point, parcel.slot, reason, call=parcel.call, required=parcel.required)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
