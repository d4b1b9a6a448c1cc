"""The pages of one subject: each handler answers with a fragment of HTML, which the script puts in its place.

Needs Starlette and Jinja2, of the extra `view`. Handlers are functions that Starlette runs in threads.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request  # noqa: TC002 - as all that handlers are made of
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tensorcap.diagnosis import diagnose
from tensorcap.drawing import HEIGHT, WIDTH, place_of
from tensorcap.viewer.inspector import Inspection, draw_charts, inspect, row_of
from tensorcap.viewer.memory import release_memory
from tensorcap.viewer.planes import Maps, Picture, PlaneView, TensorReader, pictures, read_maps
from tensorcap.viewer.queries import choice_of, quoted, real_number, unquoted, view_of, whole_number
from tensorcap.viewer.rows import METRICS, ORDERS, WIDEST, Choice, Row, shortened
from tensorcap.viewer.source_panel import source_panel
from tensorcap.viewer.subject import MappingChoice, Subject, open_subject
from tensorcap.wording import one_line, three_digits
from tensorcap_formats.errors import TensorcapError, UsageError

_HEADERS: Final = {  # nothing is loaded from elsewhere; markup in a name could not run if it got through
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
HOST: Final = "127.0.0.1"
_MOST_ROWS: Final = 500  # of one answer
_LONGEST_PATH: Final = 4096
_LONGEST_MESSAGE: Final = 500  # characters
_LISTED: Final = 200  # archives beside the reference that are offered
_SUFFIXES: Final = (".h5", ".zarr", ".safetensors", ".hdf5", ".npz", ".npy", ".pt", ".max", ".gguf", ".onnx")


class Pages:
    """The pages of one subject, which a reader may change for another."""

    def __init__(self, subject: Subject, *, mapping: MappingChoice = None) -> None:
        self._subject = subject
        self._mapping = mapping
        self._opening = threading.Lock()
        self._version = 0
        self._reader = TensorReader()
        self._templates = Environment(
            loader=PackageLoader(__package__ or "tensorcap.viewer", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: _printed(value),
        )
        self._templates.filters["number"] = three_digits
        self._templates.filters["quoted"] = quoted
        self._templates.filters["short"] = shortened
        for name in self._templates.list_templates():
            self._templates.get_template(name)  # compiled before the first view waits for it

    def app(self, token: str) -> Starlette:
        """An application that answers below the token, and with `not found` everywhere else."""
        routes = [
            Route("/", self._with_subject(self._home)),
            Route("/rows", self._with_subject(self._rows)),
            Route("/modules", self._with_subject(self._modules)),
            Route("/curve", self._with_subject(self._at_curve)),
            Route("/row/{number:int}", self._with_subject(self._row)),
            Route("/row/{number:int}/maps", self._with_subject(self._maps)),
            Route("/row/{number:int}/values", self._with_subject(self._values)),
            Route("/row/{number:int}/charts", self._with_subject(self._charts)),
            Route("/row/{number:int}/beside", self._with_subject(self._beside)),
            Route("/row/{number:int}/source", self._with_subject(self._source)),
            Route("/row/{number:int}/diagnosis", self._with_subject(self._diagnosis)),
            Route("/remarks", self._with_subject(self._remarks)),
            Route("/state", self._with_subject(self._state)),
            Route("/open", self._open, methods=["POST"]),
            Mount("/static", StaticFiles(directory=str(files(__package__ or "").joinpath("static")))),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        return Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=[hosts])

    def close(self) -> None:
        """Close what is looked at."""
        self._subject.close()

    def _with_subject(self, answer: Callable[[Subject, Request], Response]) -> Callable[[Request], Response]:
        """Answer with the archives held open; what cannot be read is one line and no fault."""

        def handle(request: Request) -> Response:
            while True:
                subject = self._subject
                with subject.use() as is_open:
                    if not is_open:
                        continue  # another one is in its place by now
                    try:
                        return answer(subject, request)
                    except (TensorcapError, OSError) as error:
                        return self._failure(error)

        return handle

    def _failure(self, error: Exception) -> Response:
        hint = getattr(error, "hint", None)
        text = shortened(f"{error}{f' {hint}' if hint else ''}", _LONGEST_MESSAGE)
        status = 404 if isinstance(error, LookupError) else 422
        return PlainTextResponse(text, status_code=status, headers=_HEADERS)

    def _home(self, subject: Subject, request: Request) -> Response:
        return self._html(
            "page.html",
            subject=subject,
            version=self._version,
            notes=subject.notes,
            remarks=subject.remarks(),
            exchanged=subject.exchanged.values(),
            tree=subject.tree,
            orders=ORDERS if any(row.own is not None for row in subject.rows) else ORDERS[:-1],
            metrics=METRICS,
            curves=subject.curves,
            width=WIDTH,
            height=HEIGHT,
            beside=_archives_beside(subject.paths[0]),
        )

    def _rows(self, subject: Subject, request: Request) -> Response:
        query = request.query_params
        choice = choice_of(query)
        chosen = subject.chosen(choice)
        first, count = (
            max(0, whole_number(query.get("first", "0"))),
            min(whole_number(query.get("count", "100")), _MOST_ROWS),
        )
        position = -1
        if "around" in query:  # the list changed: rows near the one in the inspector, or the first ones
            position = next((i for i, row in enumerate(chosen) if str(row.number) == query["around"]), -1)
            first = max(0, position - count // 2)
        width = min(max(0, whole_number(query.get("width", str(WIDEST)))), 2 * WIDEST)
        return self._html(
            "rows.html",
            rows=chosen[first : first + max(0, count)],
            scale=subject.scale,
            metric=choice.metric,
            width=width,
            first=first,
            total=len(chosen),
            position=position,
            under=choice.under,
            next_red=_next_red(chosen, query.get("after", "")),
            legend=subject.scale.legend(choice.metric) if subject.source else "",
            counts=_counts(subject, choice),
        )

    def _modules(self, subject: Subject, request: Request) -> Response:
        query = request.query_params
        try:
            module = subject.tree.at(unquoted(query.get("under", "")))
        except KeyError as error:
            raise HTTPException(404, "no such module") from error
        return self._html(
            "modules.html",
            module=module,
            path=unquoted(query.get("open", "-")),
            classes=subject.classes,
            is_whole="rows" in query,
            scale=subject.scale,
            metric=choice_of(query).metric,
        )

    def _at_curve(self, subject: Subject, request: Request) -> Response:
        """The row of a point of a curve: by its place from left to right, 0 to 1, or so many from a row's."""
        rows, query = subject.curve_rows, request.query_params
        if not rows:
            raise HTTPException(404, "no curve")
        if "step" in query:
            start = _point(subject, row_of(subject, whole_number(query.get("from", "0"))))
            at = (-1 if start is None else start) + whole_number(query["step"])
        else:
            at = round(min(max(real_number(query.get("at", "0")), 0.0), 1.0) * (len(rows) - 1))
        return JSONResponse(rows[min(max(at, 0), len(rows) - 1)], headers=_HEADERS)

    def _row(self, subject: Subject, request: Request) -> Response:
        inspection = self._inspection(subject, request)
        view = PlaneView.of(inspection.shape)
        return self._html(
            "row.html",
            it=inspection,
            view=view,
            maps=self._drawn(subject, inspection, view, request),
            subject=subject,
            is_log="log" in request.query_params,
            place=_place(subject, inspection.row),
        )

    def _maps(self, subject: Subject, request: Request) -> Response:
        inspection = self._inspection(subject, request)
        view = view_of(request.query_params, inspection)
        return HTMLResponse(self._drawn(subject, inspection, view, request), headers=_HEADERS)

    def _drawn(self, subject: Subject, inspection: Inspection, view: PlaneView, request: Request) -> Any:
        """The maps of a view as HTML, or why there are none."""
        maps: Maps | None = None
        drawn: tuple[Picture, ...] = ()
        reason = inspection.missing
        if inspection.drawn:
            try:
                with self._reading(subject, inspection):
                    maps = read_maps(self._reader, inspection.drawn, view, inspection.worst_index)
                drawn = pictures(maps, log="log" in request.query_params)
            except (TensorcapError, OSError) as error:
                reason = f"The values cannot be read: {error}."
        template = self._templates.get_template("maps.html")
        return Markup(template.render(maps=maps, pictures=drawn, view=view, reason=reason, it=inspection))

    def _values(self, subject: Subject, request: Request) -> Response:
        """The values of all maps: float64, one map after the other."""
        inspection = self._inspection(subject, request)
        if not inspection.drawn:
            raise HTTPException(404, "no values")
        view = view_of(request.query_params, inspection)
        with self._reading(subject, inspection):
            maps = read_maps(self._reader, inspection.drawn, view, inspection.worst_index)
        planes = np.stack(list(maps.planes.values())).astype("<f8")
        return Response(planes.tobytes(), media_type="application/octet-stream", headers=_HEADERS)

    def _charts(self, subject: Subject, request: Request) -> Response:
        inspection = self._inspection(subject, request)
        if not inspection.drawn:
            return HTMLResponse("", headers=_HEADERS)
        with self._reading(subject, inspection):
            charts = draw_charts(self._reader, inspection.drawn)
        return self._html("charts.html", charts=charts)

    def _beside(self, subject: Subject, request: Request) -> Response:
        """The neighbourhood of a row, on the side wanted or that has it."""
        row = row_of(subject, request.path_params["number"])
        flow = subject.flow_of(row, request.query_params.get("side", ""))
        return self._html(
            "flow.html", picture=flow.around(row), has_ops=bool(flow.nodes), is_saved=not subject.archives
        )

    def _source(self, subject: Subject, request: Request) -> Response:
        """The source of a row's op or module, or of a module around it, of the side wanted or that has it."""
        row, query = row_of(subject, request.path_params["number"]), request.query_params
        level = whole_number(query["level"]) if "level" in query else None
        panel = source_panel(subject, row, side=query.get("side", ""), level=level)
        return self._html("source.html", panel=panel, number=row.number)

    def _diagnosis(self, subject: Subject, request: Request) -> Response:
        row = row_of(subject, request.path_params["number"])
        if row.pair is None or len(subject.archives) != 2:
            raise HTTPException(404, "nothing to diagnose")
        with subject.reading:
            if row.key not in subject.diagnoses:
                subject.diagnoses[row.key] = diagnose(subject.archives[0], subject.archives[1], row.key)
        return self._html("diagnosis.html", result=subject.diagnoses[row.key])

    def _state(self, subject: Subject, request: Request) -> Response:
        remarks = [one_line(remark) for remark in subject.remarks()]
        return JSONResponse({"version": self._version, "remarks": remarks}, headers=_HEADERS)

    def _remarks(self, subject: Subject, request: Request) -> Response:
        return self._html("remarks.html", remarks=subject.remarks())

    async def _open(self, request: Request) -> Response:
        """Open another second run, close it, or open again what is there: the body is a path, or nothing."""
        body = (await request.body())[: _LONGEST_PATH + 1]
        path = body.decode("utf-8", "replace").strip()
        again = "again" in request.query_params
        return await run_in_threadpool(self._change, path, again)

    def _change(self, path: str, again: bool) -> Response:
        if len(path) > _LONGEST_PATH or "\0" in path:
            return self._failure(UsageError("the path is none"))
        with self._opening:
            old = self._subject
            if again:
                paths = old.paths
            else:
                paths = (_first(old), os.path.expanduser(path)) if path else (_first(old),)
            try:
                new = open_subject(*paths, mapping=self._mapping if len(paths) > 1 else None)
            except (TensorcapError, OSError) as error:
                return self._failure(error)
            self._subject = new
            self._version += 1
            self._reader.forget()
            old.close()
        del old
        release_memory()
        return JSONResponse({"version": self._version}, headers=_HEADERS)

    def _inspection(self, subject: Subject, request: Request) -> Inspection:
        return inspect(subject, row_of(subject, request.path_params["number"]))

    @contextmanager
    def _reading(self, subject: Subject, inspection: Inspection) -> Iterator[None]:
        """Hold back other threads, unless the archives may be read by several."""
        is_free = all(side.archive.is_direct for side in inspection.drawn)
        with nullcontext() if is_free else subject.reading:
            yield

    def _html(self, template: str, **values: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(values), headers=_HEADERS)


