"""The debugger for model ports: capture a model's tensors, keep them in an archive, compare two runs.

Every verb of the command `tcap` is here under its name. What is used is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorcap.adapters.coreai.model import CoreAIModel
    from tensorcap.adapters.executorch.model import ExecuTorchModel
    from tensorcap.adapters.jax.model import JaxModel
    from tensorcap.adapters.max.model import MaxModel
    from tensorcap.adapters.onnx.model import OnnxModel
    from tensorcap.alignment import Aligned, Alignment, align
    from tensorcap.capture_plan import CapturePlan, plan
    from tensorcap.comparison import (
        Calibrated,
        Comparison,
        Pair,
        SyncPoints,
        calibrate,
        compare,
        compare_records,
        sync_points,
    )
    from tensorcap.comparison.preflight import Preflight
    from tensorcap.diagnosis import Diagnosis
    from tensorcap.localization import Bisection, LiveBisection, Localization, Verification, bisect, localize
    from tensorcap.metrics import Difference
    from tensorcap.port_verification import verify
    from tensorcap.recording import PlainLog, Summary, probe
    from tensorcap.rerun import Replay, inject, replay
    from tensorcap.runs import Graph
    from tensorcap.sensitivities import Sensitivity, sensitivity
    from tensorcap.session import Called, Capture, capture, capture_called, save_intermediates
    from tensorcap.source_analysis import SourceDivergence, divergence
    from tensorcap.verbs import diagnose, preflight, report, view
    from tensorcap.workload import Port, Workload
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.check import ArchiveCheck
    from tensorcap_formats.check import check_archive as check
    from tensorcap_formats.conversion import convert
    from tensorcap_formats.errors import TensorcapError
    from tensorcap_formats.keys import Key
    from tensorcap_formats.merge import Merged, merge
    from tensorcap_formats.open import open_archive
    from tensorcap_formats.progress import Progress
    from tensorcap_formats.records import Record
    from tensorcap_formats.writing.recovery import Recovered, recover

# The names that each module defines
_NAMES = {
    "tensorcap.adapters.coreai.model": ("CoreAIModel",),
    "tensorcap.adapters.executorch.model": ("ExecuTorchModel",),
    "tensorcap.adapters.jax.model": ("JaxModel",),
    "tensorcap.adapters.max.model": ("MaxModel",),
    "tensorcap.adapters.onnx.model": ("OnnxModel",),
    "tensorcap.alignment": ("Aligned", "Alignment", "align"),
    "tensorcap.capture_plan": ("CapturePlan", "plan"),
    "tensorcap.comparison": (
        "Calibrated",
        "Comparison",
        "Pair",
        "SyncPoints",
        "calibrate",
        "compare",
        "compare_records",
        "sync_points",
    ),
    "tensorcap.comparison.preflight": ("Preflight",),
    "tensorcap.diagnosis": ("Diagnosis",),
    "tensorcap.localization": (
        "Bisection",
        "LiveBisection",
        "Localization",
        "Verification",
        "bisect",
        "localize",
    ),
    "tensorcap.metrics": ("Difference",),
    "tensorcap.port_verification": ("verify",),
    "tensorcap.recording": ("PlainLog", "Summary", "probe"),
    "tensorcap.rerun": ("Replay", "inject", "replay"),
    "tensorcap.runs": ("Graph",),
    "tensorcap.sensitivities": ("Sensitivity", "sensitivity"),
    "tensorcap.session": ("Called", "Capture", "capture", "capture_called", "save_intermediates"),
    "tensorcap.source_analysis": ("SourceDivergence", "divergence"),
    "tensorcap.verbs": ("diagnose", "preflight", "report", "view"),
    "tensorcap.workload": ("Port", "Workload"),
    "tensorcap_formats.archive": ("Archive",),
    "tensorcap_formats.check": ("ArchiveCheck",),
    "tensorcap_formats.conversion": ("convert",),
    "tensorcap_formats.errors": ("TensorcapError",),
    "tensorcap_formats.keys": ("Key",),
    "tensorcap_formats.merge": ("Merged", "merge"),
    "tensorcap_formats.open": ("open_archive",),
    "tensorcap_formats.progress": ("Progress",),
    "tensorcap_formats.records": ("Record",),
    "tensorcap_formats.writing.recovery": ("Recovered", "recover"),
}
# Where each name is defined, as MODULE or MODULE:NAME
_PLACES = {
    "check": "tensorcap_formats.check:check_archive",
    **{name: module for module, names in _NAMES.items() for name in names},
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
    "CapturePlan",
    "Comparison",
    "CoreAIModel",
    "Diagnosis",
    "Difference",
    "ExecuTorchModel",
    "Graph",
    "JaxModel",
    "Key",
    "LiveBisection",
    "Localization",
    "MaxModel",
    "Merged",
    "OnnxModel",
    "Pair",
    "PlainLog",
    "Port",
    "Preflight",
    "Progress",
    "Record",
    "Recovered",
    "Replay",
    "Sensitivity",
    "SourceDivergence",
    "Summary",
    "SyncPoints",
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
    "divergence",
    "inject",
    "localize",
    "merge",
    "open_archive",
    "plan",
    "preflight",
    "probe",
    "recover",
    "replay",
    "report",
    "save_intermediates",
    "sensitivity",
    "sync_points",
    "verify",
    "view",
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
