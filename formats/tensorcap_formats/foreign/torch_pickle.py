"""The pickle inside a torch file, read without torch and without running anything.

A stack machine interprets the stream; it has the instructions that plain values and tensors need. Classes
and functions are never imported: the machine calls functions of this module in their place, which
`_CALLS` lists by name, and refuses all other names.
"""

from __future__ import annotations

import pickletools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, UnsafeFileError, abbreviate

_HINT: Final = (
    "If you trust the file, save its tensors as safetensors with the program that wrote it: "
    "safetensors.torch.save_file(tensors, PATH)."
)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that tensors are views of.

    Attributes:
        key: Names the member `data/KEY` of the zip file.
        dtype: Name of the logical dtype; None for untyped bytes.
        numel: Elements, or bytes of untyped ones.
    """

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: a view of a storage, whose bounds are not checked yet.

    Attributes:
        storage: The storage.
        dtype: Name of the logical dtype.
        offset: Element of the storage at which it begins.
        shape: Its shape.
        strides: In elements.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class, a function or a dtype, and nothing more."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_dtype(self) -> bool:
        """Whether it is a dtype of torch."""
        return self.module == "torch" and self.name in DTYPES

    @property
    def is_storage(self) -> bool:
        """Whether it is a class of storages."""
        return self.module in ("torch", "torch.storage") and self.name in _STORAGES


class _Unsupported(Exception):  # noqa: N818  # never leaves this module
    """The file is valid, and holds something that is not supported."""


class _Mark:
    """Marks on the stack where the items of a collection begin."""


_STORAGES: Final[dict[str, str | None]] = {
    "UntypedStorage": None,
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def read_pickle(data: bytes, source: str) -> Any:
    """Interpret a pickle.

    Args:
        data: The stream.
        source: For messages.

    Returns:
        Nested dicts, lists and tuples of `TensorView`, `Storage`, `Name`, texts, bytes, numbers, bools, None.

    Raises:
        UnsafeFileError: It asks for a class, a function or an instruction that is not on the lists.
        CorruptArchiveError: It ends too early, or is invalid.
    """
    machine = _Machine(source)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            name = instruction.name
            if name == "STOP":
                return machine.result()
            run = machine.instructions.get(name)
            if run is None:
                raise UnsafeFileError(f"{source}: pickle instruction {name} is not allowed", hint=_HINT)
            run(argument)
    except _Unsupported as error:
        raise NotAnArchiveError(f"{source}: {error}", hint=_HINT) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptArchiveError(f"{source}: pickle makes no sense: {abbreviate(str(error))}") from None
    raise CorruptArchiveError(f"{source}: pickle ends without STOP")


class _Machine:
    """The stack machine; each instruction is a function of its argument."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        push = self._stack.append
        self.instructions: dict[str, Callable[[Any], object]] = {
            "PROTO": self._ignore,
            "FRAME": self._ignore,
            "MARK": lambda _: push(_Mark),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            **dict.fromkeys(_LITERALS, push),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_SET": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE": lambda _: push(tuple(self._pop_marked())),
            "TUPLE1": lambda _: push(tuple(self._pop(1))),
            "TUPLE2": lambda _: push(tuple(self._pop(2))),
            "TUPLE3": lambda _: push(tuple(self._pop(3))),
            "LIST": lambda _: push(self._pop_marked()),
            "DICT": lambda _: push(_pairs(self._pop_marked())),
            "FROZENSET": lambda _: push(self._pop_marked()),
            "APPEND": lambda _: self._extend(self._pop(1)),
            "APPENDS": lambda _: self._extend(self._pop_marked()),
            "ADDITEMS": lambda _: self._extend(self._pop_marked()),
            "SETITEM": lambda _: self._update(self._pop(2)),
            "SETITEMS": lambda _: self._update(self._pop_marked()),
            "POP": lambda _: self._pop(1),
            "POP_MARK": lambda _: self._pop_marked(),
            "DUP": lambda _: push(self._stack[-1]),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda index: push(self._memo[index])),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._memorise),
            "MEMOIZE": lambda _: self._memorise(len(self._memo)),
            "GLOBAL": lambda names: push(self._global(*names.split(" ", 1))),
            "STACK_GLOBAL": lambda _: push(self._global(*self._pop(2))),
            "REDUCE": lambda _: push(self._call(*self._pop(2))),
            "BUILD": lambda _: self._build(*self._pop(2)),
            "BINPERSID": lambda _: push(self._storage(*self._pop(1))),
        }

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def _ignore(self, argument: object) -> None:
        """Skip an instruction that describes the stream itself."""

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count or any(value is _Mark for value in self._stack[-count:]):
            raise ValueError("stack underflow")
        popped = self._stack[-count:]
        del self._stack[-count:]
        return popped

    def _pop_marked(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _Mark:
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        popped = self._stack[at + 1 :]
        del self._stack[at:]
        return popped

    def _memorise(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError("append to what is no list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict):
            raise TypeError("item of what is no dict")
        self._stack[-1].update(_pairs(values))

    def _global(self, module: object, name: object) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a class whose name is no text")
        full_name = Name(module, name)
        if str(full_name) in _CALLS or full_name.is_dtype or full_name.is_storage:
            return full_name
        raise UnsafeFileError(
            f"{self._source}: pickle wants {abbreviate(str(full_name))}, which is not on the list of what "
            "tensors need, and may run code",
            hint=_HINT,
        )

    def _call(self, function: object, arguments: Any) -> Any:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise TypeError(f"call of {reprlib.repr(function)}")
        return _CALLS[str(function)](*arguments)

    def _build(self, value: object, state: object) -> None:
        """Drop the state of an ordered dict, its `_metadata`: versions of modules."""
        if not isinstance(value, dict):
            raise TypeError(f"state of a {type(value).__name__}")
        self._stack.append(value)

    def _storage(self, reference: Any) -> Storage:
        kind, storage, key, _, numel = reference
        is_storage = isinstance(storage, Name) and storage.is_storage and isinstance(key, str)
        if kind != "storage" or not is_storage or type(numel) is not int or numel < 0:
            raise ValueError(f"persistent id {reprlib.repr(reference)} names no storage")
        return Storage(key, _STORAGES[storage.name], numel)


def _pairs(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    for key in values[::2]:
        if not isinstance(key, str | int | float | None):  # a deep tuple would overflow the stack when hashed
            raise TypeError(f"a key that is a {type(key).__name__}")
    return dict(zip(values[::2], values[1::2], strict=True))


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{what} of a tensor is {reprlib.repr(value)}")
    return value


def _view(storage: object, dtype: str | None, offset: object, shape: object, strides: object) -> TensorView:
    sizes, steps = _sizes(shape, "shape"), _sizes(strides, "strides")
    if not isinstance(storage, Storage) or dtype is None or len(sizes) != len(steps):
        raise ValueError("a tensor without a storage, a dtype or a stride for each axis")
    (start,) = _sizes((offset,), "offset")
    return TensorView(storage, dtype, start, sizes, steps)


def _rebuild_tensor(
    storage: Any,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object = None,
    hooks: object = None,
    metadata: object = None,
) -> TensorView:
    _require_plain(metadata)
    return _view(storage, storage.dtype, offset, shape, strides)


def _rebuild_tensor_v3(
    storage: Any,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> TensorView:
    _require_plain(metadata)
    if not isinstance(dtype, Name) or not dtype.is_dtype:
        raise ValueError(f"dtype {reprlib.repr(dtype)} is unknown")
    return _view(storage, dtype.name, offset, shape, strides)


def _require_plain(metadata: object) -> None:
    """Refuse tensors whose bytes are not their values: a conjugation or a sign that is yet to be applied."""
    if metadata:
        raise _Unsupported(
            "a tensor is a view whose conjugation or sign is yet to be applied, expected plain values"
        )


def _rebuild_parameter(tensor: object, *_: object) -> object:
    return tensor


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    return _pairs([part for key, value in items for part in (key, value)])


def _list(items: Any = ()) -> list[Any]:
    return list(items) if isinstance(items, list | tuple) else [items]


def _size(items: object) -> tuple[int, ...]:
    return _sizes(items if isinstance(items, tuple) else None, "size")


def _device(kind: str, number: int = 0) -> str:
    return f"{kind:s}:{number:d}"


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"encoding {reprlib.repr(encoding)} is unknown")
    return text.encode("latin1")


_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": _list,
    "builtins.frozenset": _list,
    "__builtin__.set": _list,
    "__builtin__.frozenset": _list,
    "_codecs.encode": _encode,
}
_LITERALS: Final = (
    "INT",
    "LONG",
    "LONG1",
    "LONG4",
    "BININT",
    "BININT1",
    "BININT2",
    "FLOAT",
    "BINFLOAT",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
)
