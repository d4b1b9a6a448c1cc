"""The settings of a module: its plain attributes, and what its `extra_repr` says besides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from tensorcap.recording import attribute_settings, is_setting
from tensorcap.workload import jsonable

_ENTRY: Final = re.compile(r"([A-Za-z]\w*)=(\((?:[^()]*)\)|\[(?:[^\[\]]*)\]|[^,\s()\[\]]+)")


def module_settings(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a module by name, as JSON values.

    Attributes that are None, bools, numbers, short texts or tuples of numbers; names that begin with an
    underscore are left out. `extra_repr` adds entries such as `eps=1e-06` under names that are no attributes.

    Example:
        >>> module_settings(nn.LeakyReLU(0.25))
        {'negative_slope': 0.25, 'inplace': False}
    """
    settings = attribute_settings({k: v for k, v in vars(module).items() if k != "training"})
    for name, text in _printed(module):
        if name not in settings and is_setting(value := _parse(text)):
            settings[name] = jsonable(value)
    return settings


def _printed(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the entries `name=value` of a module's `extra_repr`, values as text."""
    if type(module).extra_repr is nn.Module.extra_repr:
        return
    try:
        text = str(module.extra_repr())
    except Exception:  # of the user's code, which is only noted
        return
    for match in _ENTRY.finditer(text):
        yield match[1], match[2]


def _parse(text: str) -> Any:
    """The value of a Python literal; of anything else its text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
