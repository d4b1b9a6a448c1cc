"""Valid inputs of everything that reads: most by the libraries whose files they are, few bytes each."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import bits_of, dtype
from tensorcap_formats.foreign import write_max
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer
from tests.hostile.containers import CONTAINERS
from tests.hostile.fuzzing import mutations
from tests.hostile.fuzzing.mutations import Mutation

REFERENCE: Final = "good.h5"  # beside every input, for commands that take two
_RUN: Final = {
    "framework": {"name": "torch", "version": "2.13.0"},
    "modules": {"m": {"class": "torch.nn.Linear", "settings": {"in_features": 2}}},
    "config": {"hidden_size": 2, "rope": {"theta": 1e4}},
    "seed": 1,
    "inputs": {"x": {"dtype": "float32", "shape": [2, 3]}},
}
_ARRAYS: Final = {
    "0/m/input.x": np.arange(6, dtype="<f4").reshape(2, 3),
    "0/m/output": np.linspace(-1, 1, 12, dtype="<f4").reshape(2, 6),
    "0/norm/output": np.ones((2, 6), "<f2"),
    "0//output": np.arange(4, dtype="<i8"),
    "param/m/weight": np.eye(3, dtype="<f4"),
}


@dataclass(frozen=True)
class Seed:
    """A valid input.

    Attributes:
        name: Of the file or folder.
        write: Writes it at a path.
        mutations: What makes hostile ones of it.
        commands: Commands that read it, as arguments in which `{}` is its path; by default those of archives.
    """

    name: str
    write: Callable[[Path], object]
    mutations: Sequence[Mutation]
    commands: Sequence[str] = (
        "ls {}",
        "show {}",
        "show {} --json",
        "tree {}",
        "check {}",
        "compare good.h5 {}",
        "compare {} good.h5 --json",
        "preflight good.h5 {}",
        "align good.h5 {}",
        "localize good.h5 {}",
        "convert {} out.h5",
        "report good.h5 {} -o out.html",
    )
    is_archive: bool = True


def write_archive(path: Path, *, scale: int = 1) -> None:
    """An archive of ours with values of several dtypes, a value that is no tensor, and a shared record."""
    writer = Writer(path, run=_RUN)
    for name, array in _ARRAYS.items():
        writer.add(
            Key.parse(name), bits_of(array * array.dtype.type(scale)), dtype(array.dtype.name), array.shape
        )
    writer.add(Key.parse("0/copy/output"), bits_of(np.arange(4, dtype="<i8")), dtype("int64"), (4,))
    writer.add_value("0/m/input.mask", None)
    writer.add_value("0/m/input.scale", 0.5)
    writer.close()


def write_unfinished(path: Path) -> None:
    """What a killed writer leaves."""
    writer = Writer(path, run=_RUN)
    for name, array in _ARRAYS.items():
        writer.add(Key.parse(name), bits_of(array), dtype(array.dtype.name), array.shape)
    writer.add_value("0/m/input.mask", None)
    writer.abandon()


def _write_npz(path: Path) -> None:
    arrays: dict[str, Any] = {"block.relu": np.ones((3, 4), "f4"), "n": np.arange(3)}
    np.savez_compressed(path, **arrays)


def _write_npy(path: Path) -> None:
    np.save(path, np.arange(12, dtype="f4").reshape(3, 4))


def _write_npy_folder(path: Path) -> None:
    path.mkdir()
    for name in ("a", "b.c"):
        np.save(path / f"{name}.npy", np.ones((2, 3), "f8"))


def _write_hdf5(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["plain"] = np.arange(6, dtype="f4")
        file.create_dataset(
            "group/packed", data=np.ones((8, 8)), chunks=(4, 4), compression="gzip", shuffle=True
        )
        file.create_dataset(
            "group/lzf", data=np.ones((8, 8)), chunks=(4, 8), compression="lzf", fletcher32=True
        )
        file.create_dataset("group/bits", data=np.arange(64), chunks=(32,), scaleoffset=0)
        file["group/text"] = "text"
        file["group"].attrs["name"] = "a name"


def _write_keras(path: Path) -> None:
    import io
    import zipfile

    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["layers/dense/vars/0"] = np.ones((3, 4), "f4")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.10.0"}')
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", content.getvalue())


def _write_safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones((2, 3), "f4"), "b": np.zeros(3, "f2")}, path, metadata={"format": "np"})


def _write_shards(path: Path) -> None:
    path.mkdir()
    names = {}
    for number, name in enumerate(("w", "b")):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        from safetensors.numpy import save_file

        save_file({name: np.ones(3, "f4")}, path / file)
        names[name] = file
    index = {"metadata": {"total_size": 24}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"model_type": "llama"}')


def _write_torch(path: Path) -> None:
    import torch

    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"state": {"w": weight, "view": weight.t()[1:]}, "bf": torch.ones(2).bfloat16(), "n": 3}, path)


def _write_zarr(path: Path, version: int) -> None:
    import numcodecs
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(str(path), mode="w", zarr_format=version)  # type: ignore[arg-type]
        group.create_array("a", data=np.arange(24, dtype="f4").reshape(4, 6), chunks=(2, 3))
        group.create_array("g/b", data=np.ones(3, "i8"))
        options: dict[str, Any] = {"compressors": zarr.codecs.GzipCodec(), "shards": (4, 6)}
        if version == 2:
            options = {"compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("i4", astype="i2")]}
        group.create_array("g/c", data=np.arange(24, dtype="i4").reshape(4, 6), chunks=(2, 3), **options)


def _write_max(path: Path) -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    write_max(path, "m.output", dtype("float32"), values.shape, [values])


def _write_gguf(path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), "f4"))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 64), "f2"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_onnx(path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    weights = [numpy_helper.from_array(np.ones((3, 4), "f4"), name) for name in ("w", "block.0.weight")]
    nodes = [helper.make_node("Add", ["w", "block.0.weight"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "net", [], [], initializer=weights)), path)


def _write_intermediates(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    entries = {}
    for number, name in enumerate(("mul", "add")):
        file = f"data/{name}_{number:04}.npy"
        np.save(path / file, np.arange(2, dtype="f4"))
        entries[name] = {
            "node_name": name,
            "node_op": "call_function",
            "node_target": f"aten.{name}.Tensor",
            "data_file": file,
            "shape": [2],
            "torch_dtype": "torch.float32",
            "numel": 2,
        }
    (path / "metadata.json").write_text(json.dumps({"inputs": {}, "outputs": {}, "intermediates": entries}))


def _write_dump(path: Path) -> None:
    import torch

    path.mkdir()
    for name in ("layers.0.mlp", "layers.1.mlp"):
        torch.save(torch.ones(2, 3), path / f"{name}.pt")


def _write_map(path: Path) -> None:
    path.write_text(
        '# a map\n[[pair]]\nreference = "m"\ntarget = "m"\nsteps = ["transpose 1 0", "transpose 1 0"]\n'
        'evidence = "name"\nreason = "equal names"\n\n[[pair]]\nreference = "norm"\ntarget = "norm"\n\n'
        '[[left_over]]\nside = "target"\nsites = ["x"]\nreason = "nothing"\n'
    )


def _write_thresholds(path: Path) -> None:
    path.write_text(
        '[[threshold]]\nmatch = "*"\nrtol = 1e-3\natol = 1e-6\n\n'
        '[[threshold]]\nmatch = "*norm*"\nmetric = "relative_frobenius"\nlimit = 0.5\n'
    )


def _write_rules(path: Path) -> None:
    path.write_text(
        'name = "mine"\n[[rename]]\nfrom = "m"\nto = "n"\n\n[[rename]]\nfrom = "norm"\nto = "o"\n'
    )


def _write_result(path: Path) -> None:
    command(path.parent, f"compare {REFERENCE} {REFERENCE} --save {path.name}")


def _write_calibration(path: Path) -> None:
    path.write_text(
        'format = "tensorcap-calibration"\nversion = 1\nprecision = "float32"\nquantile = 1\nmargin = 1\n'
        'runs = 2\n[[limit]]\nmodule = "m"\nslot = "output"\ncount = 20\nmetric = "max_abs"\nlimit = 0.5\n'
    )


def _written_by(name: str) -> Callable[[Path], object]:
    """What writes one of the containers, whose name a seed has."""
    return lambda path: CONTAINERS[name].write(path.parent)


def available() -> list[str]:
    """The names of the seeds whose libraries are installed."""
    return [name for name in SEEDS if find_spec(_LIBRARIES.get(name, "numpy"))]


def command(folder: Path, line: str) -> Any:
    """Run a command in this process, in a folder; the result of click's runner."""
    from click.testing import CliRunner

    from tensorcap_cli.main import main

    before = Path.cwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(main, line.split(), color=True)
    finally:
        os.chdir(before)


