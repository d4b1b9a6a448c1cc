"""Ports to NxD Inference: run on CPUs, and captured on a Neuron device; nothing of Neuron is imported.

Read `adapter`, `model` (an application and the module in it) and `processes` (the process group) for CPUs;
the rest is as for torch, whose `parallel_layers` says what a rank's tensors are parts of. Who runs ports
within a longer process ends their group with `leave_ranks`. `capture_hook` is for a device: NxDI hands it the
tensors that its compiled graph has as extra outputs, and it writes them into an archive; not run on a device.
"""

from tensorcap.adapters.neuron.capture_hook import TensorCaptureHook, tensor_capture_hook
from tensorcap.adapters.neuron.processes import leave_ranks

__all__ = ["TensorCaptureHook", "leave_ranks", "tensor_capture_hook"]
