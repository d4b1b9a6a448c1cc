"""Frozen dataclasses that are made by the hundred thousand: records, keys, pairs, findings.

A frozen dataclass sets each field by `object.__setattr__`, which takes six to ten times as long as to assign
it. A light one is frozen for type checkers alone, to which `light_dataclass` is `dataclass`; nothing hinders
an assignment when the program runs. It compares and hashes as a frozen one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as light_dataclass
else:
    from dataclasses import dataclass

    def light_dataclass(*, frozen: bool, slots: bool):
        """Make a class a dataclass with slots that counts as frozen.

        Args:
            frozen: True, for type checkers.
            slots: True.
        """
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["light_dataclass"]
