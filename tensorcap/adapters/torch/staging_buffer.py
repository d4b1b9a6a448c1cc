"""A staging buffer: tensors reach the recorder without making the model wait for the copy or the disk.

In the hook a tensor is copied on its device, and from there into a ring of pinned host memory on a stream
of its own, which the model's stream never waits for; one thread gives copies that have arrived to the
recorder. Small tensors are given over by later hooks: most of that work is Python's, and two threads that
pass its lock back and forth take longer than one.
Copies leave the ring in the order in which they came in, so its two ends are those of the oldest and of
the newest one. A hook waits only if the ring is full.

The worker makes no call to the device: an event that another thread asks for spoils a CUDA graph under
capture (mode `global`). Hooks ask when they run, and the end of the capture waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tensorcap.adapters.torch.host_copy import HostCopy, Transfer, host_copy_for
from tensorcap.adapters.torch.tensors import logical_dtype
from tensorcap.recording import Call, Recorder
from tensorcap_formats.dtypes import Array, DType

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

SMALL_BYTES: Final = 64 << 10
BOUND_BYTES: Final = 256 << 20  # a power of two, to which torch rounds pinned memory up
_ALIGNMENT: Final = 256  # as torch aligns memory on a device


@dataclass(slots=True)
class _PendingCopy:
    """A copy of a tensor in the ring; `transfer` is None once it has arrived, `loss` is why it never will."""

    call: Call
    slot: str
    dtype: DType
    shape: tuple[int, ...]
    required: bool
    order: int
    start: int
    size: int
    transfer: Transfer | None
    loss: str = ""

    @property
    def end(self) -> int:
        """Where the next copy may begin."""
        return self.start + -(-self.size // _ALIGNMENT) * _ALIGNMENT


class StagingBuffer:
    """The ring and its worker; both are made for the first tensor, and gone after the block."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        bound_bytes: int = BOUND_BYTES,
        small_bytes: int = SMALL_BYTES,
        host_copy_of: Callable[[torch.device], HostCopy | None] = host_copy_for,
    ) -> None:
        """Prepare for tensors.

        Args:
            recorder: Takes the tensors.
            bound_bytes: The size of the ring in host memory. The copies on all devices take no more, and
                one more tensor for a hook that waits.
            small_bytes: The size up to which tensors are given over by hooks.
            host_copy_of: Makes the `HostCopy` of a device; None if it has none.
        """
        self._recorder = recorder
        self._bound = bound_bytes
        self._small = small_bytes
        self._host_copy_of = host_copy_of
        self._host_copies: dict[torch.device, HostCopy | None] = {}
        self._memory: torch.Tensor | None = None
        self._ring: deque[_PendingCopy] = deque()  # all that are in the ring, the oldest first
        self._flying: deque[_PendingCopy] = deque()  # those that had not arrived when last asked
        self._claimant: int | None = None  # the thread that gives the oldest to the recorder
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
            Whether it was taken. It is not if the device has no host copy or no memory for one more copy, or
            if the tensor has no bytes or more than the ring holds.
        """
        device = tensor.device
        host_copy = self._host_copies[device] if device in self._host_copies else self._open(device)
        if host_copy is None:
            return False
        size = tensor.nbytes
        if not 0 < size <= self._bound:
            return False
        dtype, shape = logical_dtype(tensor.dtype), tuple(tensor.shape)
        while True:
            self._give_over_small()
            with self._lock:
                if self._memory is None:
                    return False  # the staging is closed
                if self._recorder.failure is not None or self._recorder.stopped is not None:
                    return True  # nothing is recorded any more
                start = self._room_for(size)
                if start is not None:
                    try:
                        transfer = host_copy.start(tensor, self._memory[start : start + size])
                    except torch.cuda.OutOfMemoryError:
                        host_copy.synchronize()
                        self._release_arrived()  # frees memory on the device
                        return False
                    except BaseException:  # no other copy may begin there while this one may be under way
                        host_copy.synchronize()
                        raise
                    order = self._recorder.next_order()
                    pending = _PendingCopy(call, slot, dtype, shape, required, order, start, size, transfer)
                    self._ring.append(pending)
                    self._flying.append(pending)
                    return True
                oldest = self._ring[0]
                if oldest.transfer is None:
                    if self._claimant is not None or oldest.size > self._small:
                        self._room.wait()
                    continue
            self._await(oldest)

    def close(self) -> None:
        """Give over everything that was taken, and end; after an interrupt, the rest is discarded."""
        if os.getpid() != self._process:
            return  # in a forked process there is no worker, and a lock may be held for ever
        try:
            with self._lock:
                if self._claimant == threading.get_ident():
                    self._claimant = None  # an interrupt came before it gave anything over
                left = list(self._ring)
            for pending in left:
                self._await(pending)
            self._end()
        except BaseException:
            self._discards = True
            with self._lock:
                for pending in self._ring:
                    pending.transfer = None
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
        """Make the host copy of a device; None if it cannot be made."""
        with self._lock:
            if device not in self._host_copies:
                host_copy = None
                try:
                    host_copy = None if self._is_closed else self._host_copy_of(device)
                    if host_copy is not None and self._worker is None:
                        self._start(host_copy)
                except RuntimeError:  # no pinned memory is left, or no thread
                    host_copy = None
                self._host_copies[device] = host_copy
            return self._host_copies[device]

    def _start(self, host_copy: HostCopy) -> None:
        with torch.inference_mode(False):  # else only that mode could write there
            memory = host_copy.allocate(self._bound)
        worker = threading.Thread(target=self._work, name="tensorcap", daemon=True)
        worker.start()
        self._memory, self._worker = memory, worker

    def _room_for(self, size: int) -> int | None:
        """The start of free memory in the ring; None if there is too little. The lock is held."""
        if not self._ring:
            return 0
        first, last = self._ring[0].start, self._ring[-1]
        if last.start < first:  # the copies go round the end of the ring
            return last.end if size <= first - last.end else None
        if size <= self._bound - last.end:
            return last.end
        return 0 if size <= first else None

    def _release_arrived(self) -> None:
        """Give the worker the copies that have arrived in the meantime; the lock is held."""
        while self._flying:
            pending = self._flying[0]
            try:
                if pending.transfer is not None and not pending.transfer.has_arrived():
                    break
            except RuntimeError as error:
                pending.loss = _reason(error)
            self._flying.popleft()
            self._arrived(pending)

    def _await(self, pending: _PendingCopy) -> None:
        """Wait until a copy has arrived; the lock is not held, so that the worker goes on."""
        transfer = pending.transfer
        if transfer is None:
            return
        try:
            transfer.wait()
        except RuntimeError as error:
            pending.loss = _reason(error)
        with self._lock:
            self._arrived(pending)

    def _arrived(self, pending: _PendingCopy) -> None:
        pending.transfer = None  # the copy on the device is free again
        self._call_worker()

    def _is_ready(self) -> bool:
        """Whether the oldest has arrived and no thread gives it over; the lock is held."""
        return bool(self._ring) and self._ring[0].transfer is None and self._claimant is None

    def _call_worker(self) -> None:
        """Wake the worker if there is work that hooks do not do; the lock is held."""
        if self._is_closed or (self._is_ready() and self._ring[0].size > self._small):
            self._for_worker.notify()

    def _work(self) -> None:
        """Give copies to the recorder, one after another, until the end; then the small ones too."""
        while True:
            with self._lock:
                while not (self._is_ready() and (self._is_closed or self._ring[0].size > self._small)):
                    if self._is_closed and not self._ring:
                        return
                    self._for_worker.wait()
                pending = self._claim()
            self._finish(pending)

    def _give_over_small(self) -> None:
        """Give over copies from the oldest on, as long as they have arrived and are small."""
        while True:
            with self._lock:
                self._release_arrived()
                if not self._is_ready() or self._ring[0].size > self._small:
                    return
                pending = self._claim()
            self._finish(pending)

    def _claim(self) -> _PendingCopy:
        self._claimant = threading.get_ident()
        return self._ring[0]

    def _finish(self, pending: _PendingCopy) -> None:
        try:
            self._give_over(pending)
        finally:
            with self._lock:
                self._ring.popleft()
                self._claimant = None
                self._room.notify_all()
                self._call_worker()

    def _give_over(self, pending: _PendingCopy) -> None:
        recorder, memory = self._recorder, self._memory
        if self._discards or memory is None or recorder.failure is not None:
            return
        reason = pending.loss
        if not reason:
            raw: Array = memory[pending.start : pending.start + pending.size].numpy()
            try:
                recorder.tensor(
                    pending.call,
                    pending.slot,
                    raw.view(pending.dtype.storage),
                    pending.dtype,
                    pending.shape,
                    required=pending.required,
                    order=pending.order,
                )
            except Exception as error:
                reason = _reason(error)
            else:
                return
        recorder.lose(pending.call.point, pending.slot, reason, call=pending.call, required=pending.required)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
