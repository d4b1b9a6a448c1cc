"""The debugger page: a server on this machine that draws, and a script in the browser that points.

One archive, two, or the folder of a verification come in; pages go out. Read `subject` (what is looked at),
`rows` (the navigator and the tree of modules), `planes` (a part of a tensor as three maps), `inspector` (all
of one row), `flow` (the neighbourhood of an op), `source_texts` with `source_panel`, and `pages` with
`queries`, `templates/` and `static/`, which `server` serves; these alone need the packages of the extra
`view`. Normative in `specs/view.md`.
"""

from tensorcap.viewer.subject import Subject, open_subject

__all__ = ["Subject", "open_subject"]
