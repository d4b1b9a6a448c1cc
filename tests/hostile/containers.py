"""A run of two tensors in everything that opens as an archive, by whoever writes it, or byte by byte."""

from __future__ import annotations

import base64
import io
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import dtype_of
from tensorcap_formats.foreign import write_max
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive
from tests.support.torch_bytes import Tensor, write_npy, write_torch

_DRAW: Final = np.random.default_rng(21)
LARGE: Final = _DRAW.uniform(1, 2, (64, 64)).astype("<f4")  # whose bytes occur nowhere else
SMALL: Final = _DRAW.uniform(1, 2, (3, 32)).astype("<f4")
_SITES: Final = {"layers.0.mlp": LARGE, "norm": SMALL}


@dataclass(frozen=True)
class Container:
    """One of them.

    Attributes:
        name: Of the file or the folder, or the pattern that is opened.
        write: Writes it into a folder.
        packages: Without which it is not written or read.
        is_sealed: Whether a flipped bit of a tensor is damage, since a digest or a checksum says so.
        stored: Bytes of the large tensor as they stand in it, one after another; None if it is compressed.
    """

    name: str
    write: Callable[[Path], object]
    packages: tuple[str, ...] = ()
    is_sealed: bool = False
    stored: bytes | None = LARGE[:16].tobytes()


def _ours(name: str) -> Callable[[Path], object]:
    return lambda folder: write_archive(folder / name, _SITES)


def _converted(name: str, compress: str | None = None) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        with open_archive(write_archive(folder / "source.h5", _SITES)) as source:
            convert(source, folder / name, compress=compress)
        (folder / "source.h5").unlink()

    return write


def _ranks(folder: Path) -> None:
    for rank, part in enumerate(np.split(LARGE, 2)):
        rule = {"rule": "concat 0", "keys": ["0/layers.0.mlp/output"], "known": "by the test"}
        run = {"ranks": {"rank": rank, "count": 2, "tensors": [rule]}}
        write_archive(folder / f"run.rank{rank}.h5", {"layers.0.mlp": part, "norm": SMALL}, run=run)


def _rewritten(folder: Path) -> None:
    """An archive of ours that the HDF5 library copied: its note no longer holds."""
    import h5py

    write_archive(folder / "source.h5", _SITES)
    with h5py.File(folder / "source.h5") as source, h5py.File(folder / "run.h5", "w") as target:
        for name in source:
            source.copy(name, target)
    (folder / "source.h5").unlink()