_LIBRARIES: Final = {"gguf": "gguf", "onnx": "onnx"}
_BYTES: Final = mutations.change_bytes
SEEDS: Final[Mapping[str, Seed]] = {
    "archive-hdf5": Seed(
        "x.h5", write_archive, (_BYTES, mutations.change_flat_file, mutations.change_flat_file)
    ),
    "archive-zarr": Seed(
        "x.zarr",
        write_archive,
        (_BYTES, mutations.change_json, mutations.change_zarr_index, mutations.change_folder),
    ),
    "archive-safetensors": Seed("x.safetensors", write_archive, (_BYTES, mutations.change_safetensors)),
    "journal": Seed(
        "x.h5",
        write_unfinished,
        (mutations.change_journal, mutations.change_journal_bytes),
        ("recover {}", "show {}"),
        is_archive=False,
    ),
    "npz": Seed("x.npz", _write_npz, (_BYTES, mutations.change_zip_member)),
    "npy": Seed("x.npy", _write_npy, (_BYTES, mutations.change_npy)),
    "npy-folder": Seed("x", _write_npy_folder, (_BYTES, mutations.change_npy, mutations.change_folder)),
    "hdf5": Seed("x.h5", _write_hdf5, (_BYTES,)),
    "keras": Seed("x.keras", _write_keras, (_BYTES, mutations.change_zip_member)),
    "safetensors": Seed("x.safetensors", _write_safetensors, (_BYTES, mutations.change_safetensors)),
    "shards": Seed(
        "x",
        _write_shards,
        (_BYTES, mutations.change_json, mutations.change_folder),
        (
            "ls {}",
            "show {}",
            "check {}",
            "compare good.h5 {}",
            "align good.h5 {}",
        ),  # no model for transformers
    ),
    "torch": Seed("x.pt", _write_torch, (_BYTES, mutations.change_zip_member)),
    "zarr2": Seed(
        "x.zarr",
        lambda path: _write_zarr(path, 2),
        (_BYTES, mutations.change_zarr_2, mutations.change_folder),
    ),
    "zarr3": Seed(
        "x.zarr", lambda path: _write_zarr(path, 3), (_BYTES, mutations.change_json, mutations.change_folder)
    ),
    "max": Seed("x.max", _write_max, (_BYTES,)),
    "gguf": Seed("x.gguf", _write_gguf, (_BYTES,)),
    "onnx": Seed("x.onnx", _write_onnx, (_BYTES,)),
    "intermediates": Seed(
        "x.aimodelintermediates",
        _write_intermediates,
        (_BYTES, mutations.change_json, mutations.change_npy, mutations.change_folder),
    ),
    "dump": Seed(
        "x", _write_dump, (_BYTES, mutations.change_folder), ("import {} -o out.h5", "compare {} good.h5")
    ),
    "dump-with-names": Seed(
        "run", _written_by("dump of .pt"), (_BYTES, mutations.change_names, mutations.change_folder)
    ),
    "dump-max": Seed("run", _written_by("dump of .max"), (_BYTES, mutations.change_folder)),
    "print-log": Seed("run.log", _written_by("log of prints"), (_BYTES, mutations.change_text)),
    "polygraphy": Seed(
        "run.json",
        _written_by("results of Polygraphy"),
        (_BYTES, mutations.change_json, mutations.change_text),
    ),
    "debug-tree": Seed(
        "run",
        _written_by("debug tree of transformers"),
        (_BYTES, mutations.change_json, mutations.change_folder),
    ),
    "msprobe": Seed(
        "run", _written_by("dump of msprobe"), (_BYTES, mutations.change_json, mutations.change_folder)
    ),
    "sglang": Seed("run", _written_by("dump of SGLang"), (_BYTES, mutations.change_folder)),
    "neuron-captures": Seed(
        "run", _written_by("captures of Neuron"), (_BYTES, mutations.change_json, mutations.change_folder)
    ),
    "neuron-ranks": Seed(
        "run", _written_by("ranks of Neuron"), (_BYTES, mutations.change_json, mutations.change_folder)
    ),
    "neuron-inputs": Seed("run", _written_by("inputs of Neuron"), (_BYTES, mutations.change_folder)),
    "neuron-snapshots": Seed(
        "run", _written_by("snapshots of Neuron"), (_BYTES, mutations.change_npy, mutations.change_folder)
    ),
    "neuron-calls": Seed(
        "run",
        _written_by("calls of Neuron"),
        (_BYTES, mutations.change_json, mutations.change_npy, mutations.change_folder),
    ),
    "map": Seed(
        "x.toml",
        _write_map,
        (_BYTES, mutations.change_text),
        (
            "compare good.h5 other.h5 --map {}",
            "preflight good.h5 other.h5 --map {}",
            "align good.h5 other.h5 --map {}",
        ),
        is_archive=False,
    ),
    "thresholds": Seed(
        "x.toml",
        _write_thresholds,
        (_BYTES, mutations.change_text),
        ("compare good.h5 other.h5 --thresholds {}",),
        is_archive=False,
    ),
    "rules": Seed(
        "x.toml",
        _write_rules,
        (_BYTES, mutations.change_text),
        ("align good.h5 other.h5 --rules {}",),
        is_archive=False,
    ),
    "calibration": Seed(
        "x.toml",
        _write_calibration,
        (_BYTES, mutations.change_text),
        ("compare good.h5 other.h5 --calibration {}",),
        is_archive=False,
    ),
    "result": Seed(
        "x.json",
        _write_result,
        (_BYTES, mutations.change_json, mutations.change_json),
        ("compare --from {}", "report {} -o out.html"),
        is_archive=False,
    ),
}
