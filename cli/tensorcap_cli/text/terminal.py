"""Standard output: nothing in it steers a terminal. On one, lines fit it, and places in files are links."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO, cast
from urllib.parse import quote

_STEERS: Final = re.compile(r"(\x1b\[[0-9;]*m)|[^ -~\n\t\r]")  # all but colours is looked at
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;;.*?\x1b\\")  # colours and links, of no width
_WORD: Final = re.compile(r"\s+|\S+")
_PLACE: Final = re.compile(r"(?<![\w/.~-])([\w./~@+-]+\.(?:pyi?|ipynb|mojo|c|cc|cpp|cu|h)):(\d+)")
_INDENT: Final = "  "
_LEAST_WIDTH: Final = 40  # columns: a narrower terminal wraps lines itself
_VTE_WITH_LINKS: Final = 5000  # VTE_VERSION of 0.50
_PROGRAMS_WITH_LINKS: Final = ("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "Tabby", "rio")
_VARIABLES_WITH_LINKS: Final = ("WT_SESSION", "KITTY_WINDOW_ID", "KONSOLE_VERSION", "ALACRITTY_WINDOW_ID")


class Output:
    """A stream to a terminal or a pipe, in which characters that a terminal obeys are written as escapes.

    On a terminal, lines that are too wide are broken between words, and go on two columns further in than
    they began. What has to stay as it is, to be copied or read by a program, is written to `whole`.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None, has_links: bool = False) -> None:
        self.whole = stream
        self._width = width
        self._has_links = has_links

    def write(self, text: str) -> int:
        """Write text; whole lines are fitted."""
        if not isinstance(text, str):  # click tries bytes, to see what kind of stream this is
            raise TypeError(f"{type(text).__name__}, expected str")
        text = harmless(text)
        if self._width is None:
            self.whole.write(text)
            return len(text)
        for line in text.splitlines(keepends=True):
            self.whole.write(self._fitted(line, self._width) if line.endswith("\n") else line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def _fitted(self, line: str, width: int) -> str:
        text = linked(line) if self._has_links else line
        return text if visible_width(line) <= width else broken(text, width)


def harmless(text: str) -> str:
    r"""Text with escapes for all that a terminal obeys but colours and the ends of lines.

    Example:
        >>> print(harmless("a name\x1b[2J"))
        a name\x1b[2J
    """
    return _STEERS.sub(_harmless, text)


def _harmless(match: re.Match[str]) -> str:
    if match[1] or match[0].isprintable():
        return match[0]
    return match[0].encode("unicode_escape").decode()


def fit_stdout() -> None:
    """Make standard output fit its terminal, if it is one, and take what must not be written there."""
    if isinstance(sys.stdout, Output):
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what its encoding has not
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    output = Output(sys.stdout)
    if width >= _LEAST_WIDTH:
        output = Output(sys.stdout, width=width, has_links=shows_links(os.environ))
    sys.stdout = cast("TextIO", output)


def whole_stdout() -> TextIO:
    """Standard output for lines that may not be broken, such as JSON and commands to be copied."""
    return cast("TextIO", getattr(sys.stdout, "whole", sys.stdout))


def shows_links(environment: Mapping[str, str]) -> bool:
    """Whether a terminal has links (OSC 8), which none can be asked: by the variables that it sets.

    FORCE_HYPERLINK, if it is set, decides, as for other programs; 0 is no.

    Example:
        >>> shows_links({"VTE_VERSION": "7200"}), shows_links({"TERM": "dumb", "WT_SESSION": "1"})
        (True, False)
    """
    forced = environment.get("FORCE_HYPERLINK")
    if forced is not None:
        return forced != "0"
    if environment.get("TERM", "") == "dumb" or environment.get("TMUX") or environment.get("STY"):
        return False  # tmux and screen pass links on in some versions, and print them in others
    version = environment.get("VTE_VERSION", "")
    is_vte = version.isdigit() and int(version) >= _VTE_WITH_LINKS
    is_known = environment.get("TERM_PROGRAM") in _PROGRAMS_WITH_LINKS
    return is_vte or is_known or any(environment.get(name) for name in _VARIABLES_WITH_LINKS)


def linked(text: str) -> str:
    """Text with a link on each `FILE:LINE` whose file is on this machine."""
    return _PLACE.sub(_link, text)


def _link(match: re.Match[str]) -> str:
    path = os.path.abspath(os.path.expanduser(match[1]))
    if not os.path.isfile(path):
        return match[0]
    # The host is named, so that a terminal at the other end of ssh opens no file of its own.
    url = f"file://{socket.gethostname()}{quote(path)}#{match[2]}"
    return f"\x1b]8;;{url}\x1b\\{match[0]}\x1b]8;;\x1b\\"


def visible_width(text: str) -> int:
    r"""Columns that text takes, without its end of line.

    Example:
        >>> visible_width("\x1b[31mred\x1b[0m\n")
        3
    """
    return len(_CONTROL.sub("", text).rstrip("\n"))


def broken(line: str, width: int) -> str:
    r"""A line as several of at most `width` columns, broken between words; a longer word has its own line.

    Example:
        >>> broken("  a note: one two three\n", 16)
        '  a note: one\n    two three\n'
    """
    text = line.rstrip("\n")
    indent = " " * (len(text) - len(text.lstrip(" "))) + _INDENT
    lines, used = [""], 0
    for word in _WORD.findall(text):
        columns = visible_width(word)
        if not word.isspace() and used + columns > width and lines[-1].strip():
            lines[-1] = lines[-1].rstrip(" ")
            lines.append(indent)
            used = len(indent)
        lines[-1] += word
        used += columns
    return "\n".join(lines) + "\n"
