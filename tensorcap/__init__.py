"""The debugger for model ports: capture a model's tensors, keep them in an archive, compare two runs.

Every verb of the command `tcap` is here under its name. What is used is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorcap.adapters.max.model import MaxModel
    from tensorcap.alignment import Aligned, Alignment, align
    from tensorcap.comparison import Calibrated, Comparison, Pair, calibrate, compare, compare_records
    from tensorcap.comparison.preflight import Preflight
    from tensorcap.diagnosis import Diagnosis
    from tensorcap.localization import Bisection, LiveBisection, Localization, Verification, bisect, localize
    from tensorcap.metrics import Difference
    from tensorcap.port_verification import verify
    from tensorcap.recording import PlainLog, Summary, probe
    from tensorcap.rerun import Replay, inject, replay
    from tensorcap.runs import Graph
    from tensorcap.session import Called, Capture, capture, capture_called
    from tensorcap.verbs import diagnose, preflight
    from tensorcap.workload import Port, Workload
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.check import ArchiveCheck
    from tensorcap_formats.check import check_archive as check
    from tensorcap_formats.conversion import convert
    from tensorcap_formats.errors import TensorcapError
    from tensorcap_formats.keys import Key
    from tensorcap_formats.open import open_archive
    from tensorcap_formats.progress import Progress
    from tensorcap_formats.records import Record
    from tensorcap_formats.writing.recovery import Recovered, recover

# Where each name is defined, as MODULE or MODULE:NAME
_PLACES = {
    "Aligned": "tensorcap.alignment",
    "Alignment": "tensorcap.alignment",
    "Archive": "tensorcap_formats.archive",
    "ArchiveCheck": "tensorcap_formats.check",
    "Bisection": "tensorcap.localization",
    "Calibrated": "tensorcap.comparison",
    "Called": "tensorcap.session",
    "Capture": "tensorcap.session",
    "Comparison": "tensorcap.comparison",
    "Diagnosis": "tensorcap.diagnosis",
    "Difference": "tensorcap.metrics",
    "Graph": "tensorcap.runs",
    "Key": "tensorcap_formats.keys",
    "LiveBisection": "tensorcap.localization",
    "Localization": "tensorcap.localization",
    "MaxModel": "tensorcap.adapters.max.model",
    "Pair": "tensorcap.comparison",
    "PlainLog": "tensorcap.recording",
    "Port": "tensorcap.workload",
    "Preflight": "tensorcap.comparison.preflight",
    "Progress": "tensorcap_formats.progress",
    "Record": "tensorcap_formats.records",
    "Recovered": "tensorcap_formats.writing.recovery",
    "Replay": "tensorcap.rerun",
    "Summary": "tensorcap.recording",
    "TensorcapError": "tensorcap_formats.errors",
    "Verification": "tensorcap.localization",
    "Workload": "tensorcap.workload",
    "align": "tensorcap.alignment",
    "bisect": "tensorcap.localization",
    "calibrate": "tensorcap.comparison",
    "capture": "tensorcap.session",
    "capture_called": "tensorcap.session",
    "check": "tensorcap_formats.check:check_archive",
    "compare": "tensorcap.comparison",
    "compare_records": "tensorcap.comparison",
    "convert": "tensorcap_formats.conversion",
    "diagnose": "tensorcap.verbs",
    "inject": "tensorcap.rerun",
    "localize": "tensorcap.localization",
    "open_archive": "tensorcap_formats.open",
    "preflight": "tensorcap.verbs",
    "probe": "tensorcap.recording",
    "recover": "tensorcap_formats.writing.recovery",
    "replay": "tensorcap.rerun",
    "verify": "tensorcap.port_verification",
}
__all__ = [
    "Aligned",
    "Alignment",
    "Archive",
    "ArchiveCheck",
    "Bisection",
    "Calibrated",
    "Called",
    "Capture",
    "Comparison",
    "Diagnosis",
    "Difference",
    "Graph",
    "Key",
    "LiveBisection",
    "Localization",
    "MaxModel",
    "Pair",
    "PlainLog",
    "Port",
    "Preflight",
    "Progress",
    "Record",
    "Recovered",
    "Replay",
    "Summary",
    "TensorcapError",
    "Verification",
    "Workload",
    "align",
    "bisect",
    "calibrate",
    "capture",
    "capture_called",
    "check",
    "compare",
    "compare_records",
    "convert",
    "diagnose",
    "inject",
    "localize",
    "open_archive",
    "preflight",
    "probe",
    "recover",
    "replay",
    "verify",
]


def __getattr__(name: str) -> object:
    """Load a name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, defined = _PLACES[name].partition(":")
    value = getattr(_import_module(module), defined or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
