"""Compare the metadata of two runs: mode, configuration, modules, settings, versions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tensorcap.comparison.preflight.configuration import ABSENT, config_differences
from tensorcap.comparison.preflight.item import Item, UnknownError, common_modules, make_item, short_name
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.run_info import ModuleInfo, RunInfo

_QUANTISED: Final = ("int", "uint", "float8", "float4", "q")  # beginnings of dtypes
_PRECISIONS: Final = ("dtype", "compute_dtype", "device")
# Settings of a framework: what another value means, and whether it alone makes outputs differ
_SETTINGS: Final = {
    "float32_matmul_precision": ("The same operators give other numbers.", True),
    "deterministic_algorithms": ("The same operators give other numbers.", False),
    "function": ("Another function of the program was run.", True),
    "precision": ("Rounding differs; that alone is no mistake.", False),
    "mode": ("What is known of operations differs, not what they compute.", False),
    "device_target": ("Other kernels round otherwise.", False),
    "compute_units": ("Other kernels round otherwise.", False),
    "inputs": ("How inputs were made; their values are compared as such.", False),
}

_PRODUCTS: Final = ("Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d")  # classes that multiply by a weight
_RANK_PREFIX: Final = re.compile(r"^[A-Za-z]*Parallel(?=[A-Z])")  # of classes whose tensors ranks hold
# Classes that run the one module in them as it is, and its name in them
_WRAPPERS: Final = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
}


def compare_modes(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare training modes; dropout in training mode is random."""
    sides = [archive.info.modules for archive in (reference, target)]
    if not any(sides):
        raise UnknownError("no archive lists its modules")
    for name, side in zip(("reference", "target"), sides, strict=True):
        training = [site for site, module in side.items() if module.is_training]
        random = [site for site in training if "dropout" in side[site].class_name.lower()]
        if random:
            text = (
                f"The {name} ran in training mode: dropout is random in {counted(len(random), 'module')}, "
                f"first {random[0]}."
            )
            flags = [random[0] in side and bool(side[random[0]].is_training) for side in sides]
            yield make_item("mode", random[0], flags[0], flags[1], text, explains=True)
    yield from _batch_norms(*sides)
    # only of the whole model: a child that somebody put in is in training mode, and mostly does not care
    roots = [side[ROOT_SITE].is_training if ROOT_SITE in side else None for side in sides]
    if None not in roots and roots[0] != roots[1]:
        text = "One run was in training mode, the other in evaluation mode."
        yield make_item("mode", ROOT_SITE, roots[0], roots[1], text, explains=True, rank=1)


def _batch_norms(ours: Mapping[str, ModuleInfo], theirs: Mapping[str, ModuleInfo]) -> Iterator[Item]:
    """Find norms that one side alone ran in training mode, by the statistics of its own batch."""
    for name, side, other in (("reference", ours, theirs), ("target", theirs, ours)):
        norms = [
            site
            for site, module in side.items()
            if module.is_training
            and "batchnorm" in module.class_name.lower()
            and site in other
            and other[site].is_training is False
        ]
        if norms:
            text = (
                f"The {name} ran {counted(len(norms), 'norm')} in training mode, first {norms[0]}: with "
                "mean and variance of the batch, not the running ones."
            )
            flags = [bool(each[norms[0]].is_training) for each in (ours, theirs)]
            yield make_item("mode", norms[0], flags[0], flags[1], text, explains=True)


