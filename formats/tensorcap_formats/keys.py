"""Keys: the canonical text form of a record's place, its natural order, and globs over it.

The grammar is normative in `specs/names.md`:

    full key  =  ["rank" RANK "/"] STEP "/" SITE ["@" CALL] "/" SLOT
    bare key  =  NAME                (a tensor of a file from elsewhere, which has only a name)
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import field
from functools import lru_cache
from sys import intern
from typing import Final

from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.light_dataclass import light_dataclass

MAX_KEY_BYTES: Final = 4096
ROOT_SITE: Final = "@root"
PROBES: Final = "probe"  # stands in the place of the module in the site of a probe (NAM-9)

_NUMBER: Final = r"(?:0|[1-9][0-9]{0,17})"
_FULL: Final = re.compile(
    rf"(?:rank({_NUMBER})/)?({_NUMBER})/(@root(?::[^/@]+)?|[^/@]+)(?:@({_NUMBER}))?/([^/@]+)", re.ASCII
)
# Not escaped: letters and digits of any script, and ASCII that no shell and no glob treats specially.
_UNSAFE: Final = re.compile(r"[^\w.,:+=\-]")
_UNSAFE_BARE: Final = re.compile(r"[^\w.,:+=\-/@]")
_SAFE: Final = re.compile(r"[\w,:+=\-][\w.,:+=\-]*")
# A full key in which nothing is escaped, and whose numbers are as they have to be: most are
_PLAIN: Final = re.compile(
    rf"(?:rank([1-9][0-9]{{0,17}})/)?({_NUMBER})/(@root|{_SAFE.pattern})(?:@([1-9][0-9]{{0,17}}))?/({_SAFE.pattern})"
)
_ESCAPE: Final = re.compile(r"((?:%[0-9A-F]{2})+)")
_DIGITS: Final = re.compile(r"([0-9]+)")


@light_dataclass(frozen=True, slots=True)
class Key:
    """Where a tensor was seen: step, site, call of the site within the step, slot, rank.

    `site` and `slot` are in escaped form (see `escape`). A bare key, that of a tensor in a file from
    elsewhere, has an empty slot and zeros for the numbers. `text` is the canonical text form, which `parse`
    reads back.

    Example:
        >>> Key("model.layers.2.mlp", "output", step=1).text
        '1/model.layers.2.mlp/output'
        >>> Key.parse("0/act@2/input.0")
        Key(site='act', slot='input.0', step=0, call=2, rank=0)
    """

    site: str
    slot: str = ""
    step: int = 0
    call: int = 0
    rank: int = 0
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        text = self.site
        if self.slot:
            rank = f"rank{self.rank}/" if self.rank else ""
            call = f"@{self.call}" if self.call else ""
            text = f"{rank}{self.step}/{self.site}{call}/{self.slot}"
        object.__setattr__(self, "text", intern(text))  # both archives have it

    @property
    def path(self) -> str:
        """Path of the tensor in a container that has paths (ARC-20): no path is a prefix of another."""
        if self.is_bare:
            return f"tensors/{self.site.replace('/', '%2F')}"
        rank = f"ranks/{self.rank}/" if self.rank else ""
        return f"{rank}steps/{self.step}/{self.site_call}/{self.slot}"

    @property
    def is_bare(self) -> bool:
        """Whether this is only a name, without step, site and slot."""
        return not self.slot

    @property
    def site_call(self) -> str:
        """Site and call: `act@2`; the first call has no number."""
        return f"{self.site}@{self.call}" if self.call else self.site

    @property
    def where(self) -> str:
        """Step, site and call without the slot: `0/act@2`. The call that the tensor belongs to."""
        return self.site if self.is_bare else self.text.rpartition("/")[0]

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read the canonical form; text that is not a full key is a bare one.

        Raises:
            UsageError: The text is empty, too long, or has characters that a key must escape.
        """
        check_length(text)
        if match := _PLAIN.fullmatch(text):
            rank, step, site, call, slot = match.groups()
            key = object.__new__(cls)  # which would put the text together again
            object.__setattr__(key, "site", intern(site))
            object.__setattr__(key, "slot", intern(slot))
            object.__setattr__(key, "step", int(step))
            object.__setattr__(key, "call", int(call) if call else 0)
            object.__setattr__(key, "rank", int(rank) if rank else 0)
            object.__setattr__(key, "text", intern(text))
            return key
        match = _FULL.fullmatch(text)
        if match is None:
            if escape_bare(unescape(text)) != text:
                raise UsageError(
                    f"key {abbreviate(text)!r}: has characters that a key must escape (NAM-4), "
                    f"expected {abbreviate(escape_bare(unescape(text)))!r}"
                )
            return cls(text)
        rank, step, site, call, slot = match.groups()
        if not _SAFE.fullmatch(site) and not _is_escaped_site(site):
            raise UsageError(f"key {abbreviate(text)!r}: {site!r} is not in escaped form (NAM-4)")
        if not _SAFE.fullmatch(slot) and not _is_escaped_slot(slot):
            raise UsageError(f"key {abbreviate(text)!r}: {slot!r} is not in escaped form (NAM-4)")
        key = cls(intern(site), intern(slot), int(step), int(call or 0), int(rank or 0))
        if rank == "0" or call == "0":
            raise UsageError(f"key {abbreviate(text)!r}: not canonical, expected {key.text!r} (NAM-3)")
        return key


