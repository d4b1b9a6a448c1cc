"""One call of a torch module, to be made again: with the target's arguments, and its results of calls within.

The workload runs once until the call. Afterwards the module alone is called, as often as one likes: calls
within it return what they returned then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.edits import Argument, CallMutation, Edit, Operation
from tensorcap.adapters.torch.description import tree
from tensorcap.adapters.torch.low_precision import Steps
from tensorcap.adapters.torch.mutations import Altering, Held, changed, edited, settings, with_forward
from tensorcap.adapters.torch.substitution import Exchange
from tensorcap.adapters.torch.tap import argument_names
from tensorcap.adapters.torch.tensor_leaves import KINDS
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Call
from tensorcap.recording.structure import rebuilt, walk
from tensorcap.recording.substitution import Substitution
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key, escape, module_site

Forward = Callable[..., Any]


class _Enough(BaseException):
    """Ends a run: what it was for is there."""


class ModuleRerun:
    """One call of a module.

    Attributes:
        operations: What its own code did when it was called last.
    """

    def __init__(self, model: nn.Module, substitution: Substitution, site: str, key: Key) -> None:
        """Prepare to find the call.

        Args:
            model: The model.
            substitution: What the target's calls were given and returned.
            site: The module whose call it is.
            key: The tensor that its code makes: a result of its own, or an argument of a call within it.
        """
        modules, aliases = tree(model)
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(module_site(alias))
        names = {name: (module_site(name), *further.get(name, ())) for name in modules}
        substitution.bind({own: others for own, *others in names.values()})
        own = next(name for name, known in names.items() if site in known)
        self._module = modules[own]
        self._names = {id(module): names[name] for name, module in modules.items()}
        prefix = f"{own}." if own else ""
        self._within = {
            n.removeprefix(prefix): m for n, m in modules.items() if n != own and n.startswith(prefix)
        }
        self._model, self._exchange, self._key = model, Exchange(substitution), key
        signatures: dict[Any, list[str]] = {}
        self._arguments = {
            id(module): argument_names(module, signatures)
            for module in (self._module, *self._within.values())
        }
        self._step = -1
        self._calls: dict[int, int] = {}
        self._depth = 0
        self._returned: dict[int, list[tuple[int, Any]]] = {}  # by module: numbers of calls, results
        self._order: dict[int, int] = {}
        self._found: torch.Tensor | None = None
        self.operations: Mapping[str, Operation] = {}
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def class_name(self) -> str:
        """The module's class."""
        return type(self._module).__name__

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Those of the module itself, and of modules within it whose own code did not run."""
        return {name: tuple(holder[own].shape) for name, (holder, own) in self._tensors().items()}

    @property
    def settings(self) -> Mapping[str, Any]:
        """Attributes, and entries of the configuration, whose names the code of its class has."""
        found = settings(self._module)
        return found if self._is_on_cpu() else {n: v for n, v in found.items() if type(v) is not int}

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """Those that are tensors themselves, and those within tuples and mappings."""
        args, kwargs = self._given
        return {
            f"{slot}.{leaf.name}" if leaf.name else slot: self._argument(leaf.value)
            for slot, value in self._named(self._module, args, kwargs)
            for leaf in walk(value, KINDS)
            if isinstance(leaf.value, torch.Tensor)
        }

    @property
    def results(self) -> Mapping[str, tuple[int, ...]]:
        """Those of modules that return one tensor of floats."""
        found = {}
        for name, module in self._within.items():
            kept = self._returned.get(id(module), [])
            if kept and isinstance(kept[0][1], torch.Tensor) and kept[0][1].is_floating_point():
                found[name] = self._order[id(module)], tuple(kept[0][1].shape)
        return {name: shape for name, (_, shape) in sorted(found.items(), key=lambda item: item[1][0])}

    def find(self, run: Callable[[], None]) -> bool:
        """Run the workload until the call is over; whether it came.

        Args:
            run: Runs it once.
        """
        forwards: dict[int, tuple[nn.Module, Callable[[nn.Module, Forward], Forward]]] = {
            id(module): (module, self._inner) for module in self._within.values()
        }
        forwards[id(self._module)] = self._module, self._outer
        with ExitStack() as stack:
            stack.callback(self._model.register_forward_pre_hook(self._count_step).remove)
            for module, wrap in forwards.values():
                stack.enter_context(with_forward(module, wrap(module, module.forward)))
            try:
                run()
            except _Enough:
                return True
        return False

    def made(self, change: CallMutation) -> Array | None:
        """Call the module again."""
        self._found = None
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for name, module in self._within.items():
                if id(module) in self._returned:
                    stack.enter_context(with_forward(module, self._stub(module, change.results.get(name))))
            self._calls = {}
            try:
                stack.enter_context(changed(self._module, self._tensors(), change))
                args, kwargs = self._with_arguments(change.arguments)
                steps = Steps(change.steps, is_in_turn=change.is_in_turn) if change.steps else None
                altering = stack.enter_context(Altering(change.operations, steps))
                self.operations = altering.operations
                result = self._module(*args, **kwargs)
                if self._key.slot.startswith("output"):
                    self._take("output", result)
            except _Enough:
                pass
            except Exception:  # whatever a changed module may run into
                return None
        return None if self._found is None else self._found.cpu().double().numpy()

    def _argument(self, tensor: torch.Tensor) -> Argument:
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
        held = [holder[name] for holder, name in self._tensors().values()]
        given = [leaf.value for leaf in walk(self._given, KINDS) if isinstance(leaf.value, torch.Tensor)]
        return all(tensor.device.type == "cpu" for tensor in (*held, *given))

    def _count_step(self, *_: Any) -> None:
        self._step += 1
        self._calls = {}

    def _outer(self, module: nn.Module, forward: Forward) -> Forward:
        """The module's own calls: the right one is given what the target's was given."""

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._number(module)
            is_result = self._key.slot.startswith("output")
            if self._step != self._key.step or (is_result and number != self._key.call):
                return forward(*args, **kwargs)
            slots = [slot for slot, _ in self._named(module, args, kwargs)]
            values = self._exchanged(module, number, "input", slots, [*args, *kwargs.values()])
            args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
            self._given, self._returned, self._depth = copy.deepcopy((args, kwargs)), {}, 1
            try:
                result = forward(*args, **kwargs)
            finally:
                self._depth = 0
            if is_result or self._found is not None:
                raise _Enough
            return self._exchanged(module, number, "output", ["output"], [result])[0]

        return call

    def _inner(self, module: nn.Module, forward: Forward) -> Forward:
        """Calls within it: they return what the target's did, which is kept."""

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._number(module)
            if self._depth != 1:
                return forward(*args, **kwargs)
            if number == self._key.call and self._key.site in self._names[id(module)]:
                for slot, value in self._named(module, args, kwargs):
                    self._take(slot, value)
            self._depth = 2
            try:
                result = forward(*args, **kwargs)
            finally:
                self._depth = 1
            result = self._exchanged(module, number, "output", ["output"], [result])[0]
            self._order.setdefault(id(module), len(self._order))
            self._returned.setdefault(id(module), []).append((number, _copied(result)))
            return result

        return call

    def _with_arguments(self, edits: Mapping[str, Edit]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of what the call is given."""
        args, kwargs = copy.deepcopy(self._given)
        if not edits:
            return args, kwargs

        def with_edits(slot: str, value: Any) -> Any:
            def change(name: str, tensor: Any) -> Any:
                edit = edits.get(f"{slot}.{name}" if name else slot)
                return tensor if edit is None else edited(tensor, edit)

            return rebuilt(value, KINDS, change)

        values = [with_edits(slot, value) for slot, value in self._named(self._module, args, kwargs)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _stub(self, module: nn.Module, other: Edit | str | None) -> Forward:
        """A call within it, which returns what it did, or what becomes of that, or what another did."""
        own = self._returned[id(module)]
        kept = self._returned[id(self._within[other])] if isinstance(other, str) else own

        def call(*args: Any, **kwargs: Any) -> Any:
            at = self._number(module)
            number, (_, result) = own[at][0], kept[at]
            if number == self._key.call and self._key.site in self._names[id(module)]:
                for slot, value in self._named(module, args, kwargs):
                    self._take(slot, value)
                if self._found is not None:
                    raise _Enough
            return edited(result, other) if isinstance(other, Edit) else _copied(result)

        return call

    def _take(self, slot: str, value: Any) -> None:
        for leaf in walk(value, KINDS):
            name = f"{slot}.{escape(leaf.name)}" if leaf.name else slot
            if name == self._key.slot and isinstance(leaf.value, torch.Tensor):
                self._found = leaf.value.detach().clone()

    def _number(self, module: nn.Module) -> int:
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        return number

    def _exchanged(
        self, module: nn.Module, number: int, kind: Any, slots: list[str], values: list[Any]
    ) -> list[Any]:
        call = Call(Point(self._names[id(module)][0]), self._step, number)
        return self._exchange.values(call, kind, slots, values)

    def _named(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        names = self._arguments[id(module)]
        for i, value in enumerate(args):
            yield f"input.{escape(names[i]) if i < len(names) else f'args.{i - len(names)}'}", value
        for name, value in kwargs.items():
            yield f"input.{escape(name)}", value

    def _tensors(self) -> dict[str, Held]:
        """What may be changed: by name, what holds it and its name there."""
        found: dict[str, Held] = {}
        for path, module in {"": self._module, **self._within}.items():
            if path and id(module) in self._returned:
                continue
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None and tensor.is_floating_point():
                        found[f"{path}.{name}" if path else name] = (holder, name)
        return found


def _copied(value: Any) -> Any:
    return rebuilt(
        value, KINDS, lambda _, tensor: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
    )
