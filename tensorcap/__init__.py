"""The debugger for model ports: capture a model's tensors, keep them in an archive, compare two runs."""

from tensorcap.adapters._max.model import MaxModel
from tensorcap.called import Called, capture_called
from tensorcap.capturing import Capture, capture
from tensorcap.comparing import compare, compare_records
from tensorcap.comparison import Comparison
from tensorcap.graph import Graph
from tensorcap.metrics.difference import Difference
from tensorcap.port import Port
from tensorcap.recording.plain_log import PlainLog
from tensorcap.recording.probing import probe
from tensorcap.recording.summary import Summary
from tensorcap.verdicts.pair import Pair
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.opening import open_archive
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
