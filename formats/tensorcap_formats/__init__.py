"""Archives of named tensors: writers and readers for HDF5, zarr and safetensors, readers of foreign dumps."""

from tensorcap_formats.archive import Archive
from tensorcap_formats.conversion import convert
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics
from tensorcap_formats.writing import Writer, recover

__all__ = [
    "Archive",
    "Key",
    "Record",
    "Statistics",
    "TensorcapError",
    "Writer",
    "convert",
    "open_archive",
    "recover",
]
