"""Between the hooks of an adapter and the archive: what is recorded of a run, and what was not and why.

Calls and tensors of a running model go in, records and run metadata come out. Read `options` (what the user
asks for) and `record_filter` (which records these keep), `point` (a site and its status), `recorder` (steps,
calls, records), `placement` (what the tensors of one rank are parts of) and `summary` (the outcome).
`structure` lists the tensors of an argument, `plain_log` prints them; `probes`, `watch`, `source_rewrite` and
`function_lookup` record values within code, and `substitution` replaces them by archived ones.
"""

from tensorcap.recording.model_description import attribute_settings, is_setting, summarize_weight
from tensorcap.recording.options import CaptureOptions, Level, parse_size, parse_steps
from tensorcap.recording.placement import Placement
from tensorcap.recording.plain_log import Logged, PlainLog
from tensorcap.recording.point import Absence, Phase, Point
from tensorcap.recording.probes import collect_probes, probe
from tensorcap.recording.record_filter import NothingLeftError, RecordFilter
from tensorcap.recording.recorder import Call, Recorder
from tensorcap.recording.structure import Kinds, Leaf, argument_slots, leaf_slot, rebuild, walk
from tensorcap.recording.substitution import HELD, Kind, Slot, Substitution, no_fit
from tensorcap.recording.summary import Summary, Tally, summarise
from tensorcap.recording.watch import find_watched, watch_functions

__all__ = [
    "HELD",
    "Absence",
    "Call",
    "CaptureOptions",
    "Kind",
    "Kinds",
    "Leaf",
    "Level",
    "Logged",
    "NothingLeftError",
    "Phase",
    "Placement",
    "PlainLog",
    "Point",
    "RecordFilter",
    "Recorder",
    "Slot",
    "Substitution",
    "Summary",
    "Tally",
    "argument_slots",
    "attribute_settings",
    "collect_probes",
    "find_watched",
    "is_setting",
    "leaf_slot",
    "no_fit",
    "parse_size",
    "parse_steps",
    "probe",
    "rebuild",
    "summarise",
    "summarize_weight",
    "walk",
    "watch_functions",
]
