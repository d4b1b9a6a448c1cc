"""The adapter of Modular MAX: models of `max.nn`, and programs that make graphs of them.

Read `adapter` (the protocol's methods), `model`, `modules`, `parameters`, `model_inputs`, `description`,
`tensors` and `engine` (names that differ between releases); then the capture: `tap` (runs of a model),
`graph_plan`, `graph_builder`, `hooks` and `trace` with `trace_events` (the instrumented graph), `playback`
(one run of it recorded), `foreign_program` (graphs that a program makes itself). `injector` replaces values;
`roots` finds the model of a program. `pipeline` makes a model of MAX's own architecture for a Hugging Face
model, by `pipeline_graph` (the graph that a pipeline would have compiled).
"""
