"""The inputs of a model in a file: numpy arrays by the names of its inputs, given or made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tensorcap.recording import Kinds, Recorder, rebuild, walk
from tensorcap.workload import StoredInput, archived_inputs, redact
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive

_BY_PLACE: Final = "by its place"
NUMBERS: Final = (bool, int, float, complex, list, tuple)  # of Python, which may be inputs as arrays are


@runtime_checkable
class _Array(Protocol):
    """An array of any framework that gives its arrays to numpy."""

    def __array__(self) -> Any: ...


ARRAY_KINDS: Final = Kinds((_Array,))


def archived_arrays(
    model_name: str,
    own: Sequence[str],
    known: Mapping[str, Any],
    archived: Mapping[str, StoredInput],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The inputs of a model of which an archive has some, by name.

    If it has as many and none of that name, they are the same in order: an exporter may call an argument
    `onnx::MatMul_0`.

    Args:
        model_name: The model, for messages.
        own: Its inputs.
        known: Those that are given already.
        archived: Those of the archive, by name.

    Returns:
        All that are given, by name, and where those of the archive are from.

    Raises:
        UsageError: The archive has none of the model's inputs, or one has no value.
    """
    found = f"found the inputs {', '.join(archived)}"
    if len(own) == len(archived) and not set(own) & set(archived):
        names = dict(zip(own, archived, strict=True))
    else:
        names = {name: name for name in own if name in archived}
    if not names:
        raise UsageError(f"{model_name}: {found}, expected {', '.join(own)}")
    arrays = {name: decode(archived[other].bits, archived[other].dtype) for name, other in names.items()}
    given = {**known, **arrays}
    if lacking := [name for name in own if name not in given]:
        raise UsageError(
            f"{model_name}: {found}, expected {lacking[0]!r} too", hint="Give it with --inputs FILE."
        )
    return given, origins_of(names)


def replace_inputs(
    own: Mapping[str, Any], archived: Mapping[str, Any], kinds: Kinds
) -> tuple[dict[str, Any], dict[str, str]]:
    """Put archived values in the place of the inputs of a run, by argument and field.

    If none of the archive's names is one of an array among them and there are as many, they are the same in
    order. Numbers and lists of them, which a run function may take, are found by name.

    Args:
        own: The inputs, which may be nested.
        archived: Arrays of the archive, by name.
        kinds: What is an array.

    Returns:
        The inputs, and the archive's name of each that was replaced, by its own.
    """
    arrays = [leaf.name for leaf in walk(own, kinds) if leaf.is_tensor]
    if len(arrays) == len(archived) and not set(arrays) & set(archived):
        names = dict(zip(arrays, archived, strict=True))
    else:
        numbers = [name for name, value in own.items() if isinstance(value, NUMBERS)]
        names = {name: name for name in (*arrays, *numbers) if name in archived}

    def changed(name: str, array: Any) -> Any:
        return archived[names[name]] if name in names else array

    replaced = dict(rebuild(own, kinds, changed))
    for name in names.keys() - set(arrays):
        number = np.asarray(archived[name]).tolist()
        if not np.array_equal(own[name], archived[name]):
            replaced[name] = tuple(number) if isinstance(own[name], tuple) else number
    return replaced, names


def origins_of(names: Mapping[str, str]) -> dict[str, str]:
    """Where inputs are from, in words, of the archive's names of them."""
    return {
        name: "of the archive" if name == other else f"{other} of the archive, {_BY_PLACE}"
        for name, other in names.items()
    }


def note_places(origins: Mapping[str, str], recorder: Recorder) -> None:
    """Note which inputs were given by their places, since no name says that they are the same.

    Args:
        origins: Where each input is from, as `archived_arrays` says it.
        recorder: Of the run.
    """
    given = [f"{own} is {origin}" for own, origin in origins.items() if origin.endswith(_BY_PLACE)]
    notes = recorder.facts.setdefault("notes", [])
    note = f"inputs: {'; '.join(given)}, since none of the model's names is one of its inputs"
    if given and note not in notes:
        notes.append(note)


def as_array(value: Any) -> Array:
    """An array of numpy, or of a framework that gives its arrays to numpy (a torch tensor on the CPU)."""
    value = value.detach().cpu() if hasattr(value, "detach") else value
    is_bfloat16 = str(getattr(value, "dtype", "")) == "torch.bfloat16"  # of which numpy has no type
    return np.asarray(value.float() if is_bfloat16 else value)


def named_arrays(
    model_name: str,
    kinds: Mapping[str, InputKind],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    shape_hint: str | None = None,
) -> dict[str, Array]:
    """The arrays of a run by name, floating ones in the precision of the model.

    Args:
        model_name: The model, for messages.
        kinds: What each input has to be.
        args: Inputs in the order of `kinds`.
        kwargs: Inputs by name.
        shape_hint: What to do about another shape or kind.

    Raises:
        UsageError: They are not those that the model takes, or of another shape or kind.
    """
    names = list(kinds)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if sorted(values) != sorted(names) or len(args) + len(kwargs) != len(names):
        count = f"{len(args)} by position and {', '.join(kwargs) or 'none'} by name"
        raise UsageError(f"{model_name}: inputs: found {count}, expected {', '.join(names)}")
    inputs = {}
    for name, kind in kinds.items():
        array = as_array(values[name])
        if not kind.fits(array):
            raise UsageError(
                f"{model_name}: input {name}: found {array.dtype.name}{list(array.shape)}, expected {kind}",
                hint=shape_hint,
            )
        inputs[name] = np.ascontiguousarray(array.astype(kind.dtype, copy=False))
    return inputs