def compare_configs(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare the entries of the model's configuration."""
    ours, theirs = reference.info.config, target.info.config
    for name, config in (("reference", ours), ("target", theirs)):
        if not config:
            raise UnknownError(f"the {name} has no configuration")
    is_same_framework = reference.info.framework == target.info.framework
    for d in config_differences(ours, theirs):
        if not is_same_framework and ABSENT in (d.reference, d.target):
            continue  # what another framework's configuration has no word for
        text = f"{d.why[:1].upper()}{d.why[1:]}." if d.why else "Its influence is not known."
        yield make_item("config", d.name, d.reference, d.target, text, explains=d.explains, rank=d.rank)


def compare_classes(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare the classes of modules: some of a class, which were replaced, and all of one.

    A wrapper that runs the module in it, as `torch.compile` makes, has that module's class, and a class and
    its forms for several ranks are no other class to each other.
    """
    common = common_modules(reference, target)
    wrapped = [_wrapped_classes(archive) for archive in (reference, target)]
    pairs = {
        path: (wrapped[0].get(one.path, one.class_name), wrapped[1].get(other.path, other.class_name))
        for path, (one, other) in common.items()
    }
    pairs = {path: names for path, names in pairs.items() if all(names)}
    counts = Counter(pairs.values())
    mostly: dict[str, str] = {}
    for ours, theirs in sorted(counts, key=lambda names: (names[0] != names[1], -counts[names])):
        mostly.setdefault(ours, theirs)
    for path, (ours, theirs) in pairs.items():
        if _are_one_product(common[path]):
            continue
        if theirs != mostly[ours] and not all(_is_form_of(ours, name) for name in (theirs, mostly[ours])):
            stayed = "stayed what they are" if mostly[ours] == ours else f"became {short_name(mostly[ours])}"
            text = f"Other modules of this class {stayed}."
            yield make_item("modules", path, *_class_texts(ours, theirs, common[path]), text, explains=True)
    for ours, theirs in mostly.items():
        if ours != theirs:
            first = next(path for path, pair in pairs.items() if pair == (ours, theirs))
            count = counts[ours, theirs]
            which = (
                "The only module of this class is" if count == 1 else f"All {count} modules of this class are"
            )
            text = f"{which} of another implementation."
            sides = _class_texts(ours, theirs, common[first])
            yield make_item("modules", short_name(ours), *sides, text, explains=False, rank=1)


def _are_one_product(modules: Sequence[ModuleInfo]) -> bool:
    """Whether both multiply by a matrix of the same sizes, as a convolution of 1 x 1 and a linear layer."""
    sizes = []
    for module in modules:
        weight = module.parameters.get("weight")
        if short_name(module.class_name) not in _PRODUCTS or weight is None or weight.shape is None:
            return False
        matrix, kernel = weight.shape[:2], [size for size in weight.shape[2:] if size != 1]
        sizes.append((*matrix, *kernel, "bias" in module.parameters))
    return sizes[0] == sizes[1]


def _is_form_of(name: str, other: str) -> bool:
    """Whether a class is another one, or its form for several ranks: `RowParallelLinear` of `Linear`."""
    form, of_ranks = _RANK_PREFIX.subn("", short_name(other))
    return name == other or (bool(of_ranks) and form == short_name(name))


def _class_texts(ours: str, theirs: str, modules: tuple[ModuleInfo, ModuleInfo]) -> tuple[str, str]:
    """The classes of two modules, with the type of its weights for the one that alone is quantised."""
    types = [_quantised_type(module) for module in modules]
    if bool(types[0]) == bool(types[1]):
        return ours, theirs
    one, other = (
        f"{name} ({kind} weights, {_arithmetic(module)})" if kind else name
        for name, kind, module in zip((ours, theirs), types, modules, strict=True)
    )
    return one, other


def _arithmetic(module: ModuleInfo) -> str:
    """What a module with quantised weights computes with."""
    bits = module.settings.get("input_bits")
    return "dequantised" if bits is None else f"inputs rounded to {bits} bits at each call"


def _quantised_type(module: ModuleInfo) -> str:
    """The type of a quantised module's weights, as far as it is known; "" of any other module."""
    for name, tensor in {**module.parameters, **module.buffers}.items():
        if "weight" in name and (tensor.class_name or tensor.dtype.startswith(_QUANTISED)):
            return tensor.dtype if tensor.dtype.startswith(_QUANTISED) else short_name(tensor.class_name)
    if "quant" not in module.class_name.lower():
        return ""
    dtype = short_name(str(module.settings.get("dtype", "")))
    return dtype if dtype.startswith("q") else "quantised"


def _wrapped_classes(archive: Archive) -> dict[str, str]:
    """The class within each wrapper, by its path; "" if the run does not list what it wraps."""
    classes = {module.path: module.class_name for module in archive.info.modules.values()}
    wrapped: dict[str, str] = {}
    for path, name in sorted(classes.items(), reverse=True):  # what is within comes first
        child = _WRAPPERS.get(short_name(name))
        if child is not None:
            inner = f"{path}.{child}" if path else child
            wrapped[path] = wrapped.get(inner, classes.get(inner, ""))
    return wrapped


def compare_attention(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare the implementations of attention."""
    ours, theirs = _attention_of(reference.info), _attention_of(target.info)
    if not (ours and theirs):
        raise UnknownError("not both runs say how attention is computed")
    if ours != theirs:
        text = "Attention is computed by another implementation: other rounding, and perhaps another mask."
        yield make_item("attention", "attn_implementation", ours, theirs, text, explains=False)


def _attention_of(info: RunInfo) -> Any:
    names = "_attn_implementation", "attn_implementation", "_attn_implementation_internal"
    option = info.workload.options.get("attn_implementation")
    values = [option, info.attention_implementation, *map(info.config.get, names)]
    return next((value for value in values if value), None)


def compare_settings(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare settings of the framework that change the results of its operators."""
    ours, theirs = reference.info.settings, target.info.settings
    if not (ours and theirs):
        raise UnknownError("not both runs say how their framework was set")
    for name in _SETTINGS:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            text, explains = _SETTINGS[name]
            yield make_item(
                "settings", name, _setting(ours[name]), _setting(theirs[name]), text, explains=explains
            )


def _setting(value: Any) -> Any:
    """A setting as it is reported: of one for each input, a text."""
    return ", ".join(f"{n}: {v}" for n, v in value.items()) if isinstance(value, Mapping) else value


def compare_precision(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare dtypes and devices of the runs."""
    ours, theirs = ([i.dtype, i.compute_dtype, i.device] for i in (reference.info, target.info))
    known = [sides for sides in zip(_PRECISIONS, ours, theirs, strict=True) if all(sides)]
    if not known:
        raise UnknownError("not both runs say what they computed in")
    for name, one, other in known:
        if one != other:
            text = "Rounding differs; that alone is no mistake."
            yield make_item("precision", name, one, other, text, explains=False)


def compare_versions(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare versions of packages."""
    ours, theirs = reference.info.packages, target.info.packages
    if not (ours and theirs):
        raise UnknownError("not both runs list their packages")
    for name, one in ours.items():
        other = theirs.get(name)
        if other and one != other:
            yield make_item("versions", name, one, other, "Another version of the code.", explains=False)
