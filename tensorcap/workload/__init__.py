"""A model and its inputs, and what the metadata of its run say of code and machine.

Read `workload` (the pair itself, and archived inputs), `port` (both sides of a port in a file), `script` (a
program that runs a model), `token_model` (a model by its logits), `metadata` and `sources` (what an archive
keeps of them, without secrets), and `patch` (an attribute replaced until a block ends).
"""

from tensorcap.workload.metadata import (
    HIDDEN,
    describe_process,
    environment,
    jsonable,
    now,
    redact,
    redact_command,
)
from tensorcap.workload.patch import replace_attribute
from tensorcap.workload.port import Port, PortSide, load_port
from tensorcap.workload.script import Script, as_main, compile_script
from tensorcap.workload.sources import NAMED, class_name, file_of, find_functions, find_sources
from tensorcap.workload.token_model import TokenModel
from tensorcap.workload.workload import (
    FRAMEWORKS,
    MODEL_MODULES,
    StoredInput,
    Workload,
    archived_inputs,
    load_file,
)

__all__ = [
    "FRAMEWORKS",
    "HIDDEN",
    "MODEL_MODULES",
    "NAMED",
    "Port",
    "PortSide",
    "Script",
    "StoredInput",
    "TokenModel",
    "Workload",
    "archived_inputs",
    "as_main",
    "class_name",
    "compile_script",
    "describe_process",
    "environment",
    "file_of",
    "find_functions",
    "find_sources",
    "jsonable",
    "load_file",
    "load_port",
    "now",
    "redact",
    "redact_command",
    "replace_attribute",
]
