"""A site of a model under capture: how often it was called, recorded or lost, and its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["module", "op", "function", "probe"]
Absence = Literal["fused", "held"]  # of a value that a program does not have by its nature
Phase = Literal["prefill", "decode", "forward"]


@dataclass(slots=True)
class Point:
    """A site of the model under capture, with the counts that its status follows from.

    Attributes:
        site: Escaped name.
        aliases: Further names of the same module.
        reason: Why it cannot be captured, or why it is never called; empty for none known beforehand.
        is_capturable: Whether it may be tapped.
        wanted: True, False, or None if it depends on the slot.
        calls: How often it was called.
        returned: How many of these calls returned.
        left_out: How many calls the limits of steps, calls and bytes left out.
        recomputed: How many further calls a backward pass made to compute values anew; not recorded.
        records: How many of its tensors were recorded.
        values: How many of its leaves that are no tensors were.
        lost: What could not be captured: by slot, the reason and how often.
        absent: Those of the lost slots that a program has no value of by its nature, and whether it fused the
            operation or holds the tensor, and goes on writing to it.
        note: A remark for the reader of the archive.
        kind: A module, or a place within a module's code.
    """

    site: str
    aliases: tuple[str, ...] = ()
    reason: str = ""
    is_capturable: bool = True
    wanted: bool | None = True
    calls: int = 0
    returned: int = 0
    left_out: int = 0
    recomputed: int = 0
    records: int = 0
    values: int = 0
    lost: dict[str, tuple[str, int]] = field(default_factory=dict)
    absent: dict[str, Absence] = field(default_factory=dict)
    note: str = ""
    kind: Kind = "module"

    @property
    def status(self) -> str:
        """`captured`, `never-called`, `excluded` or `not-capturable`."""
        if self.wanted is False:
            return "excluded"
        if not self.is_capturable:
            return "not-capturable"
        if not self.calls:
            return "not-capturable" if self.lost else "excluded" if self.left_out else "never-called"
        if self.records or self.values:
            return "captured"
        if self.lost or self.returned < self.calls:
            return "not-capturable"
        return "excluded" if self.wanted is None else "captured"

    def absence(self, slot: str) -> Absence | None:
        """Why a lost slot, or all that the point lost, is absent by nature; None if it is simply lost."""
        if slot:
            return self.absent.get(slot)
        is_whole = bool(self.lost) and self.absent.keys() >= self.lost.keys()
        return next(iter(self.absent.values())) if is_whole else None

    @property
    def is_listed(self) -> bool:
        """Whether the run's metadata list it; an op, which is in the index anyway, only if it was lost."""
        return self.kind != "op" or bool(self.lost)

    @property
    def unfinished(self) -> int:
        """How many calls were not seen to return: they ended by an error, or their hook was gone."""
        return self.calls - self.returned

    def describe(self) -> list[dict[str, Any]]:
        """The entries of this point in the run's metadata: its own, and one for each reason of a loss."""
        status = self.status
        entry: dict[str, Any] = {"site": self.site, "status": status, "calls": self.calls}
        if self.kind != "module":
            entry["kind"] = self.kind
        if self.unfinished:
            entry["unfinished"] = self.unfinished
        reasons = [self.reason]
        if status == "not-capturable" and not self.reason:
            causes = {reason for reason, _ in self.lost.values()}
            reasons = sorted(causes) or ["none of its calls returned"]
        if self.recomputed:
            reasons.append(f"not recorded: calls of a backward pass to compute anew, {self.recomputed}")
        if self.left_out:
            reasons.append(f"not recorded: calls that the limits left out, {self.left_out}")
        reason_text = "; ".join(reason for reason in (*reasons, self.note) if reason)
        if reason_text:
            entry["reason"] = reason_text
        entries = [entry]
        if status != "not-capturable":
            by_reason: dict[str, list[str]] = {}
            for slot, (reason, _) in self.lost.items():
                by_reason.setdefault(reason, []).append(slot)
            for reason, slots in by_reason.items():
                count = max(self.lost[slot][1] for slot in slots)
                entries.append(
                    {
                        "site": self.site,
                        "slots": slots,
                        "status": "not-capturable",
                        "calls": count,
                        "reason": reason,
                    }
                )
        return entries