def check_length(text: str) -> None:
    """Refuse an empty key and one above the limit (NAM-6)."""
    if 0 < len(text) <= MAX_KEY_BYTES // 4:  # UTF-8 has at most four bytes a character
        return
    size = len(text.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_KEY_BYTES:
        raise UsageError(
            f"key {abbreviate(text)!r}: is {size} bytes long, expected 1 to {MAX_KEY_BYTES} (NAM-6)"
        )


def escape(name: str) -> str:
    """Write a name of any characters as one component of a key.

    Example:
        >>> escape("a/b c")
        'a%2Fb%20c'
        >>> escape("..")
        '%2E%2E'
    """
    return _escape(name, _UNSAFE)


def module_site(name: str) -> str:
    """The site of a module path; empty for the root module.

    Example:
        >>> module_site("model.layers.0"), module_site(""), module_site("a:b")
        ('model.layers.0', '@root', 'a%3Ab')
    """
    return escape(name).replace(":", "%3A") if name else ROOT_SITE


def module_path(site: str) -> str:
    """The path of the module of a site: `module_site` backwards.

    Example:
        >>> module_path("model.layers.0"), module_path("@root"), module_path("a%3Ab")
        ('model.layers.0', '', 'a:b')
    """
    return "" if site == ROOT_SITE else unescape(site)


@lru_cache(maxsize=4096)
def inner_site(module: str, point: str) -> str:
    """The site of a place within the code of a module (NAM-9).

    Args:
        module: The site of the module; `PROBES` for a place whose name alone counts.
        point: The name of the place: an op, a node, a function.

    Example:
        >>> inner_site("model.layers.0.mlp", "aten.mm.default")
        'model.layers.0.mlp:aten.mm.default'
    """
    return f"{module}:{escape(point)}"


def module_of(site: str) -> str:
    """The site of the module that a site is, or lies within.

    Example:
        >>> module_of("model.layers.0.mlp:aten.mm.default"), module_of("lm_head")
        ('model.layers.0.mlp', 'lm_head')
    """
    return site.partition(":")[0]


def escape_bare(name: str) -> str:
    """Write the name of a tensor from elsewhere as a bare key; `/` and `@` stay.

    Example:
        >>> escape_bare("encoder/layer.0 (copy)")
        'encoder/layer.0%20%28copy%29'
        >>> escape_bare("../../evil")
        '%2E%2E/%2E%2E/evil'
    """
    return "/".join(_escape(part, _UNSAFE_BARE) for part in name.split("/"))


def unescape(text: str) -> str:
    """Give back the name that `escape` or `escape_bare` wrote."""
    return _ESCAPE.sub(lambda m: _unescape(m[1]), text)


def _unescape(run: str) -> str:
    try:
        return bytes.fromhex(run.replace("%", "")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # not the escaped form of any text
        return run


def _is_escaped_slot(slot: str) -> bool:
    """Whether each part between dots is escaped as a name of its own: a field may be called `.` or `..`."""
    return escape(slot) != "%2E" * len(slot) and all(
        escape(unescape(part)) == part for part in slot.split(".")
    )


def _is_escaped_site(site: str) -> bool:
    module, colon, point = site.partition(":")
    is_module = module in ("", ROOT_SITE) or module_site(unescape(module)) == module
    return is_module and (not colon or escape(unescape(point)) == point)


def _escape(name: str, unsafe: re.Pattern[str]) -> str:
    if name in (".", ".."):
        return "%2E" * len(name)
    return unsafe.sub(lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), name)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `layers.2` before `layers.10`.

    Example:
        >>> sorted(["layers.10", "layers.2", "layers"], key=natural)
        ['layers', 'layers.2', 'layers.10']
    """
    parts = _DIGITS.split(text)  # every second one is a number
    return tuple((0, int(part), part) if i % 2 else (1, 0, part) for i, part in enumerate(parts) if part)


def matches(text: str, pattern: str) -> bool:
    """Whether a key matches a glob: `*` any characters (also `/`), `?` one, `[...]` a set (NAM-8).

    A pattern without `/` is matched with the site (and the whole of a bare key), any other with the
    whole key.

    Example:
        >>> matches("0/model.layers.2.mlp/output", "*.mlp")
        True
        >>> matches("0/model.layers.2.mlp/output", "0/*/input*")
        False
    """
    if fnmatch.fnmatchcase(text, pattern):
        return True
    if "/" in pattern:
        return False
    match = _FULL.fullmatch(text)
    return match is not None and fnmatch.fnmatchcase(match[3], pattern)
