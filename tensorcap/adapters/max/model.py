"""The MAX model of a workload: a module and the settings of its graphs. Imports MAX only when it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from tensorcap.adapters.max.graph_plan import CompileCache, GraphSource


@dataclass(eq=False)
class MaxModel(GraphSource):
    """A `max.nn` module and the settings of its graphs; a call runs it on arrays.

    A module alone can be the model of a `Workload` too, if its weights were loaded (`load_state_dict`): its
    graph is then for the shapes of the inputs, on the CPU. Arguments may be numpy arrays, MAX buffers, arrays
    of other frameworks (DLPack), or structures of them; other leaves are constants of the graph. Graphs are
    compiled when they are needed and kept as long as the module. A workload's own `run` is given a `MaxModel`
    in either case, and calls it.

    Attributes:
        module: The module.
        input_types: The type of each array among the arguments, in their order or by name, for symbolic
            dimensions and other devices; if empty, those of the arrays.
        weights: Weights by their full names, in the place of those that the module has loaded.
        devices: The devices that the session runs on; the CPU if empty.
        forward: The function to trace in the place of the module's own call: `forward(module, *inputs)`.
        control: Whether a capture runs the model once more without taps, to report what the taps change.
        extensions: Custom kernels, as `InferenceSession.compile` takes them.
        keeps_state: Whether what a run writes to its inputs of a buffer type, such as a cache, is there in
            the next run; if not, each run is given copies of them.
        left_out_weights: Names of weights of the checkpoint that the model is made without, for the metadata.

    Example:
        >>> MaxModel(module=None, input_types=["…"]).control
        True
    """

    tensorcap_framework: ClassVar = "max"

    @classmethod
    def of(cls, model: Any) -> MaxModel:
        """The model itself; of a module, a model with the graphs that were compiled of it before."""
        if isinstance(model, cls):
            return model
        return cls(model, compiled=_COMPILED.setdefault(model, CompileCache()))

    def with_weights(self, weights: Mapping[str, Any]) -> MaxModel:
        """The same model with other weights, which shares its compiled graphs.

        Args:
            weights: All weights by their full names; as in `module.state_dict()`.
        """
        return replace(self, weights=weights, compiled=replace(self.compiled, tapped_run=None))

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the model.

        Returns:
            Its outputs as MAX buffers, flattened, as `max.engine.Model.execute` returns them.
        """
        from tensorcap.adapters.max.tap import run

        return run(self, args, kwargs)


_COMPILED: WeakKeyDictionary[Any, CompileCache] = WeakKeyDictionary()
