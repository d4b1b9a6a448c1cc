"""Ways from a device's memory into the host's, beside what the model does.

None of this looks at the default stream: a tensor is ready on the stream that is current on its device when
a hook sees it, since the model's next op would read it there.
"""

from __future__ import annotations

from typing import Protocol

import torch


class PendingTransfer(Protocol):
    """A copy under way; whoever holds it keeps the memory alive that is copied from."""

    def has_arrived(self) -> bool:
        """Whether all bytes are there; does not wait."""

    def wait(self) -> None:
        """Wait until they are."""


class HostCopy(Protocol):
    """The way from one device into host memory."""

    def memory(self, size: int) -> torch.Tensor:
        """So many bytes of host memory that the device can copy into by itself."""

    def send(self, tensor: torch.Tensor, place: torch.Tensor) -> PendingTransfer:
        """Copy a tensor's elements in C order, as they are at this point of the current stream."""

    def settle(self) -> None:
        """Wait until nothing that was ever sent is under way."""


def host_copy_for(device: torch.device) -> HostCopy | None:
    """The lane of a CUDA or ROCm device; others have none, and copy in the hook."""
    return _CudaHostCopy(device) if device.type == "cuda" else None


class _CudaHostCopy:
    """A stream of our own on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there

    def memory(self, size: int) -> torch.Tensor:
        # The device is named since a default device of the user would be taken
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, tensor: torch.Tensor, place: torch.Tensor) -> PendingTransfer:
        # In the order of the model's stream, that is of the one current on the tensor's device: what is
        # written in place later comes after the clone, so only the clone has to outlive this call.
        private = tensor.clone(memory_format=torch.contiguous_format)
        # Our stream begins when the clone is done. The model's stream waits for nothing of ours.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(private.reshape(-1).view(torch.uint8), non_blocking=True)
        # Whoever waits for it sleeps
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types there
        arrived.record(self._stream)
        return _CudaTransfer(arrived, private)

    def settle(self) -> None:
        self._stream.synchronize()


class _CudaTransfer:
    """An event behind the copy, and the clone.

    The allocator knows of the clone's own stream alone: it would give its memory to the next tensor there
    while our stream still reads it. So the clone is let go of only when the event has been seen; that, unlike
    `record_stream`, frees it at a time that is known.
    """

    def __init__(self, arrived: torch.cuda.Event, private: torch.Tensor) -> None:
        self._arrived = arrived
        self._private = private

    def has_arrived(self) -> bool:
        return bool(self._arrived.query())  # type: ignore[no-untyped-call]  # torch has no types there

    def wait(self) -> None:
        self._arrived.synchronize()
