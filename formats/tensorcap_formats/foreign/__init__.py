"""Files of tensors from other programs, read without the programs: numpy, torch, MAX, raw numbers, dumps.

In: a file or a folder, and all that it claims is checked. Out: a `ForeignArchive` of tensors by name; and
.npz and .max files for others. Read one kind at a time: `numpy_files`, `torch_file` (above `torch_pickle`
and `strided`), `max_file`, `raw_file`, `dump_folder` (above `dump_files` and `dump_labels`), `print_log`,
`intermediates_folder`, `intermediates_writer` and `asset_folder` (of Core AI), `neuron/` (of AWS Neuron),
`json_file` (which tool wrote JSON), `polygraphy_file`, `msprobe_folder` and `sglang_folder`,
`signatures` (of formats that are known and not read). `gguf_file` and `onnx_file` need packages, and are
imported if a file is of theirs.
"""

from tensorcap_formats.foreign.asset_folder import AssetInfo, is_asset, read_asset
from tensorcap_formats.foreign.dump_files import NAMES_FILE
from tensorcap_formats.foreign.dump_folder import DumpArchive, is_dump, open_dump
from tensorcap_formats.foreign.dump_labels import label_of, parse_label
from tensorcap_formats.foreign.intermediates_folder import (
    INTERMEDIATES_SUFFIX,
    is_intermediates_folder,
    open_intermediates,
)
from tensorcap_formats.foreign.intermediates_writer import (
    Kind,
    NodeValue,
    can_hold,
    refuse_intermediates,
    write_intermediates,
)
from tensorcap_formats.foreign.json_file import json_kind
from tensorcap_formats.foreign.max_file import MAX_DTYPE_CODES, MAX_SUFFIX, open_max, write_max
from tensorcap_formats.foreign.msprobe_folder import is_msprobe_folder, open_msprobe
from tensorcap_formats.foreign.neuron import NeuronArchive, neuron_opener
from tensorcap_formats.foreign.numpy_files import open_npy, open_npy_folder, open_npz, write_npz
from tensorcap_formats.foreign.polygraphy_file import is_polygraphy_folder, open_polygraphy, split_runner
from tensorcap_formats.foreign.print_log import corner, is_print_log, open_print_log
from tensorcap_formats.foreign.raw_file import RawSpec, open_raw, raw_file_hint
from tensorcap_formats.foreign.sglang_folder import is_sglang_folder, open_sglang
from tensorcap_formats.foreign.signatures import (
    SIGNATURE_BYTES,
    refuse_known_file,
    refuse_known_folder,
    refuse_known_zip,
    refuse_other_file,
)
from tensorcap_formats.foreign.torch_file import open_torch_file, open_torch_folder
from tensorcap_formats.foreign.zip_members import ZipMembers

__all__ = [
    "INTERMEDIATES_SUFFIX",
    "MAX_DTYPE_CODES",
    "MAX_SUFFIX",
    "NAMES_FILE",
    "SIGNATURE_BYTES",
    "AssetInfo",
    "DumpArchive",
    "Kind",
    "NeuronArchive",
    "NodeValue",
    "RawSpec",
    "ZipMembers",
    "can_hold",
    "corner",
    "is_asset",
    "is_dump",
    "is_intermediates_folder",
    "is_msprobe_folder",
    "is_polygraphy_folder",
    "is_print_log",
    "is_sglang_folder",
    "json_kind",
    "label_of",
    "neuron_opener",
    "open_dump",
    "open_intermediates",
    "open_max",
    "open_msprobe",
    "open_npy",
    "open_npy_folder",
    "open_npz",
    "open_polygraphy",
    "open_print_log",
    "open_raw",
    "open_sglang",
    "open_torch_file",
    "open_torch_folder",
    "parse_label",
    "raw_file_hint",
    "read_asset",
    "refuse_intermediates",
    "refuse_known_file",
    "refuse_known_folder",
    "refuse_known_zip",
    "refuse_other_file",
    "split_runner",
    "write_intermediates",
    "write_max",
    "write_npz",
]
