"""Labels of tensors in dumps of print hooks, and the keys that they mean (specs/max-files.md, section 2).

A hook calls the whole model `model`, the n-th call of a layer `LAYER(n)`, and its tensors
`LAYER-input_SLOT`, `LAYER-output`, `LAYER-output_SLOT`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tensorcap_formats.keys import PROBES, ROOT_SITE, Key, escape, inner_site, module_site, unescape

ROOT: Final = "model"
_LABEL: Final = re.compile(r"(.+)-(input|output)(?:_(.+))?", re.DOTALL)
_CALL: Final = re.compile(r"(.+)\(([2-9]|[1-9]\d{1,17})\)", re.DOTALL)  # the first one has no number
_FILE: Final = re.compile(r"(.+)_(input|output)(?:_(\d+))?(_injected)?", re.DOTALL)
_CLASS: Final = re.compile(r"[A-Z]\w*")
_NUMBERS: Final = re.compile(r"\d+(?:_\d+)*")
_DOUBLED: Final = re.compile(r"(?<![^.])([^.]*[^.\d][^.]*)\.\1(?=\.\d+(?:\.|$))")


@dataclass(frozen=True, slots=True)
class Label:
    """A parsed label.

    Attributes:
        path: Of the layer, as the label has it; of the model itself `""` after `remove_root`.
        call: Which call of the layer it was, from 0 on.
        kind: `input` or `output`.
        slot: Which of the inputs or outputs; "" if the label does not say.
        is_injected: Whether the tensor replaced the model's own.
    """

    path: str
    call: int
    kind: str
    slot: str = ""
    is_injected: bool = False

    def key(self, step: int) -> Key:
        """The key that it means in a step."""
        fields = self.slot.replace("_", ".") if _NUMBERS.fullmatch(self.slot) else self.slot
        slot = f"{self.kind}.{escape(fields)}" if fields else self.kind
        return Key(module_site(self.path), slot, step, self.call)


def parse_label(text: str) -> Label | None:
    """Parse a label of a print hook; None if it is none (MXF-20).

    Example:
        >>> parse_label("model.layers.3.mlp(2)-input_hidden_states").key(0).text
        '0/model.layers.3.mlp@1/input.hidden_states'
        >>> parse_label("after_rope") is None
        True
    """
    match = _LABEL.fullmatch(text)
    if match is None:
        return None
    path, kind, slot = match.groups()
    numbered = _CALL.fullmatch(path)
    if numbered is None:
        return Label(path, 0, kind, slot or "")
    return Label(numbered[1], int(numbered[2]) - 1, kind, slot or "")


def parse_file_name(text: str) -> Label | None:
    """Parse the name of a file of a layer verification; None if it is none (MXF-22).

    Example:
        >>> parse_file_name("layers.0.mlp.down_proj_input_0_injected").key(0).text
        '0/layers.0.mlp.down_proj/input.0'
    """
    match = _FILE.fullmatch(text)
    if match is None:
        return None
    path, kind, slot, injected = match.groups()
    return Label(path, 0, kind, slot or "", injected is not None)


def probe_key(text: str, step: int) -> Key:
    """The key of a print whose label is a name of its own (MXF-21)."""
    return Key(inner_site(PROBES, text), "value", step)


def undouble_names(label: Label) -> Label:
    """Remove the second of two equal names, which an object for lists of layers adds (MXF-23).

    Example:
        >>> undouble_names(parse_label("model.layers.layers.0.mlp-output")).path
        'model.layers.0.mlp'
    """
    return replace(label, path=_DOUBLED.sub(r"\1", label.path))


def remove_root(labels: Iterable[Label]) -> list[Label]:
    """Remove the name of the whole model from the labels, if all of them begin with it (MXF-24).

    Labels that are the class of a layer, which a hook uses if it has no name for it, do not count.
    """
    labels = list(labels)
    named = [label.path for label in labels if not _CLASS.fullmatch(label.path)]
    if not all(path == ROOT or path.startswith(f"{ROOT}.") for path in named):
        return labels
    return [
        label if _CLASS.fullmatch(label.path) else replace(label, path=label.path[len(ROOT) + 1 :])
        for label in labels
    ]


def label_of(key: Key) -> str:
    """The label that a print hook gives to what a key names; a bare key, or a probe's, is one itself.

    Example:
        >>> label_of(Key("layers.3.mlp", "input.hidden_states", call=1))
        'model.layers.3.mlp(2)-input_hidden_states'
        >>> label_of(Key("@root", "output.logits"))
        'model-output_logits'
    """
    if key.is_bare:
        return unescape(key.site)
    module, colon, point = key.site.partition(":")
    call = f"({key.call + 1})" if key.call else ""
    if module == PROBES and colon and not call and key.slot == "value":
        return unescape(point)
    path = ROOT if module == ROOT_SITE else f"{ROOT}.{unescape(module)}"
    if colon:
        path += f":{unescape(point)}"
    kind, _, fields = unescape(key.slot).partition(".")
    numbers = fields.replace(".", "_")
    slot = f"_{numbers if _NUMBERS.fullmatch(numbers) else fields}" if fields else ""
    return f"{path}{call}-{kind}{slot}"
