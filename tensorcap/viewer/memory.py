"""Memory that comparing took and looking does not need, given back to the system."""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_MADV_DONTNEED: Final = 4  # Linux: as in <sys/mman.h> of all its architectures
_COMPILER: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-x.*/libllvmlite\b", re.MULTILINE)
_MAPPINGS: Final = Path("/proc/self/maps")


def release_memory() -> None:
    """Give back what comparing left behind: of 20,000 pairs some 50 MB, held for nothing.

    1. Objects in cycles, and pages of the heap without an object.
    2. Pages of LLVM's code, which compiled comparison kernels are loaded with. They are never written to, so
       that the system reads them from their file again if a diagnosis needs them.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library or system: it keeps what it has
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for first, end in _COMPILER.findall(_MAPPINGS.read_text(encoding="utf-8", errors="replace")):
            library.madvise(int(first, 16), int(end, 16) - int(first, 16), _MADV_DONTNEED)