def _hdf5(**options: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import h5py

        with h5py.File(folder / "run.h5", "w") as file:
            for name, array in _SITES.items():
                file.create_dataset(name, data=array, **options)

    return write


def _keras(folder: Path) -> None:
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["layers/dense/vars/0"], file["layers/norm/vars/0"] = LARGE, SMALL
    with zipfile.ZipFile(folder / "run.keras", "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.10.0"}')
        archive.writestr("model.weights.h5", content.getvalue())


def _safetensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(_SITES, folder / "run.safetensors")


def _shards(folder: Path) -> None:
    from safetensors.numpy import save_file

    names = {}
    (folder / "run").mkdir()
    for number, (name, array) in enumerate(_SITES.items(), 1):
        names[name] = f"model-0000{number}-of-00002.safetensors"
        save_file({name: array}, folder / "run" / names[name])
    (folder / "run/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _zarr(version: int, **options: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import zarr

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group: Any = zarr.open_group(str(folder / "run.zarr"), mode="w", zarr_format=version)  # type: ignore[arg-type]
            for name, array in _SITES.items():
                group.create_array(name, data=array, **(options if array is LARGE else {}))

    return write


def _npy(order: str) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "run.npy", np.asarray(LARGE, order=order))  # type: ignore[call-overload]


def _npy_folder(folder: Path) -> None:
    (folder / "run").mkdir()
    for name, array in _SITES.items():
        np.save(folder / f"run/{name}.npy", array)


def _torch(save: str, *, is_legacy: bool = False) -> Callable[[Path], object]:
    """One file of torch.save, or shards of a checkpoint."""

    def write(folder: Path) -> None:
        import torch

        tensors: Mapping[str, Any] = {name: torch.from_numpy(array.copy()) for name, array in _SITES.items()}
        if save.endswith("/"):
            (folder / save).mkdir()
            for number, (name, tensor) in enumerate(tensors.items(), 1):
                torch.save({name: tensor}, folder / save / f"pytorch_model-0000{number}-of-00002.bin")
        else:
            torch.save(tensors, folder / save, _use_new_zipfile_serialization=not is_legacy)

    return write


def _max(folder: Path) -> None:
    write_max(folder / "run.max", "model.norm-output", dtype_of(LARGE), LARGE.shape, [LARGE.reshape(-1)])


def _max_dump(folder: Path) -> None:
    (folder / "run").mkdir()
    for name, array in _SITES.items():
        label = f"model.{name}-output"
        write_max(folder / f"run/{label}.max", label, dtype_of(array), array.shape, [array.reshape(-1)])


def _torch_dump(folder: Path) -> None:
    labels = {f"model.{name}-output": array for name, array in _SITES.items()}
    for label, array in labels.items():
        write_torch(folder / f"run/{label}.pt", _bytes(array))
    (folder / "run/tensor_names.txt").write_text("".join(f"{label}\n" for label in labels))


def _print_log(folder: Path) -> None:
    """As MAX prints in the style FULL; the digits are the bytes."""
    lines = []
    for name, array in _SITES.items():
        sizes = "x".join(map(str, array.shape))
        numbers = ", ".join(f"{value:.6e}" for value in array.reshape(-1))
        lines.append(f"model.{name}-output = tensor<{sizes}xf32> [{numbers}]\n")
    (folder / "run.log").write_text("".join(lines))


def _intermediates(folder: Path) -> None:
    (folder / "run.aimodelintermediates/data").mkdir(parents=True)
    entries = {}
    for number, (name, array) in enumerate({"mul": LARGE, "add": SMALL}.items()):
        file = f"data/{name}_{number:04}.npy"
        np.save(folder / "run.aimodelintermediates" / file, array)
        entries[name] = {
            "node_name": name,
            "node_op": "call_function",
            "node_target": f"aten.{name}.Tensor",
            "data_file": file,
            "shape": list(array.shape),
            "torch_dtype": "torch.float32",
            "numel": array.size,
        }
    text = json.dumps({"inputs": {}, "outputs": {}, "intermediates": entries})
    (folder / "run.aimodelintermediates/metadata.json").write_text(text)


def _gguf(*, is_quantised: bool) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import gguf
        from gguf.quants import quantize

        kind = gguf.GGMLQuantizationType.Q8_0
        writer = gguf.GGUFWriter(str(folder / "run.gguf"), "llama")
        for name, array in _SITES.items():
            data = quantize(array, kind) if is_quantised else array
            writer.add_tensor(name, data, raw_dtype=kind if is_quantised else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def _onnx(*, is_beside: bool) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import onnx
        from onnx import helper, numpy_helper

        weights = [numpy_helper.from_array(array, name) for name, array in _SITES.items()]
        model = helper.make_model(helper.make_graph([], "net", [], [], initializer=weights))
        place: Any = {"location": "net.data", "size_threshold": 0} if is_beside else {}
        onnx.save(model, folder / "run.onnx", save_as_external_data=is_beside, **place)

    return write


def _captures(folder: Path) -> None:
    """Of NxD Inference's hook."""
    entries = {}
    for name, array in _SITES.items():
        file = f"captured_tensors_cte_step_1_module_{name}_output.pt"
        write_torch(folder / "run" / file, _bytes(array[None]))
        shape, dtype = [1, *array.shape], "torch.float32"
        entries[file] = {"step": 1, "module_name": name, "tensor_shape": shape, "tensor_dtype": dtype}
    (folder / "run/capture_metadata.json").write_text(json.dumps({"tensors": entries}))


def _rank_tree(folder: Path) -> None:
    for name, array in _SITES.items():
        write_torch(folder / f"run/dp0/prefill_s2_0/{name}/rank0.pt", _bytes(array))
    metadata = {"req_ids": ["a"], "positions": [0, 1], "dp_rank": 0}
    (folder / "run/dp0/prefill_s2_0/prefill_s2_0_meta.json").write_text(json.dumps(metadata))


def _saved_inputs(folder: Path) -> None:
    write_torch(folder / "run/saved_inputs_cte_output_0.pt", (_bytes(LARGE), _bytes(SMALL)))


def _snapshots(folder: Path) -> None:
    for number, array in enumerate(_SITES.values()):
        path = folder / f"run/a_model/_tp0_bk0/request0/rank0/input{number}.npy"
        write_npy(path, "<f4", array.shape, array.tobytes())


def _call_snapshots(folder: Path) -> None:
    entries = []
    for number, array in enumerate(_SITES.values()):
        write_npy(folder / f"run/aa/rank0/call0/tensor{number}.npy", "<f4", array.shape, array.tobytes())
        entries.append({"index": number, "dtype": "torch.float32", "shape": list(array.shape)})
    content = {"inputs": entries, "global_step": 1, "is_prompt": True}
    (folder / "run/aa/rank0/call0/meta.json").write_text(json.dumps(content))


def _bytes(array: np.ndarray[Any, Any]) -> Tensor:
    return Tensor("float32", array.shape, array.tobytes())


def _polygraphy(folder: Path) -> None:
    def encoded(array: Any) -> dict[str, Any]:
        file = io.BytesIO()
        np.save(file, array)
        text = base64.b64encode(file.getvalue()).decode()
        inner = {"array": text, "polygraphy_class": "ndarray"}
        return {"values": inner, "polygraphy_class": "LazyArray"}

    outputs = {
        "outputs": {name: encoded(array) for name, array in _SITES.items()},
        "runner_name": "onnxrt-N0",
    }
    result = {"lst": [["onnxrt-N0", [outputs]]], "polygraphy_class": "RunResults"}
    (folder / "run.json").write_text(json.dumps(result, indent=4))


def _debug_tree(folder: Path) -> None:
    """Of transformers' debugger, with tensors in files."""
    from safetensors.numpy import save_file

    (folder / "run").mkdir()
    children = []
    for name, array in _SITES.items():
        file = f"Net.{name}_outputs.safetensors"
        save_file({"data": array}, folder / "run" / file)
        value = {"shape": f"torch.Size({list(array.shape)})", "dtype": "torch.float32", "value": f"./{file}"}
        children.append(
            {"module_path": f"Net.{name}", "inputs": {"kwargs": {"mask": "None"}}, "outputs": value}
        )
    tree = {"module_path": "Net", "children": children}
    (folder / "run/Net_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree, indent=2))


def _msprobe(folder: Path) -> None:
    data: dict[str, Any] = {}
    for name, array in _SITES.items():
        entry, file = f"Module.{name}.Linear.forward.0", f"Module.{name}.Linear.forward.0.output.0.pt"
        write_torch(folder / "run/step0/rank0/dump_tensor_data" / file, _bytes(array))
        leaf = {
            "type": "torch.Tensor",
            "dtype": "torch.float32",
            "shape": list(array.shape),
            "data_name": file,
        }
        data[entry] = {
            "input_args": [{"type": "int", "value": 2}, None],
            "input_kwargs": {},
            "output": [leaf],
        }
    dump = {"task": "tensor", "level": "L0", "framework": "pytorch", "data": data}
    (folder / "run/step0/rank0/dump.json").write_text(json.dumps(dump))
    (folder / "run/step0/rank0/construct.json").write_text(json.dumps(dict.fromkeys(data)))


def _sglang(folder: Path) -> None:
    for number, (name, array) in enumerate(_SITES.items(), 1):
        tags = f"step=0___rank=0___dump_index={number}___name=non_intrusive__{name}.output"
        write_torch(folder / f"run/{tags}___recompute_status=disabled.pt", _bytes(array))


def _npz(folder: Path) -> None:
    np.savez(folder / "run.npz", **_SITES)  # type: ignore[arg-type]  # no array is named allow_pickle


def _deflated_npz(folder: Path) -> None:
    np.savez_compressed(folder / "run.npz", **_SITES)  # type: ignore[arg-type]


CONTAINERS: Final[Mapping[str, Container]] = {
    "archive .h5": Container("run.h5", _ours("run.h5"), is_sealed=True),
    "archive .h5, copied by HDF5": Container("run.h5", _rewritten, is_sealed=True),
    "archive .h5, zstd": Container(
        "run.h5", _converted("run.h5", "zstd"), ("hdf5plugin",), is_sealed=True, stored=None
    ),
    "archive .h5, blosc2": Container(
        "run.h5", _converted("run.h5", "blosc2"), ("hdf5plugin",), is_sealed=True, stored=None
    ),
    "archive .zarr": Container("run.zarr", _ours("run.zarr"), is_sealed=True),
    "archive .zarr, zstd": Container(
        "run.zarr", _converted("run.zarr", "zstd"), ("numcodecs",), is_sealed=True, stored=None
    ),
    "archive .safetensors": Container("run.safetensors", _ours("run.safetensors"), is_sealed=True),
    "archives of ranks": Container("run.rank*.h5", _ranks, is_sealed=True),
    "archive as .npz": Container("run.npz", _converted("run.npz"), is_sealed=True),
    "hdf5": Container("run.h5", _hdf5()),
    "hdf5, chunked": Container("run.h5", _hdf5(chunks=True)),
    "hdf5, gzip": Container("run.h5", _hdf5(compression="gzip", shuffle=True), stored=None),
    "hdf5, checksums": Container("run.h5", _hdf5(fletcher32=True), is_sealed=True),
    "keras": Container("run.keras", _keras),
    "safetensors": Container("run.safetensors", _safetensors),
    "shards of safetensors": Container("run", _shards),
    "zarr 2": Container("run.zarr", _zarr(2, compressors=None), ("zarr",)),
    "zarr 2, compressed": Container("run.zarr", _zarr(2), ("zarr",), stored=None),
    "zarr 3": Container("run.zarr", _zarr(3, compressors=None), ("zarr",)),
    "zarr 3, compressed": Container("run.zarr", _zarr(3), ("zarr",), stored=None),
    "zarr 3, shards": Container(
        "run.zarr", _zarr(3, compressors=None, chunks=(16, 64), shards=(64, 64)), ("zarr",)
    ),
    "npy": Container("run.npy", _npy("C")),
    "npy, Fortran": Container("run.npy", _npy("F"), stored=LARGE.T[:16].tobytes()),
    "npy in a folder": Container("run", _npy_folder),
    "npz": Container("run.npz", _npz, is_sealed=True),
    "npz, deflated": Container("run.npz", _deflated_npz, is_sealed=True, stored=None),
    "raw": Container("run.bin:float32:64,64", lambda folder: LARGE.tofile(folder / "run.bin")),
    "torch": Container("run.pt", _torch("run.pt"), ("torch",)),
    "torch, shards": Container("run", _torch("run/"), ("torch",)),
    "max": Container("run.max", _max),
    "dump of .max": Container("run", _max_dump),
    "dump of .pt": Container("run", _torch_dump),
    "log of prints": Container("run.log", _print_log, stored=f"{LARGE[5, 5]:.6e}"[2:7].encode()),
    "intermediates of Core AI": Container("run.aimodelintermediates", _intermediates),
    "gguf": Container("run.gguf", _gguf(is_quantised=False), ("gguf",)),
    "gguf, Q8_0": Container("run.gguf", _gguf(is_quantised=True), ("gguf",), stored=None),
    "onnx": Container("run.onnx", _onnx(is_beside=False), ("onnx", "google.protobuf")),
    "onnx, data beside": Container("run.onnx", _onnx(is_beside=True), ("onnx", "google.protobuf")),
    "results of Polygraphy": Container("run.json", _polygraphy, stored=None),
    "debug tree of transformers": Container("run", _debug_tree),
    "dump of msprobe": Container("run", _msprobe),
    "dump of SGLang": Container("run", _sglang),
    "captures of Neuron": Container("run", _captures),
    "ranks of Neuron": Container("run", _rank_tree),
    "inputs of Neuron": Container("run", _saved_inputs),
    "snapshots of Neuron": Container("run", _snapshots),
    "calls of Neuron": Container("run", _call_snapshots),
}


def available() -> list[str]:
    """The names of those whose packages are installed."""
    return [name for name, kind in CONTAINERS.items() if all(map(_is_installed, kind.packages))]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
