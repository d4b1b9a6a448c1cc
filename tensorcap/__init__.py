"""The debugger for model ports: capture a model's tensors, keep them in an archive, compare two runs."""

from tensorcap.adapters.max.model import MaxModel
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.pipeline import compare, compare_records
from tensorcap.metrics.difference import Difference
from tensorcap.recording.plain_log import PlainLog
from tensorcap.recording.probes import probe
from tensorcap.recording.summary import Summary
from tensorcap.runs.graph import Graph
from tensorcap.session.capture_session import Capture, capture
from tensorcap.session.program import Called, capture_called
from tensorcap.workload.port import Port
from tensorcap.workload.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

__all__ = [
    "Archive",
    "Called",
    "Capture",
    "Comparison",
    "Difference",
    "Graph",
    "Key",
    "MaxModel",
    "Pair",
    "PlainLog",
    "Port",
    "Record",
    "Summary",
    "Workload",
    "capture",
    "capture_called",
    "compare",
    "compare_records",
    "open_archive",
    "probe",
]
