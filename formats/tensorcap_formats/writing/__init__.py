"""Write an archive tensor by tensor: each is safe at once, and the archive appears when it is whole.

In: records with their bytes, from a run or from what a killed writer left. Out: an archive at its path, in
any of the three containers. Read `writer`, then `journal` (what a kill leaves), `recovery`, `growing`,
`publishing`.
"""

from tensorcap_formats.writing.growing import is_growing, open_growing
from tensorcap_formats.writing.publishing import (
    CONTAINER_SUFFIXES,
    container_of,
    refuse_to_replace_archive,
    refuse_to_replace_others,
    write_container,
)
from tensorcap_formats.writing.recovery import Recovered, recover
from tensorcap_formats.writing.writer import Writer

__all__ = [
    "CONTAINER_SUFFIXES",
    "Recovered",
    "Writer",
    "container_of",
    "is_growing",
    "open_growing",
    "recover",
    "refuse_to_replace_archive",
    "refuse_to_replace_others",
    "write_container",
]
