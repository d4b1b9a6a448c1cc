"""Probes: calls of `tensorcap.probe` that name a value in code which its author can edit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from tensorcap.recording.point import Kind
from tensorcap.recording.recorder import Call, Recorder
from tensorcap_formats.errors import UsageError

_T = TypeVar("_T")


class Receiver(Protocol):
    """A capture that is under way."""

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the capture's model is under way in this thread."""


_Receiver = TypeVar("_Receiver", bound=Receiver)


class ProbeReceiver(Receiver, Protocol):
    """A capture to which probes hand values; an adapter implements it."""

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Record the value of a probe.

        Args:
            name: The probe's name.
            value: The probe's value.
            is_alone: Whether this is the only capture under way.
        """


class ValueReceiver(Receiver, Protocol):
    """A capture to which watched functions hand values; an adapter implements it."""

    @property
    def recorder(self) -> Recorder:
        """The capture's."""

    def begin(self, name: str, kind: Kind, *, is_alone: bool) -> Call | None:
        """Begin a call of a function or of a probe.

        Args:
            name: Its name.
            kind: Which of the two.
            is_alone: Whether this is the only capture under way.

        Returns:
            The call; None if nothing is recorded of it. If it cannot be recorded, that is noted.
        """

    def take(self, call: Call, slot: str, value: object, *, only_tensors: bool = False) -> None:
        """Record a value of a call."""


def probe(name: str, value: _T) -> _T:
    """Give a value a name, by which it is captured.

    A capture that is under way records it at the site `probe:NAME`, wherever in the model this is, so
    that it pairs by its name with the same probe in another implementation. Costs next to nothing while
    nothing is captured. Code that torch.compile compiles may hold probes, which it leaves out; code for
    torch.jit.script may not.

    Args:
        name: The name, the same in all implementations.
        value: A tensor, or any structure of tensors and plain values.

    Returns:
        The value itself.

    Raises:
        UsageError: The name is no text, or empty.

    Example:
        >>> probe("scores", [1.0, 2.0])
        [1.0, 2.0]
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"probe: the name is {name!r}, expected a text that is not empty")
    if _RECEIVERS:
        receivers = tuple(_RECEIVERS)  # as other threads may change it
        for receiver in choose_under_way(receivers):
            receiver.probed(name, value, is_alone=len(receivers) == 1)
    return value


@contextmanager
def collect_probes(receiver: ProbeReceiver) -> Iterator[None]:
    """Hand the values of probes to a capture until the block ends."""
    with _LOCK:
        _RECEIVERS.append(receiver)
    try:
        yield
    finally:
        with _LOCK:
            _RECEIVERS.remove(receiver)


def choose_under_way(receivers: Sequence[_Receiver]) -> Sequence[_Receiver]:
    """Choose the captures with a call of their model under way in this thread, or all if none has one."""
    if len(receivers) < 2:
        return receivers
    return [receiver for receiver in receivers if receiver.is_under_way] or receivers


_LOCK: Final = threading.Lock()
_RECEIVERS: Final[list[ProbeReceiver]] = []
