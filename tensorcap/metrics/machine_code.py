"""The machine code of the comparison kernels: compiled once per machine, then loaded without numba.

Importing numba and its typing registries takes half a second, more than comparing a gigabyte; the code that
it makes does not need it. So the code is emitted as an object file, kept in a cache of the user's, and loaded
by llvmlite alone in some hundredths of a second. It is code that will be run, so it counts only if it and its
folder belong to the user and nobody else may write them; in every other case it is compiled in memory.

How numba names and calls a function is private to numba. Code that is not as expected is refused, and numpy
measures instead (see `measurement`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensorcap.metrics import kernel_state

if TYPE_CHECKING:
    import llvmlite.binding as llvm

Feed = Callable[..., None]
Kernel = kernel_state.Kernel
_ARGUMENTS: Final = 6  # addresses and a count, 64 bits each
_OF_NUMBA: Final = ("NRT_", "numba_")  # symbols that are there only once numba is imported
# Named by code that never runs, since the kernels neither allocate nor raise.
_UNUSED_SYMBOLS: Final = (
    "NRT_Allocate",
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)


def is_available() -> bool:
    """Whether numba is installed, so that kernels can be compiled."""
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


def is_kept(kernel: Kernel = "narrow") -> bool:
    """Whether the compiled code is in the cache, so that it can be loaded at once."""
    return _read(_cache_path(kernel)) is not None


@cache
def load(kernel: Kernel = "narrow") -> Feed:
    """Return the compiled `kernels.feed`, or `feed_wide`, which runs tasks and releases the GIL.

    The arguments are those of the function of `kernels.compile_feed`. Compiling is announced on stderr.
    """
    path = _cache_path(kernel)
    content = _read(path)
    if content is None:
        print("compiling comparison kernels, once per machine…", file=sys.stderr, flush=True)  # noqa: T201 # some seconds of silence need a word
        content = _compiled(kernel)
        _write(path, content)
    return _linked(content)


def _cache_path(kernel: Kernel = "narrow") -> Path:
    """Return where the code for this source, these versions and this processor is kept."""
    import llvmlite
    import llvmlite.binding as llvm

    key = hashlib.blake2b(digest_size=16)
    numba = find_spec("numba")
    for path in (
        Path(kernel_state.__file__).with_name("kernels.py"),
        Path(kernel_state.__file__).with_name("kernel_loops.py"),
        Path(kernel_state.__file__).with_name("kernel_tasks.py"),
        Path(kernel_state.__file__).with_name("wide_kernels.py"),
        Path(kernel_state.__file__),
        Path(__file__),
        Path(numba.origin or "").with_name("_version.py") if numba else None,
    ):
        key.update(path.read_bytes() if path and path.exists() else b"")
    for text in (llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()):
        key.update(text.encode() + b"\0")
    return _cache_folder() / f"kernels-{kernel}-{key.hexdigest()}.o"


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        default = Path("~/Library/Caches")
    elif sys.platform == "win32":
        default = Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")
    else:
        default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # no home
        default = default.expanduser()
    return default / "tensorcap"


def _read(path: Path) -> bytes | None:
    """Read what `_compiled` returned, if it is there and nobody else can have written it."""
    try:
        with path.open("rb") as file:
            if not (_is_ours(os.fstat(file.fileno())) and _is_ours(path.parent.stat())):
                return None
            checksum, _, content = file.read().partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(content) else None


def _write(path: Path, content: bytes) -> None:
    """Keep the code, if there is a folder of the user's for it; without one it is compiled each time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(path.parent.stat()):
            return
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_checksum(content) + b"\n" + content)
        temporary.replace(path)


def _is_ours(status: os.stat_result) -> bool:
    return sys.platform == "win32" or (
        status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


def _compiled(kernel: Kernel) -> bytes:
    """Return the name of the function, a line feed, and the object code that holds it."""
    import llvmlite.binding as llvm

    if kernel == "narrow":
        from tensorcap.metrics.kernels import compile_feed

        name, code = compile_feed()
    else:
        from tensorcap.metrics.wide_kernels import compile_feed_wide

        name, code = compile_feed_wide()
    module = llvm.parse_assembly(code)
    _check(name, module)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )
    return name.encode() + b"\n" + bytes(machine.emit_object(module))


def _check(name: str, module: llvm.ModuleRef) -> None:
    """Refuse code that is not as numba makes it today: linking or calling it would end the process."""
    import llvmlite.binding as llvm

    functions = {function.name: function for function in module.functions}
    if name not in functions or functions[name].is_declaration:
        raise RuntimeError(f"numba's code has no function {name!r}")
    types = [str(argument.type) for argument in functions[name].arguments]
    expected = ["i64"] * _ARGUMENTS
    if types[2:] != expected:
        raise RuntimeError(
            f"numba's function takes {', '.join(types)}, expected two addresses and {', '.join(expected)}"
        )
    for value in (*module.functions, *module.global_variables):
        symbol = value.name
        if not value.is_declaration or symbol.startswith("llvm.") or symbol in _UNUSED_SYMBOLS:
            continue
        if symbol.startswith(_OF_NUMBA) or llvm.address_of_symbol(symbol) is None:
            raise RuntimeError(f"numba's code calls {symbol!r}, which is not known")


def _linked(content: bytes) -> Feed:
    import llvmlite.binding as llvm

    name, _, code = content.partition(b"\n")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine()
    )
    for symbol in _UNUSED_SYMBOLS:
        llvm.add_symbol(symbol, 1)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(name.decode())
    function = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * _ARGUMENTS
    )(address)
    room = (ctypes.c_int64 * 8)()  # for a result and an exception that never come
    result, exception = ctypes.addressof(room), ctypes.addressof(room) + 32

    def feed(*arguments: int) -> None:
        if engine is None or room is None or function(result, exception, *arguments):
            raise RuntimeError("compiled kernels: an exception was raised, expected none")

    return feed