_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class InputKind(NamedTuple):
    """What an input of a model has to be.

    Attributes:
        shape: Its shape; None for an axis of any length, or in its place for any shape.
        dtype: Its dtype, as numpy names it.
    """

    shape: tuple[int | None, ...] | None
    dtype: str

    @classmethod
    def like(cls, array: Array) -> InputKind:
        """The shape and dtype of an array."""
        return cls(tuple(array.shape), array.dtype.name)

    def fits(self, array: Array) -> bool:
        """Whether an array is of this shape and kind; floats, and integers that have room, are converted."""
        fits_shape = self.shape is None or (
            len(self.shape) == array.ndim
            and all(size in (None, own) for size, own in zip(self.shape, array.shape, strict=True))
        )
        return fits_shape and (array.dtype.name == self.dtype or self._has_room(array))

    def _has_room(self, array: Array) -> bool:
        """Whether numbers of another dtype can be converted, as int64 of torch to int32."""
        kind = array.dtype.kind
        if self.dtype in _FLOATS:
            return kind == "f"
        own = np.dtype(self.dtype) if self.dtype in _INTEGERS else None
        if own is None or kind not in "iu":
            return False
        limits = np.iinfo(own)
        return not array.size or bool(limits.min <= array.min() and array.max() <= limits.max)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of any shape"
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


def make_arrays(
    name: str, kinds: Mapping[str, InputKind], texts: Sequence[str], seed: int
) -> tuple[dict[str, Array], dict[str, str]]:
    """Make the inputs of a model as a user asks for them.

    Args:
        name: The model, for messages.
        kinds: What each input has to be, by its name.
        texts: `zeros`, `ones`, `random` (floats of a normal distribution, integers 0 and 1, of which any
            table of embeddings has a row), or a file of tensors named as the inputs; with `NAME=` before it
            for one input, and else for all that no other text is of.
        seed: Of random values.

    Returns:
        The arrays by name, and how each was made.

    Raises:
        UsageError: A text is of no input, an input has none, or has an axis of any length and is in no file;
            a file lacks an input, or has another.
    """
    sources = _sources(name, kinds, texts)
    generator = np.random.default_rng(seed)
    files = {text: _read(text, list(kinds)) for text in dict.fromkeys(sources.values()) if text not in _MADE}
    arrays: dict[str, Array] = {}
    for own, kind in kinds.items():
        text = sources[own]
        if text in files:
            arrays[own] = _of_file(text, files[text], own, list(sources.values()).count(text))
        else:
            arrays[own] = _made(name, own, kind, text, generator)
    for text, stored in files.items():
        unknown = stored.keys() - kinds.keys()
        if unknown and not (len(stored) == 1 and list(sources.values()).count(text) == 1):
            raise UsageError(f"{text}: found {min(unknown)!r}, expected the inputs {', '.join(kinds)}")
    how = {own: f"random, seed {seed}" if text == _RANDOM else redact(text) for own, text in sources.items()}
    return arrays, how


_TEST_DATA: Final = "onnx-test-data"
_RANDOM: Final = "random"
_MADE: Final = ("zeros", "ones", _RANDOM)


def _sources(name: str, kinds: Mapping[str, InputKind], texts: Sequence[str]) -> dict[str, str]:
    """Where each input comes from."""
    default, single = None, {}
    for text in texts:
        own, equals, value = text.partition("=")
        if equals and own in kinds:
            single[own] = value
        elif equals and own.isidentifier():
            raise UsageError(
                f"{name}: --inputs {text}: no input {own!r}, expected one of: {', '.join(kinds)}"
            )
        elif default is not None:
            raise UsageError(f"{name}: --inputs {text}: found {default!r} for all inputs too, expected one")
        else:
            default = text
    sources = {own: single.get(own, default) for own in kinds}
    lacking = [own for own, text in sources.items() if text is None]
    if lacking:
        raise UsageError(
            f"{name}: no inputs for {', '.join(lacking)}, expected --inputs FILE, zeros, ones or random",
        )
    return {own: text for own, text in sources.items() if text is not None}


def _read(text: str, names: Sequence[str]) -> dict[str, Array]:
    """The tensors of a file; those of a test data set of ONNX, which need no names, by their places then.

    Raises:
        UsageError: There is no such file, and it looks like a word.
    """
    if text.isidentifier() and not Path(text).exists():
        raise UsageError(f"--inputs {text}: found no such file, expected FILE, zeros, ones or random")
    with open_archive(text) as file:
        arrays = {name: decode(value.bits, value.dtype) for name, value in archived_inputs(file).items()}
        if file.container == _TEST_DATA and len(arrays) == len(names) and not arrays.keys() & set(names):
            return dict(zip(names, arrays.values(), strict=True))
    return arrays


def _of_file(file: str, stored: Mapping[str, Array], name: str, inputs: int) -> Array:
    """An input in a file; a file of one tensor, for one input, may have another name for it."""
    if name not in stored and len(stored) == inputs == 1:
        return next(iter(stored.values()))
    if name not in stored:
        raise UsageError(f"{file}: no input {name!r}, found {', '.join(stored)}")
    return stored[name]


def _made(model_name: str, name: str, kind: InputKind, how: str, generator: np.random.Generator) -> Array:
    shape = tuple(size for size in kind.shape or (None,) if size is not None)
    if kind.shape is None or len(shape) < len(kind.shape):
        raise UsageError(
            f"{model_name}: input {name}: {how} of {kind}, which has an axis of any length, expected a file"
        )
    if how != _RANDOM:
        return np.full(shape, how == "ones", kind.dtype)
    if kind.dtype in _FLOATS:
        return generator.standard_normal(shape).astype(kind.dtype)
    return generator.integers(0, 2, shape).astype(kind.dtype)
