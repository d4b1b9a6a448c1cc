"""Make one call of a torch module again, on the target's arguments and results of calls within.

The workload runs once until the call. Afterwards the module alone is called, any number of times: calls
within it return what they returned then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.edits import Argument, CallMutation, Edit, OfModel, Operation, Replaced
from tensorcap.adapters.protocol import further_names
from tensorcap.adapters.torch.call_inputs import CallInputs, Inputs
from tensorcap.adapters.torch.capture_gaps import layers_in_parts
from tensorcap.adapters.torch.injector import inject
from tensorcap.adapters.torch.low_precision import RoundedOperations
from tensorcap.adapters.torch.module_mutations import (
    TensorSlot,
    apply_edit,
    find_settings,
    mutate_module,
    with_forward,
)
from tensorcap.adapters.torch.modules import argument_names, tree
from tensorcap.adapters.torch.operation_mutator import Call as OperationCall
from tensorcap.adapters.torch.operation_mutator import OperationMutator
from tensorcap.adapters.torch.recurrent import VARIANTS, write_out
from tensorcap.adapters.torch.tensor_leaves import KINDS
from tensorcap.adapters.torch.tensors import equal_values, is_dense
from tensorcap.recording import Call, Point, Substitution, argument_slots, leaf_slot, rebuild, walk
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key, module_site

Forward = Callable[..., Any]


class _CallIsOver(BaseException):
    """Ends a run of the workload: the call was made."""


class ModuleRerun:
    """One call of a torch module, as `Rerun` defines it; `find_call` comes before all else."""

    def __init__(self, model: nn.Module, substitution: Substitution, site: str, key: Key) -> None:
        """Prepare to find the call.

        Args:
            model: The model.
            substitution: Arguments and results of the target's calls.
            site: The module whose call it is.
            key: The tensor that its code makes: a result of its own, an argument of a call within it, or the
                result of such a call, which is then made and not replaced.
        """
        modules, aliases = tree(model)
        further = further_names(aliases)
        sites = {name: tuple(map(module_site, (name, *further.get(name, ())))) for name in modules}
        substitution.bind({own: others for own, *others in sites.values()})
        own = next(name for name, known in sites.items() if site in known)
        self.site = site
        self._is_own_result = key.slot.startswith("output") and key.site in sites[own]
        self._module = modules[own]
        self._sites = {id(module): sites[name] for name, module in modules.items()}
        prefix = f"{own}." if own else ""
        self._within = {
            n.removeprefix(prefix): m for n, m in modules.items() if n != own and n.startswith(prefix)
        }
        self._model, self._substitution, self._key = model, substitution, key
        self._place = (key.step or 0, key.call)  # of the call, as far as its tensors say
        signatures: dict[Any, list[str]] = {}
        self._argument_names = {
            id(module): argument_names(module, signatures)
            for module in (self._module, *self._within.values())
        }
        self._step = -1  # of the run: counts calls of the model
        self._calls: dict[int, int] = {}  # by module: calls in this step
        self._depth = 0  # 1 within the call, 2 within a call within it
        self._returned: dict[int, list[tuple[int, Any]]] = {}  # by module: numbers of calls, results
        self._replaced: set[int] = set()  # modules of which the target has results
        self._kept_slots: dict[int, frozenset[str]] = {}  # of leaves of which it has some results
        self._given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # to recurrent layers within
        self._attributes: Mapping[str, Any] = {}  # those that the call changes, as they were before it
        self._order: dict[int, int] = {}  # by module: place among the calls within
        self._tensor: torch.Tensor | None = None  # the one of the key
        self._mutator = OperationMutator(CallMutation())
        self._listed: Mapping[str, OperationCall] = {}  # operations of a call without mutations
        self._inputs = CallInputs()

    @property
    def class_name(self) -> str:
        """The module's class."""
        return type(self._module).__name__

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Those of the module itself, and of modules within it whose own code did not run."""
        return {name: tuple(slot.registry[slot.name].shape) for name, slot in self._slots.items()}

    def read_tensor(self, name: str) -> Array:
        """Values of one of them."""
        slot = self._slots[name]
        return slot.registry[slot.name].detach().cpu().double().numpy()  # type: ignore[no-any-return]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Attributes, and entries of the configuration, whose names the code of its class has.

        Behind them those of modules within of which the target has no result, as `NAME.SETTING`; of a module
        of torch's own its numbers that are not whole, as an eps.
        """
        if isinstance(self._module, nn.RNNBase):  # its kernel would run on whatever it is told
            return self._variants if self._written_out(self._module) else {}
        values = dict(find_settings(self._module))
        for name, module in self._within.items():
            if id(module) in self._replaced or isinstance(module, nn.RNNBase):
                continue
            is_of_torch = type(module).__module__.startswith("torch.")
            values |= {
                f"{name}.{own}": value
                for own, value in find_settings(module).items()
                if not is_of_torch or type(value) is float
            }
        return values if self._is_on_cpu() else {n: v for n, v in values.items() if type(v) is not int}

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """Those that are tensors themselves, and those within tuples and mappings."""
        args, kwargs = self._inputs.kept
        return {
            f"{slot}.{leaf.name}" if leaf.name else slot: self._describe_argument(leaf.value)
            for slot, value in self._name_slots(self._module, args, kwargs)
            for leaf in walk(value, KINDS)
            if isinstance(leaf.value, torch.Tensor)
        }

    @property
    def results(self) -> Mapping[str, tuple[int, ...]]:
        """Those of modules that return one tensor of floats."""
        shapes = {}
        for name, module in self._within.items():
            calls = self._returned.get(id(module), [])
            if calls and isinstance(calls[0][1], torch.Tensor) and calls[0][1].is_floating_point():
                shapes[name] = self._order[id(module)], tuple(calls[0][1].shape)
        return {name: shape for name, (_, shape) in sorted(shapes.items(), key=lambda item: item[1][0])}

    @property
    def operations(self) -> Mapping[str, Operation]:
        """Those of its own code in the last call, if that was one without mutations of operations."""
        operations = self._mutator.operations
        if self._is_on_cpu():
            return operations
        return {
            key: replace(one, numbers={n: v for n, v in one.numbers.items() if type(v) is not int})
            for key, one in operations.items()
        }

    @property
    def operation_count(self) -> int:
        """How many operations its code did in the last call that was one without mutations of them."""
        return self._mutator.count

    def find_call(self, run: Callable[[], None]) -> bool:
        """Run the workload until the call is over.

        If the target has no argument of the call, other modules return what the target's returned, of which
        the arguments are then made.

        Args:
            run: Runs it once.

        Returns:
            Whether the call was made.
        """
        forwards: dict[int, tuple[nn.Module, Callable[[nn.Module, Forward], Forward]]] = {
            id(module): (module, self._wrap_inner) for module in self._within.values()
        }
        forwards[id(self._module)] = self._module, self._wrap_own
        if not self._substitution.planned(self._sites[id(self._module)][0], *self._place, "input"):
            outside = (m for m in self._model.modules() if id(m) not in forwards and m is not self._model)
            bound = [m for m in outside if self._substitution.binds(self._sites[id(m)][0])]
            forwards |= {id(module): (module, self._wrap_outer) for module in bound}
        with ExitStack() as stack:
            stack.enter_context(layers_in_parts(self._model.modules()))
            stack.callback(self._model.register_forward_pre_hook(self._count_step).remove)
            for module, wrap in forwards.values():
                stack.enter_context(with_forward(module, wrap(module, module.forward)))
            try:
                run()
            except _CallIsOver:
                return True
        return False

    def run(self, mutation: CallMutation) -> Array | None:
        """Call the module again.

        1. Calls within it return what the target's returned, or what the mutation says; those that the target
           does not make, as of a dropout, are made, and all if the mutation wants that.
        2. Tensors and settings are mutated, then arguments; operations while the code runs.
        3. The call ends with the tensor of the key, or with its result.
        4. Attributes that the call changes, as a state that it leaves to the next, are as before it.
        """
        self._tensor = None
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(layers_in_parts((self._module, *self._within.values())))
            stack.enter_context(_with_attributes(self._module, {**self._variants, **self._attributes}))
            for module in (self._module, *self._within.values()):
                forward = self._written_out(module)
                if forward is not None:
                    stack.enter_context(with_forward(module, forward))
            for name, module in self._within.items():
                if id(module) in self._returned and not mutation.makes_calls_within:
                    stack.enter_context(
                        with_forward(module, self._stub(name, module, mutation.results.get(name)))
                    )
            self._calls = {}
            try:
                slots = self._slots
                tensors = {n: self._taken(edit, slots[n]) for n, edit in mutation.tensors.items()}
                stack.enter_context(mutate_module(self._module, slots, replace(mutation, tensors=tensors)))
                args, kwargs = self._edit_inputs(mutation.arguments)
                rounded = None
                if mutation.steps:
                    rounded = RoundedOperations(mutation.steps, is_in_turn=mutation.is_in_turn)
                self._mutator = OperationMutator(mutation, rounded, self._listed)
                if self._mutator.is_needed:
                    stack.enter_context(self._mutator)
                    self._note_inputs(args, kwargs)
                    args, kwargs = self._with_leaves(args, kwargs, self._mutator.finish)
                result = self._module(*args, **kwargs)
                if self._is_own_result:
                    self._take("output", result)
            except _CallIsOver:
                pass
            except Exception:  # whatever a mutated module may run into
                return None
        if mutation == CallMutation():
            self._listed = self._mutator.calls
        return None if self._tensor is None else self._tensor.cpu().double().numpy()

    def _taken(self, edit: Edit, slot: TensorSlot) -> Edit:
        """An edit with the values of another module's tensor, if it is one that takes these."""
        if not isinstance(edit, OfModel):
            return edit
        site, _, name = edit.name.rpartition(".")
        other = self._model.get_submodule(site)
        tensor = other._parameters.get(name, other._buffers.get(name))
        if tensor is None or tensor.shape != slot.registry[slot.name].shape:
            raise KeyError(edit.name)
        return Replaced(tensor.detach().cpu().double().numpy())

    @property
    def alike(self) -> Sequence[Mapping[str, str]]:
        """Modules of the same class elsewhere, the nearest first: names of their tensors, by the own ones."""
        owners: dict[str, list[str]] = {}
        for name in self._slots:
            path, _, own = name.rpartition(".")
            owners.setdefault(path, []).append(own)
        modules = dict(self._model.named_modules())
        order = {name: at for at, name in enumerate(modules)}
        found: list[tuple[int, Mapping[str, str]]] = []
        for path, names in owners.items():
            mine = self._within[path] if path else self._module
            at = next((order[n] for n, module in modules.items() if module is mine), 0)
            for site, module in modules.items():
                if module is mine or type(module) is not type(mine) or not _are_alike(mine, module, names):
                    continue
                own_names = {f"{path}.{n}" if path else n: f"{site}.{n}" for n in names}
                found.append((abs(order[site] - at), own_names))
        return [names for _, names in sorted(found, key=lambda one: one[0])]

    def settings_of(self, site: str) -> Mapping[str, Any]:
        """Settings of another module of the same class, as `settings` has the module's own."""
        others = (m for m in self._model.modules() if site in self._sites.get(id(m), ()))
        other = next(others, None)
        return find_settings(other) if other is not None and type(other) is type(self._module) else {}

    @property
    def _variants(self) -> Mapping[str, Any]:
        """Other ways to compute what a recurrent layer does, which its class has no attribute for."""
        return VARIANTS if isinstance(self._module, nn.GRU) else {}

    def _written_out(self, module: nn.Module) -> Forward | None:
        """The steps of a recurrent layer whose own code ran, on what it was given; None of any other module.

        A layer within the module was given something of the same length.
        """
        if not isinstance(module, nn.RNNBase) or id(module) in self._replaced:
            return None
        inputs = self._inputs.kept if module is self._module else self._given.get(id(module))
        return None if inputs is None else write_out(module, *inputs)

    def _note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name tensors that operations may be given in the place of others: arguments, own parameters."""
        for slot, value in self._name_slots(self._module, args, kwargs):
            for leaf in walk(value, KINDS):
                self._mutator.note(f"{slot}.{leaf.name}" if leaf.name else slot, leaf.value)
        for name, tensor_slot in self._slots.items():
            self._mutator.note(name, tensor_slot.registry[tensor_slot.name])

    def _describe_argument(self, tensor: torch.Tensor) -> Argument:
        shape = tuple(tensor.shape)
        if tensor.is_floating_point():
            return Argument("float", shape)
        if tensor.dtype == torch.bool or not self._is_on_cpu():
            return Argument("other", shape)
        if not tensor.numel():
            return Argument("int", shape)
        return Argument("int", shape, int(tensor.min()), int(tensor.max()))

    def _is_on_cpu(self) -> bool:
        """Whether whole numbers may change: an index out of range spoils other devices for the process."""
        tensors = [slot.registry[slot.name] for slot in self._slots.values()]
        inputs = [
            leaf.value for leaf in walk(self._inputs.kept, KINDS) if isinstance(leaf.value, torch.Tensor)
        ]
        return all(tensor.device.type == "cpu" for tensor in (*tensors, *inputs))

    def _count_step(self, *_: Any) -> None:
        self._step += 1
        self._calls = {}

    def _wrap_own(self, module: nn.Module, forward: Forward) -> Forward:
        """Wrap the module's own `forward`: the call in question is given what the target's was given."""

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._count_call(module)
            is_result = self._is_own_result
            if self._step != self._key.step or (is_result and number != self._key.call):
                return forward(*args, **kwargs)
            slots = [slot for slot, _ in self._name_slots(module, args, kwargs)]
            values = self._inject(module, number, "input", slots, [*args, *kwargs.values()])
            args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
            self._inputs, self._returned, self._depth = CallInputs(args, kwargs), {}, 1
            self._replaced, self._kept_slots = set(), {}
            before = _read_attributes(self._module)
            try:
                result = forward(*args, **kwargs)
            finally:
                self._depth = 0
                after = vars(self._module)
                self._attributes = {k: v for k, v in before.items() if after.get(k) is not v}
            if is_result or self._tensor is not None:
                raise _CallIsOver
            return self._inject(module, number, "output", ["output"], [result])[0]

        return call

    def _wrap_outer(self, module: nn.Module, forward: Forward) -> Forward:
        """Wrap `forward` of a module elsewhere: it returns what the target's returned."""

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._count_call(module)
            result = forward(*args, **kwargs)
            return self._inject(module, number, "output", ["output"], [result])[0]

        return call

    def _wrap_inner(self, module: nn.Module, forward: Forward) -> Forward:
        """Wrap `forward` of a module within: it returns what the target's returned, which is kept.

        The code of one of which the target has no result counts as the module's own; so does that of one
        without modules within of which the target has some results alone, as the scores of a router.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._count_call(module)
            if self._depth != 1:
                return forward(*args, **kwargs)
            if isinstance(module, nn.RNNBase):
                self._given[id(module)] = args, kwargs
            is_of_key = number == self._key.call and self._key.site in self._sites[id(module)]
            if is_of_key and self._key.slot.startswith("output"):
                result = forward(*args, **kwargs)
                self._take("output", result)
                self._order.setdefault(id(module), len(self._order))
                self._returned.setdefault(id(module), []).append((number, _copy(result)))
                return self._inject(module, number, "output", ["output"], [result])[0]
            if is_of_key:
                for slot, value in self._name_slots(module, args, kwargs):
                    self._take(slot, value)
            planned = self._substitution.planned(self._sites[id(module)][0], self._step, number, "output")
            if planned:
                self._replaced.add(id(module))
                self._depth = 2
            try:
                result = forward(*args, **kwargs)
            finally:
                self._depth = 1
            if (
                planned
                and not any(module.children())
                and any(s not in planned for s in _tensor_slots(result))
            ):
                self._replaced.discard(id(module))
                self._kept_slots[id(module)] = frozenset(planned)
            result = self._inject(module, number, "output", ["output"], [result])[0]
            self._order.setdefault(id(module), len(self._order))
            self._returned.setdefault(id(module), []).append((number, _copy(result)))
            return result

        return call

    def _edit_inputs(self, edits: Mapping[str, Edit | str]) -> Inputs:
        """Give the inputs of the call again, with some tensors of them edited."""
        args, kwargs = self._inputs.give()
        if not edits:
            return args, kwargs
        leaves = {
            f"{slot}.{leaf.name}" if leaf.name else slot: leaf.value
            for slot, value in self._name_slots(self._module, args, kwargs)
            for leaf in walk(value, KINDS)
        }

        def edit_leaf(name: str, tensor: Any) -> Any:
            edit = edits.get(name)
            if isinstance(edit, str):
                return leaves[edit].clone()
            return tensor if edit is None else apply_edit(tensor, edit)

        args, kwargs = self._with_leaves(args, kwargs, edit_leaf)
        for name, edit in edits.items():
            own = name.removeprefix("input.")
            if isinstance(edit, Replaced) and own in kwargs and kwargs[own] is None:
                kwargs[own] = self._as_argument(edit.values)
        return args, kwargs

    def _as_argument(self, values: Array) -> torch.Tensor:
        """A tensor for an argument that is none; floats in the dtype of the first argument of floats."""
        leaves = [leaf.value for leaf in walk(self._inputs.kept, KINDS)]
        floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        tensor = torch.from_numpy(values)
        return tensor.to(floats[0]) if floats and tensor.is_floating_point() else tensor

    def _with_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[str, Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change tensors among arguments, each by its name."""

        def changed(slot: str, value: Any) -> Any:
            return rebuild(
                value, KINDS, lambda name, tensor: change(f"{slot}.{name}" if name else slot, tensor)
            )

        values = [changed(slot, value) for slot, value in self._name_slots(self._module, args, kwargs)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _stub(self, name: str, module: nn.Module, other: Edit | str | None) -> Forward:
        """Make a `forward` that returns what was returned then, or that edited, or another call's result.

        One of which the target has no result runs, on what it is given now.
        """
        own, forward = self._returned[id(module)], module.forward
        results = self._returned[id(self._within[other])] if isinstance(other, str) else own

        def call(*args: Any, **kwargs: Any) -> Any:
            at = self._count_call(module)
            number, (_, result) = own[at][0], results[at]
            is_of_key = number == self._key.call and self._key.site in self._sites[id(module)]
            if is_of_key:
                for slot, value in self._name_slots(module, args, kwargs):
                    self._take(slot, value)
                if self._tensor is not None:
                    raise _CallIsOver
            if id(module) not in self._replaced and not isinstance(other, str):
                mutator = self._mutator
                mutator.within.append(name)
                try:
                    result = forward(*args, **kwargs)
                finally:
                    mutator.within.pop()
                result = self._with_kept(module, result, own[at][1])
            if is_of_key and self._key.slot.startswith("output"):
                self._take("output", result)
                raise _CallIsOver
            result = apply_edit(result, other) if isinstance(other, Edit) else _copy(result)
            self._mutator.note(name, result)
            return self._mutator.finish(name, result)

        return call

    def _with_kept(self, module: nn.Module, result: Any, kept: Any) -> Any:
        """What a module returns now, with the results in it that the target has as they were returned."""
        slots = self._kept_slots.get(id(module))
        if not slots:
            return result
        before = {leaf.name: leaf.value for leaf in walk(kept, KINDS)}
        return rebuild(
            result,
            KINDS,
            lambda name, tensor: before.get(name, tensor) if leaf_slot("output", name) in slots else tensor,
        )

    def _take(self, slot: str, value: Any) -> None:
        """Keep a copy of the tensor of the key, if it is in this slot."""
        for leaf in walk(value, KINDS):
            if leaf_slot(slot, leaf.name) == self._key.slot and isinstance(leaf.value, torch.Tensor):
                self._tensor = leaf.value.detach().clone()

    def _count_call(self, module: nn.Module) -> int:
        """Count a call of a module; its number within the step."""
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        return number

    def _inject(
        self, module: nn.Module, number: int, kind: Any, slots: list[str], values: list[Any]
    ) -> list[Any]:
        call = Call(Point(self._sites[id(module)][0]), self._step, number)
        return inject(self._substitution, call, kind, slots, values)

    def _name_slots(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Name the slot of each argument of a call."""
        slots = argument_slots(self._argument_names[id(module)], len(args), kwargs)
        return zip(slots, (*args, *kwargs.values()), strict=True)

    @cached_property
    def _slots(self) -> Mapping[str, TensorSlot]:
        """Dense floats of parameters and buffers, which may be mutated; known when the call was found."""
        slots: dict[str, TensorSlot] = {}
        for path, module in {"": self._module, **self._within}.items():
            if path and id(module) in self._replaced:
                continue
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None and tensor.is_floating_point() and is_dense(tensor):
                        slots[f"{path}.{name}" if path else name] = TensorSlot(registry, name)
        return slots


def _are_alike(one: nn.Module, other: nn.Module, names: Sequence[str]) -> bool:
    """Whether two modules have tensors of these names, of the same shapes and of other values."""
    are_same = True
    for name in names:
        is_buffer = name not in one._parameters
        mine, theirs = (
            module._buffers.get(name) if is_buffer else module._parameters.get(name)
            for module in (one, other)
        )
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return False
        are_same &= equal_values(mine, theirs)
    return not are_same


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """Read the plain attributes of a module; `forward` is replaced and put back elsewhere."""
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "forward"}


@contextmanager
def _with_attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Give a module attributes within a block; afterwards it has those that it had."""
    before = _read_attributes(module)
    vars(module).update(values)
    try:
        yield
    finally:
        for name in _read_attributes(module).keys() - before.keys():
            del vars(module)[name]
        vars(module).update(before)


def _tensor_slots(result: Any) -> Iterator[str]:
    """The slots of the tensors that a call returns."""
    for leaf in walk(result, KINDS):
        if isinstance(leaf.value, torch.Tensor):
            yield leaf_slot("output", leaf.name)


def _copy(value: Any) -> Any:
    """Copy a value of a call, its tensors too."""
    return rebuild(
        value, KINDS, lambda _, tensor: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
    )
