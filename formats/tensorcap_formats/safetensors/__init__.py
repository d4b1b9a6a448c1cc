"""The safetensors container, and checkpoints in safetensors files.

In: an archive, or a file, or a folder of files. Out: a safetensors file, or an `Archive`.
Read `header` (parsed strictly, without the library), `writer`, `reader`, `foreign`; `debug_tree` is of files
that transformers' debugger writes.
"""

from tensorcap_formats.safetensors.debug_tree import TREE_SUFFIX, open_debug_tree
from tensorcap_formats.safetensors.foreign import open_safetensors_folder
from tensorcap_formats.safetensors.reader import open_safetensors
from tensorcap_formats.safetensors.writer import write_safetensors

__all__ = [
    "TREE_SUFFIX",
    "open_debug_tree",
    "open_safetensors",
    "open_safetensors_folder",
    "write_safetensors",
]
