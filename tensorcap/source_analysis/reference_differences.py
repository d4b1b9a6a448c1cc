"""What the code of the reference has and that of the port has not: settings, operations, casts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.source_analysis.class_contents import ClassContents, class_contents, configuration_reads
from tensorcap.source_analysis.source_file import SourceFile, last_name

_PORT_PREFIX: Final = re.compile(r"^(?:Neuron|NeuronX|Nxd|Max|JAX|Flax|TT|ONNX)(?=[A-Z])")
_ROLES: Final = (
    "RMSNorm",
    "LayerNorm",
    "RotaryEmbedding",
    "CrossAttention",
    "Attention",
    "SparseMoeBlock",
    "MoeBlock",
    "MoE",
    "Moe",
    "Experts",
    "Router",
    "Gate",
    "MLP",
    "FeedForward",
    "DecoderLayer",
    "EncoderLayer",
    "Block",
    "Layer",
    "Embeddings",
    "Embedding",
)
_PLAIN_BASES: Final = frozenset(  # which read no configuration and compute nothing of a model
    {
        "ABC",
        "Enum",
        "Exception",
        "Function",
        "Generic",
        "Module",
        "ModuleList",
        "NamedTuple",
        "Protocol",
        "object",
    }
)
_ROLE_NAMES: Final = {"SparseMoeBlock": "MoE", "MoeBlock": "MoE", "Moe": "MoE", "FeedForward": "MLP"}
WITHOUT_EFFECT: Final = frozenset(
    {
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_range",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "torch_dtype",
        "use_cache",
        "use_return_dict",
    }
)
"""Values that training, or the form of the results, depends on, and no number of an inference."""


@dataclass(frozen=True, slots=True)
class UnreadSetting:
    """A value of the configuration that the reference's code reads and the port's does not.

    Attributes:
        name: Of the value.
        places: Where the reference reads it, as `FILE:LINE`.
    """

    name: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassDifference:
    """What one of two classes of one role has and the other has not, each with its place.

    Attributes:
        reference: The reference's class.
        target: The port's class.
        lost_operations: Of the reference alone.
        new_operations: Of the port alone.
        lost_casts: Of the reference alone.
        new_casts: Of the port alone.
    """

    reference: str
    target: str
    lost_operations: Mapping[str, str]
    new_operations: Mapping[str, str]
    lost_casts: Mapping[str, str]
    new_casts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReferenceDifferences:
    """The differences of the code of two models.

    Attributes:
        unread: Settings that only the reference reads.
        classes: Differences of classes of one role.
        paired: How many pairs of classes were held against each other.
        unpaired: Classes of the reference with a role that no class of the port has.
        absent_bases: Base classes of the port that are in no source: what they read and do is unknown.
    """

    unread: tuple[UnreadSetting, ...]
    classes: tuple[ClassDifference, ...]
    paired: int
    unpaired: tuple[str, ...]
    absent_bases: tuple[str, ...]


def reference_differences(
    reference: Sequence[SourceFile], target: Sequence[SourceFile]
) -> ReferenceDifferences:
    """Compare the code of two models, class by class.

    Classes are paired by name, without a prefix such as `Neuron`; what is left by role, if both sides have
    one class of it.

    Args:
        reference: Sources of the reference.
        target: Sources of the port, with those of its base classes.
    """
    read_by_port = configuration_reads(target)
    unread = [
        UnreadSetting(name, tuple(places))
        for name, places in sorted(configuration_reads(reference).items())
        if name not in read_by_port and name not in WITHOUT_EFFECT
    ]
    theirs, ours = class_contents(reference), class_contents(target)
    pairs = _pairs(theirs, ours)
    differences = [_difference(theirs[one], ours[other]) for one, other in pairs.items()]
    unpaired = [name for name in theirs if name not in pairs and _role(name)]
    return ReferenceDifferences(
        tuple(unread),
        tuple(each for each in differences if each),
        len(pairs),
        tuple(unpaired),
        _absent_bases(target),
    )


def class_differences(
    sources: Sequence[SourceFile], pairs: Iterable[tuple[str, str]]
) -> list[ClassDifference]:
    """What one of two classes of the same sources has and the other has not, of pairs that are there."""
    contents = class_contents(sources)
    differences = [
        _difference(contents[one], contents[other])
        for one, other in dict.fromkeys(pairs)
        if one in contents and other in contents
    ]
    return [difference for difference in differences if difference]


def _absent_bases(sources: Sequence[SourceFile]) -> tuple[str, ...]:
    classes = {name: node for source in sources for name, node in source.classes().items()}
    bases = [last_name(base) for node in classes.values() for base in node.bases]
    return tuple(
        dict.fromkeys(base for base in bases if base and base not in classes and base not in _PLAIN_BASES)
    )


def _pairs(reference: Mapping[str, ClassContents], target: Mapping[str, ClassContents]) -> dict[str, str]:
    by_name = {_PORT_PREFIX.sub("", name): name for name in target}
    pairs = {name: by_name[name] for name in reference if name in by_name}
    left = {name for name in target if name not in pairs.values()}
    for role in dict.fromkeys(filter(None, map(_role, reference))):
        sides = [
            [name for name in names if _role(name) == role]
            for names in ([name for name in reference if name not in pairs], left)
        ]
        if len(sides[0]) == len(sides[1]) == 1:
            pairs[sides[0][0]] = sides[1][0]
    return pairs


def _role(name: str) -> str:
    role = next((role for role in _ROLES if name.endswith(role)), "")
    return _ROLE_NAMES.get(role, role)


def _difference(reference: ClassContents, target: ClassContents) -> ClassDifference | None:
    parts = [
        {name: place for name, place in one.items() if name not in other}
        for one, other in (
            (reference.operations, target.operations),
            (target.operations, reference.operations),
            (reference.casts, target.casts),
            (target.casts, reference.casts),
        )
    ]
    return ClassDifference(reference.name, target.name, *parts) if any(parts) else None
