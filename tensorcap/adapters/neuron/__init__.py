"""Ports to NxD Inference: run on CPUs, and captured on a Neuron device; nothing of Neuron is imported.

Read `adapter`, `model` (an application and the module in it) and `processes` (the process group) for CPUs;
the rest is as for torch, whose `parallel_layers` says what a rank's tensors are parts of. Who runs ports
within a longer process ends their group with `leave_ranks`. `sources` finds those of NxD Inference, and
`stand_ins` answers for the runtime that they import. `capture_hook` is for a device: NxDI hands it the
tensors that its compiled graph has as extra outputs, and it writes them into an archive; not run on a device.
"""

from tensorcap.adapters.neuron.capture_hook import TensorCaptureHook, tensor_capture_hook
from tensorcap.adapters.neuron.processes import leave_ranks
from tensorcap.adapters.neuron.sources import explain_import_error, use_neuron_sources
from tensorcap.adapters.neuron.stand_ins import StandInCall, stand_in_calls

__all__ = [
    "StandInCall",
    "TensorCaptureHook",
    "explain_import_error",
    "leave_ranks",
    "stand_in_calls",
    "tensor_capture_hook",
    "use_neuron_sources",
]
