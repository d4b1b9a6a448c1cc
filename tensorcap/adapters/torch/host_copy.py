"""Copies from a device's memory into the host's, beside the model's own work.

None of them uses the default stream: a tensor is ready on the stream that is current on its device when a
hook sees it, since the model's next op would read it there.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Transfer(Protocol):
    """A copy under way; a reference to it keeps the memory alive that is copied from."""

    def has_arrived(self) -> bool:
        """Whether all bytes have arrived; does not wait."""

    def wait(self) -> None:
        """Wait until all bytes have arrived."""


class HostCopy(Protocol):
    """Copies tensors of one device into host memory."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory that the device can copy into by itself."""

    def start(self, tensor: torch.Tensor, destination: torch.Tensor) -> Transfer:
        """Start to copy a tensor's elements in C order, as they are at this point of the current stream."""

    def synchronize(self) -> None:
        """Wait until no copy is under way."""


def host_copy_for(device: torch.device) -> HostCopy | None:
    """The host copy of a CUDA or ROCm device; None of any other, whose tensors are copied in the hook."""
    return _CudaHostCopy(device) if device.type == "cuda" else None


class _CudaHostCopy:
    """A stream of our own on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there

    def allocate(self, size_bytes: int) -> torch.Tensor:
        # the device is named, since torch would take a default device of the user
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self, tensor: torch.Tensor, destination: torch.Tensor) -> Transfer:
        # In the order of the model's stream, that is of the one current on the tensor's device: what is
        # written in place later comes after the clone, so only the clone has to outlive this call.
        private = tensor.clone(memory_format=torch.contiguous_format)
        # Our stream begins when the clone is done. The model's stream waits for nothing of ours.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            destination.copy_(private.reshape(-1).view(torch.uint8), non_blocking=True)
        # blocking: the thread that waits for it sleeps
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types there
        arrived.record(self._stream)
        return _CudaTransfer(arrived, private)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _CudaTransfer:
    """An event behind the copy, and the clone.

    The allocator knows only of the clone's own stream: it would give its memory to the next tensor there
    while our stream still reads it. So the clone is freed only when the event has been seen; that, unlike
    `record_stream`, frees it at a known time.
    """

    def __init__(self, arrived: torch.cuda.Event, private: torch.Tensor) -> None:
        self._arrived = arrived
        self._private = private

    def has_arrived(self) -> bool:
        return bool(self._arrived.query())  # type: ignore[no-untyped-call]  # torch has no types there

    def wait(self) -> None:
        self._arrived.synchronize()
