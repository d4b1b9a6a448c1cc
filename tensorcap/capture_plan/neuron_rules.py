"""What NxDI's tensor capture can and cannot take of a module, from its path, its class and the settings.

Read in NxDI's and NxD's sources of July 2026: a forward hook registers what a module returns, and of that
the first tensor becomes an output of the compiled graph. Nothing of this was run on a device.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.capture_plan.module_list import ModuleList

FLAGS_THAT_SET: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_block_cte_nki_kernel_enabled": (
        "qkv_kernel_enabled",
        "qkv_nki_kernel_enabled",
        "attn_kernel_enabled",
        "out_proj_kernel_enabled",
    ),
    "attn_tkg_builtin_kernel_enabled": ("attn_block_tkg_nki_kernel_enabled",),
    "attn_tkg_nki_kernel_enabled": ("attn_block_tkg_nki_kernel_enabled",),
    "mlp_tkg_nki_kernel_enabled": ("mlp_kernel_enabled",),
    "qkv_nki_kernel_enabled": ("qkv_kernel_enabled",),
    "quantized_mlp_kernel_enabled": ("mlp_kernel_enabled",),
}
"""Settings that set others, by NxDI's `NeuronConfig`."""


@dataclass(frozen=True, slots=True)
class _Bypass:
    """Modules that a kernel reads the weights of and never calls.

    Attributes:
        flag: The setting.
        patterns: Globs of their paths.
        phase: `decode` if only token generation uses the kernel, "" if both phases do.
        without: Setting under which the kernel leaves these modules alone, "" for none.
        is_certain: Whether all models leave them to the kernel, and not only Llama's layers and their like.
    """

    flag: str
    patterns: tuple[str, ...]
    phase: str = ""
    without: str = ""
    is_certain: bool = True


