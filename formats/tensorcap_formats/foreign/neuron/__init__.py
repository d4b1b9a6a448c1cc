"""Folders that NxDI, its tools and vllm-neuron write on a device, read without any of them.

A folder goes in, a `NeuronArchive` comes out, whose keys have steps, phases and ranks. Read `archive`, then
one kind at a time: `captures` (also of Hugging Face's model in eager mode), `saved_inputs` and `snapshots`
of NxDI; `rank_tree` and `call_snapshots` of vllm-neuron. Layouts are those of sources and documents; nothing
was tried with files of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tensorcap_formats.foreign.neuron.archive import NeuronArchive
from tensorcap_formats.foreign.neuron.call_snapshots import is_call_folder, open_calls
from tensorcap_formats.foreign.neuron.captures import is_capture_folder, open_captures
from tensorcap_formats.foreign.neuron.rank_tree import is_rank_tree, open_rank_tree
from tensorcap_formats.foreign.neuron.saved_inputs import is_saved_inputs_folder, open_saved_inputs
from tensorcap_formats.foreign.neuron.snapshots import is_snapshot_folder, open_snapshots

__all__ = ["NeuronArchive", "neuron_opener"]


def neuron_opener(path: Path, names: list[str]) -> Callable[[Path], NeuronArchive] | None:
    """What opens a folder with these names in it; None if it is none of Neuron's."""
    if is_capture_folder(names):
        return open_captures
    if is_saved_inputs_folder(names):
        return open_saved_inputs
    if is_rank_tree(path, names):
        return open_rank_tree
    if is_snapshot_folder(path, names):
        return open_snapshots
    if is_call_folder(path, names):
        return open_calls
    return None
