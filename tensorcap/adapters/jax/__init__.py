"""The adapter of JAX: Flax modules (NNX and Linen) and plain functions.

Read `adapter` (the protocol's methods), `model` and `runs` (how a model is called), `modules`, `variables`
(parameters and other state), `tensors` and `description`; then the capture: `call_tracer` (calls of modules
and probes, as JAX traces or runs them), `flax_hooks` (which report these calls) and `event_recorder` (what
compiled code hands over while it runs).
"""