_BYPASSES: Final = (
    _Bypass("mlp_kernel_enabled", ("*.mlp.gate_proj", "*.mlp.up_proj", "*.mlp.down_proj", "*.mlp.act_fn")),
    _Bypass(
        "mlp_kernel_enabled",
        ("*.post_attention_layernorm",),
        "",
        "sequence_parallel_enabled",
        is_certain=False,
    ),
    _Bypass("qkv_kernel_enabled", ("*.qkv_proj.?_proj", "*.qkv_proj.Wqkv")),
    _Bypass("qkv_kernel_enabled", ("*.input_layernorm",), "", "sequence_parallel_enabled", is_certain=False),
    _Bypass("qkv_cte_nki_kernel_fuse_rope", ("*.rotary_emb",)),
    _Bypass("out_proj_kernel_enabled", ("*.o_proj.o_proj",)),
    _Bypass(
        "attn_block_tkg_nki_kernel_enabled",
        ("*.qkv_proj", "*.qkv_proj.*", "*.o_proj", "*.o_proj.o_proj", "*.self_attn.?_layernorm"),
        phase="decode",
    ),
    _Bypass(
        "moe_fused_nki_kernel_enabled",
        ("*.router", "*.router.*", "*.expert_mlps", "*.expert_mlps.*"),
        "decode",
    ),
    _Bypass("router_topk_nki_kernel_enabled", ("*.router.linear_router",), "decode"),
    _Bypass("expert_mlp_nki_kernel_enabled", ("*.expert_mlps.mlp_op", "*.expert_mlps.mlp_op.*"), "decode"),
)
_NEVER_CALLED: Final[Mapping[str, str]] = {
    "KVCacheManager": "the model asks it for the cache by methods",
    "ModuleDict": "it is a container, which is not called",
    "ModuleList": "it is a container, which is not called",
    "ParameterDict": "it holds parameters, and is not called",
    "ParameterList": "it holds parameters, and is not called",
    "SPMDRank": "its number is read by a method",
}
_SEVERAL_RESULTS: Final = frozenset({"GroupQueryAttention_QKV", "RotaryEmbedding", "RouterTopK"})
_FUSED_EXPERTS: Final = re.compile(r"ExpertFused\w*ParallelLinear")
_COLUMN_NAMES: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "Wqkv",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "fc1",
    "c_fc",
)
_LAYER_ROTARY: Final = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.([0-9]+)\..*rotary_emb")
_PLACEHOLDER: Final = "NxDI then hands out zeros of shape [1] and says nothing"


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of a `neuron_config` that decides what can be captured.

    Attributes:
        values: All settings of the file; empty if none was given.
    """

    values: Mapping[str, Any]

    def is_on(self, flag: str) -> bool:
        """Whether a flag is set, itself or by one that sets it."""
        setters = (name for name, others in FLAGS_THAT_SET.items() if flag in others)
        return self.values.get(flag) is True or any(self.is_on(name) for name in setters)

    @property
    def ranks(self) -> int | None:
        """The tensor-parallel ranks; None if they are not known."""
        value = self.values.get("tp_degree")
        return value if type(value) is int and value > 0 else None


def stand_in(modules: ModuleList, path: str) -> tuple[str, str] | None:
    """The module to capture in the place of one, and why; None if it can be captured itself.

    An attention returns a dataclass, whose fields are walked in the order of the alphabet: the first tensor
    is its table of cosines. Its output projection returns the same hidden states as a plain tensor.
    """
    if not _is_attention(modules, path):
        return None
    projections = [f"{path}.{name}" for name in ("o_proj", "cte_o_proj", "out_proj", "dense", "wo")]
    for projection in projections:
        if projection in modules.classes:
            return projection, (
                "the attention returns a dataclass, of which NxDI takes the first field by the alphabet "
                "(cos_cache, not hidden_states); its output projection returns the hidden states"
            )
    return None


def obstacle(modules: ModuleList, path: str, settings: Settings) -> str:
    """Why nothing of a module can be captured in any phase, "" if something can."""
    name = modules.classes[path]
    if reason := _NEVER_CALLED.get(name):
        return f"{name} is never called: {reason}; {_PLACEHOLDER}"
    if _FUSED_EXPERTS.fullmatch(name):
        return f"{name} is never called: the experts use its weights themselves; {_PLACEHOLDER}"
    rotary = _LAYER_ROTARY.fullmatch(path)
    if rotary and int(rotary[1]) > 0:
        return f"layer 0 computes the rotary tables for all layers, this one is never called; {_PLACEHOLDER}"
    if path in modules.never_called:
        return f"the run of {modules.source} never called it; {_PLACEHOLDER}"
    if _is_attention(modules, path):
        return (
            "it returns a dataclass, of which NxDI takes a table of cosines, and it has no output projection"
        )
    for bypass in _bypasses(path, settings):
        if bypass.is_certain and not bypass.phase:
            return f"{bypass.flag} is set, and the kernel uses its weights without calling it; {_PLACEHOLDER}"
    return ""


def remarks(modules: ModuleList, path: str, settings: Settings) -> Iterator[str]:
    """What a reader of the captured tensor of a module has to know, a sentence each."""
    name, last = modules.classes[path], path.rpartition(".")[2]
    for bypass in _bypasses(path, settings):
        if not bypass.is_certain:
            yield f"{bypass.flag} is set: zeros of shape [1] if the kernel computes it too, as in Llama"
        elif bypass.phase:
            yield f"{bypass.flag} is set: zeros of shape [1] in token generation, where it is not called"
    if not settings.values:
        flags = dict.fromkeys(b.flag for b in _BYPASSES if _matches(path, b.patterns))
        if flags:
            yield f"not called if {' or '.join(flags)} is set"
    if settings.ranks != 1:
        yield from _sharding(name, last, path, settings)
    if last == "lm_head":
        yield (
            "must be a ColumnParallelLinear without sequence parallelism, or tracing stops; the logits of "
            "all ranks are an output of the graph anyway"
        )
    if settings.is_on("qkv_kernel_fuse_residual_add") and _is_layer(path):
        yield "qkv_kernel_fuse_residual_add is set: in context encoding the result lacks the residual"
    slots = modules.results.get(path, ())
    if len(slots) > 1 or name in _SEVERAL_RESULTS:
        yield "returns several tensors, of which the first is captured"
    fields = [slot for slot in slots if not slot.partition(".")[2].partition(".")[0].isdigit()]
    if len(fields) > 1 and min(fields) != fields[0]:
        yield f"if it returns a dataclass, that is the first field by the alphabet, {min(fields)}"


def _sharding(name: str, last: str, path: str, settings: Settings) -> Iterator[str]:
    of_ranks = f" of {settings.ranks}" if settings.ranks else ""
    is_column = name == "ColumnParallelLinear" or (not name and last in _COLUMN_NAMES)
    if is_column and last != "lm_head":
        yield f"sharded over ranks{of_ranks}: rank 0's columns are captured, unless gather_output is set"
    elif last == "act_fn" or name == "GroupQueryAttention_QKV" or last in ("q_layernorm", "k_layernorm"):
        yield f"sharded over ranks{of_ranks}: rank 0's heads or columns are captured"
    elif "Experts" in name or last in ("expert_mlps", "mlp_op"):
        yield f"a partial sum over ranks{of_ranks}: rank 0's part of it is captured"
    elif name == "RowParallelLinear" and not settings.values:
        yield "a partial sum of rank 0 if reduce_output is off"
    if settings.is_on("sequence_parallel_enabled") and (
        "Norm" in name or last.endswith("norm") or _is_layer(path) or last in ("o_proj", "mlp", "down_proj")
    ):
        yield f"sequence_parallel_enabled is set: in context encoding rank 0's part of the tokens{of_ranks}"


def _bypasses(path: str, settings: Settings) -> Iterator[_Bypass]:
    for bypass in _BYPASSES:
        if (
            settings.is_on(bypass.flag)
            and not (bypass.without and settings.is_on(bypass.without))
            and _matches(path, bypass.patterns)
        ):
            yield bypass


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _is_attention(modules: ModuleList, path: str) -> bool:
    name = modules.classes[path]
    if name:
        return name.endswith("Attention") or name.endswith("AttentionBase")
    return path.rpartition(".")[2] in ("self_attn", "cross_attn")


def _is_layer(path: str) -> bool:
    return re.fullmatch(r"(?:.*\.)?(?:layers|h|blocks)\.[0-9]+", path) is not None
