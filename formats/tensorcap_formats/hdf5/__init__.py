"""The HDF5 container, and HDF5 files of others.

In: records and bytes, or a file. Out: a flat file of tensors that any HDF5 library opens, or an `Archive`.
Read `flat_file` (how our file is laid out), `header` (its HDF5 metadata), `reader`, `writer` (of another
archive, compressed too), `foreign`, `chunks` (which are looked at before the library decodes them). h5py is
imported when a file needs it: ours do not.
"""

from tensorcap_formats.hdf5.flat_file import (
    HEAD_SIZE,
    align_offset,
    finish_flat_file,
    is_finished_flat_file,
    write_at,
)
from tensorcap_formats.hdf5.header import datatype_of
from tensorcap_formats.hdf5.reader import is_hdf5, open_hdf5, open_hdf5_part
from tensorcap_formats.hdf5.writer import write_hdf5

__all__ = [
    "HEAD_SIZE",
    "align_offset",
    "datatype_of",
    "finish_flat_file",
    "is_finished_flat_file",
    "is_hdf5",
    "open_hdf5",
    "open_hdf5_part",
    "write_at",
    "write_hdf5",
]