def _printed(value: Any) -> Any:
    """Text with a space for what is not printable, such as a change of direction; markup of ours as it is."""
    if type(value) is not str or value.isprintable():
        return value
    return "".join(c if c.isprintable() else " " for c in value)


def _first(subject: Subject) -> str:
    """The reference, also of a folder or a saved comparison."""
    return subject.source.paths[0] if subject.source else subject.paths[0]


def _point(subject: Subject, row: Row) -> int | None:
    """The number of a row's point on a curve, or of the first result of its module; None without one."""
    return subject.curve_places.get(row.number, subject.module_places.get(row.module))


def _place(subject: Subject, row: Row) -> str:
    """Where a row's point is on a curve, from the left; "" if nowhere."""
    at = _point(subject, row)
    return "" if at is None else str(place_of(at, len(subject.curve_places)))


def _counts(subject: Subject, choice: Choice) -> list[tuple[str, int, str, bool]]:
    """Of each status how many rows fit what else is chosen, its colour, and whether it is the one chosen."""
    if not subject.counts:
        return []
    counts = Counter(row.status for row in subject.chosen(replace(choice, status="")))
    return [
        (status, counts[status], colour, choice.status == status)
        for status, (_, colour) in subject.counts.items()
    ]


def _next_red(rows: list[Row], after: str) -> int:
    """The place of the next red row behind a place, -1 for none."""
    start = int(after) + 1 if after.lstrip("-").isdigit() else 0
    reds = (at for at in range(max(0, start), len(rows)) if rows[at].colour == "red")
    return next(reds, next((at for at, row in enumerate(rows) if row.colour == "red"), -1))


def _archives_beside(path: str) -> list[str]:
    """Archives in the folder of the reference, to be offered as a second run."""
    folder = Path(path).parent
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    fitting = [name for name in names if name.lower().endswith(_SUFFIXES) and name != Path(path).name]
    return [str(folder / name) for name in fitting[:_LISTED]]
