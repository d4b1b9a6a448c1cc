"""The zarr container, and zarr stores of others.

In: an archive, or a folder. Out: a zarr v3 store that any zarr library opens, or an `Archive`.
Read `header` (metadata documents and names of our arrays), `writer`, `reader`, `foreign` (through the zarr
library, which is imported when a store of another program is opened), `codecs` (that decode to a known size).
"""

from tensorcap_formats.zarr.reader import open_zarr
from tensorcap_formats.zarr.writer import write_zarr

__all__ = [
    "open_zarr",
    "write_zarr",
]
