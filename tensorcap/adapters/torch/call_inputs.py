"""What a call was given, to be given again any number of times, whatever a call writes into it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensorcap.adapters.torch.tensor_leaves import KINDS
from tensorcap.adapters.torch.tensors import equal_values
from tensorcap.recording import walk

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name


class CallInputs:
    """Copies of the inputs of a call.

    Objects are copied for each call, and so are tensors that are not plain. Calls share the memory of plain
    ones, since copies of a cache may take longer than the module; it is put back after a call that wrote to
    it. Versions of tensors tell that. To which memory a call writes without a version, as through `.data`,
    numpy or a kernel, is seen once, after the first call.
    """

    def __init__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Copy the inputs."""
        copied: dict[int, Any] = {}
        self._kept: Inputs = copy.deepcopy((args, kwargs or {}), copied)
        self._shared = {id(value): value for value in copied.values() if _is_plain(value)}
        by_memory: dict[int, list[torch.Tensor]] = {}
        for tensor in self._shared.values():
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._memory = [_Memory(tensors) for tensors in by_memory.values()]
        self._calls = 0
        self._is_checked = False

    @property
    def kept(self) -> Inputs:
        """The inputs as they were, not to be written to."""
        is_first = self._calls > 0 and not self._is_checked
        for memory in self._memory:
            memory.put_back(is_first=is_first)
        self._is_checked |= is_first
        return self._kept

    def give(self) -> Inputs:
        """Give the inputs to a call."""
        kept = self.kept
        self._calls += 1
        with torch.no_grad():  # what a call does to a tensor's shape is its own
            views = {place: torch.ops.aten.alias.default(one) for place, one in self._shared.items()}
        return copy.deepcopy(kept, views)


@contextmanager
def put_back(inputs: Any) -> Iterator[None]:
    """Put back what a run writes to tensors among its inputs, so that the next is given the same."""
    leaves = walk(inputs, KINDS)
    tensors = {id(leaf.value): leaf.value for leaf in leaves if _is_plain(leaf.value)}.values()
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own in zip(tensors, before, strict=True):
                if tensor.shape != own.shape:
                    tensor.data = own
                elif not equal_values(tensor, own):
                    tensor.copy_(own)


class _Memory:
    """Memory that tensors share, as it was.

    Args:
        tensors: At least one.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        self._bytes.set_(tensors[0].untyped_storage())
        self._before = self._bytes.clone()
        self._versions = self._read_versions()
        self._is_written_unseen = False

    def put_back(self, *, is_first: bool) -> None:
        """Put back what a call may have changed.

        Args:
            is_first: Whether that was the first call, after which bytes are compared.
        """
        versions = self._read_versions()
        if is_first and versions == self._versions:
            self._is_written_unseen = not torch.equal(self._bytes, self._before)
        if versions != self._versions or self._is_written_unseen:
            self._bytes.copy_(self._before)
        self._versions = versions

    def _read_versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _is_plain(value: object) -> bool:
    """Whether something is a tensor of plain memory, and has a version."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and not (value.is_inference() or value.is_quantized or value.is_meta or value.requires_grad)
    )
