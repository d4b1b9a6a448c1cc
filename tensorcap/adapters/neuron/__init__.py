"""Runs of NxD Inference on a Neuron device; nothing of Neuron is imported.

Read `capture_hook`: NxDI hands it the tensors that its compiled graph has as extra outputs, and it writes
them into an archive. Not run on a device.
"""

from tensorcap.adapters.neuron.capture_hook import TensorCaptureHook, tensor_capture_hook

__all__ = ["TensorCaptureHook", "tensor_capture_hook"]
