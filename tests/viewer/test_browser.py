"""The page in a real headless Chromium: `make test-browser`, in a network that has nothing but loopback.

Skipped without the system's Chromium (Debian: `apt-get install chromium`) and the package playwright, whose
own browsers are not needed. With `TCAP_SHOTS=FOLDER` each test leaves pictures there, to be looked at.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Page, expect, sync_playwright

from tensorcap.viewer import Subject, open_subject
from tensorcap.viewer.pages import Pages
from tests.support.archives import write_archive

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

expect.set_options(timeout=30_000)

GENERATOR = np.random.default_rng(23)
WRONG = "layers.2.mlp.act"
SOURCE = {
    "pkg.MLP": {
        "file": "pkg.py",
        "line": 1,
        "text": "class MLP:\n    def forward(self, x):\n        return self.act(self.up(x))\n",
    }
}


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def run(*, wrong: bool, ops: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, and facts of ops, of four layers of an MLP; in one the activation is another."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal((2, 6, 32)).astype(np.float32)
    tensors: dict[str, Any] = {"0/@root/input.x": x}
    facts: dict[str, Any] = {}
    order = 0
    for layer in range(4):
        path = f"layers.{layer}.mlp"
        weight = generator.standard_normal((32, 32)).astype(np.float32) / 6
        up = x @ weight
        act = (gelu if wrong and f"{path}.act" == WRONG else silu)(up).astype(np.float32)
        tensors |= {f"0/{path}/input.x": x, f"0/{path}.up/input.x": x}
        if ops:
            tensors[f"0/{path}.up:aten.mm/output"] = up
            facts[f"0/{path}.up:aten.mm/op"] = {
                "op": "aten.mm.default",
                "order": order,
                "module": f"{path}.up",
                "module_call": 0,
                "class": "Linear",
                "file": "pkg.py",
                "line": 3,
                "function": "forward",
                "inputs": [],
                "arguments": {},
                "outputs": [{"slot": "output", "record": f"0/{path}.up:aten.mm/output"}],
            }
        x = (x + act).astype(np.float32)
        tensors |= {
            f"0/{path}.up/output": up,
            f"0/{path}.act/input.x": up,
            f"0/{path}.act/output": act,
            f"0/{path}/output": act,
            f"0/layers.{layer}/output": x,
        }
        order += 10
    return tensors, facts


MODULES = [
    {"path": f"layers.{layer}.mlp{below}", "class": f"pkg.{name}"}
    for layer in range(4)
    for below, name in (("", "MLP"), (".up", "Linear"), (".act", "Act"))
]


def pair(folder: Path, *, ops: bool) -> tuple[Path, Path]:
    paths = []
    for name, wrong in (("ref.h5", False), ("tgt.h5", True)):
        tensors, facts = run(wrong=wrong, ops=ops)
        metadata = {"modules": MODULES, "sources": SOURCE}
        paths.append(write_archive(folder / name, tensors, values=facts, run=metadata))
    return paths[0], paths[1]


class Served:
    """A subject served in a thread, and a page of the browser that looks at it."""

    def __init__(self, subject: Subject, browser: Any, **options: Any) -> None:
        self.subject = subject
        self.pages = Pages(subject)
        self.listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            self.pages.app("T"), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        self.outside: list[str] = []
        self.complaints: list[str] = []
        self.page: Page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page.set_default_timeout(30_000)
        self.page.on("request", self._request)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(f"http://127.0.0.1:{self.listener.getsockname()[1]}/T/")
        expect(self.page.locator("html[data-ready=true]")).to_have_count(1)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.outside.append(request.url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def show_worst(self) -> None:
        """Go to the plane of the worst element, and wait till its maps stand where those of before stood."""
        self.page.evaluate(
            "() => { for (const map of document.querySelectorAll('#maps img')) map.alt = 'before' }"
        )
        self.press("w")
        self.page.wait_for_function("""() => {
            const maps = [...document.querySelectorAll('#maps img')]
            return maps.length && maps.every(map => map.alt !== 'before' && map.complete)
        }""")

    def expect_open(self, key: str) -> None:
        expect(self.page.locator("#shown h2")).to_have_text(f"0/{key}")

    def shoot(self, name: str) -> None:
        folder = os.environ.get("TCAP_SHOTS")
        if folder:
            self.page.wait_for_timeout(600)
            self.page.screenshot(path=Path(folder) / f"{name}.png")

    def close(self) -> None:
        self.page.close()
        self.server.should_exit = True
        self.thread.join(30)
        self.listener.close()
        self.pages.close()
        assert self.outside == []
        assert self.complaints == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def serve(browser: Any) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def start(*paths: Any, **options: Any) -> Served:
        served.append(Served(open_subject(*paths), browser, **options))
        return served[-1]

    yield start
    for one in served:
        one.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair(tmp_path_factory.mktemp("plain"), ops=False)


@pytest.fixture(scope="module")
def with_ops(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair(tmp_path_factory.mktemp("ops"), ops=True)


@pytest.mark.spec("VIEW-94", "VIEW-95")
def test_wide_panes_are_scrolled_by_keys_and_counts_follow_the_filter(
    serve: Callable[..., Served], with_ops: tuple[Path, Path]
) -> None:
    one = serve(*with_ops)
    page = one.page
    one.press("s")
    one.expect_open(f"{WRONG}/output")
    expect(page.locator("#text .hll")).to_be_visible()
    expect(page.locator("#text .path")).to_have_text("pkg.py:3")
    scrolled = "() => ['code', 'inspector'].map(id => document.getElementById(id).scrollLeft)"
    page.evaluate("() => document.querySelector('#text .code').append('x'.repeat(400))")
    one.press("ArrowRight", "ArrowRight")
    assert page.evaluate(scrolled)[0] > 100
    one.press("ArrowLeft", "ArrowLeft")
    assert page.evaluate(scrolled)[0] == 0
    one.press("p", "ArrowRight")  # the next point of the curves
    one.expect_open("layers.2.mlp/output")
    one.press("ArrowLeft")
    one.expect_open(f"{WRONG}/output")
    expect(page.locator("#curves")).to_be_focused()
    one.press("p", "p", "p")  # structure, source, inspector
    expect(page.locator("#inspector")).to_be_focused()
    one.press("P")
    expect(page.locator("#code")).to_be_focused()
    one.press("v")  # what has the focus keeps it
    expect(page.locator("#text .side.open")).to_have_text("target")
    expect(page.locator("#text h2")).to_contain_text("same text on both sides")
    expect(page.locator("#code")).to_be_focused()
    one.press("p")
    one.press("End")  # the browser's own: the pane scrolls, and the list stays where it is
    page.wait_for_function("() => document.getElementById('inspector').scrollTop > 0")
    one.expect_open(f"{WRONG}/output")
    one.press("p", "o", "Home")  # back in the list, in the order of execution
    one.expect_open("@root/input.x")
    expect(page.locator("#counts [data-status=identical]")).to_contain_text("22 identical")
    one.press("/")
    page.keyboard.type("layers.3")
    expect(page.locator("#count")).to_have_text("8")
    expect(page.locator("#counts [data-status=identical]")).to_contain_text("0 identical")
    one.press("Enter", "/")
    page.keyboard.type("output 2 act")  # in the place of what stood there
    expect(page.locator("#count")).to_have_text("1")
    one.press("Enter", "g", "g", "1")
    expect(page.locator("[name=status]")).to_have_value("!green")
    expect(page.locator("#rows .empty")).to_contain_text("No tensor fits")
    one.press("s")  # goes where no filter lets it
    expect(page.locator("[aria-selected=true]")).to_be_visible()
    expect(page.locator("#count")).to_have_text(str(len(one.subject.rows)))
    expect(page.locator("[name=once]")).not_to_be_checked()
    for metric, words in (("psnr", "PSNR: green from"), ("mean-abs", "mean-abs: green up to")):
        expect(page.locator("[name=metric]")).to_have_value(metric)
        expect(page.locator("#bands")).to_contain_text(words)
        one.press("m")


@pytest.mark.spec("VIEW-20", "VIEW-21", "VIEW-25", "VIEW-96", "VIEW-97")
def test_the_guilty_module_is_found_with_the_keyboard_alone(
    serve: Callable[..., Served], plain: tuple[Path, Path]
) -> None:
    one = serve(*plain)
    page = one.page
    one.press("s")
    one.expect_open(f"{WRONG}/output")
    expect(page.locator("#diagnosis")).to_contain_text("gelu")
    one.press("o")  # in execution order the first red one is the guilty one
    expect(page.locator("[name=sort]")).to_have_value("execution")
    one.press("Home")
    one.expect_open("@root/input.x")
    one.press("r")
    one.expect_open(f"{WRONG}/output")
    one.press("ArrowDown", "j")
    one.expect_open("layers.2/output")
    one.press("k", "k")
    one.expect_open(f"{WRONG}/output")
    one.press("d")
    expect(page.locator("#diagnosis h3")).to_have_text("Diagnosis")
    expect(page.locator("#diagnosis")).to_contain_text("gelu")
    expect(page.locator("[aria-selected=true]")).to_have_count(1)
    one.press("/")
    page.keyboard.type("mlp.up")
    expect(page.locator("#count")).to_have_text("8")
    one.press("Enter", "Home")
    one.expect_open("layers.0.mlp.up/input.x")
    one.press("/", "Escape")
    expect(page.locator("#count")).to_have_text(str(len(one.subject.rows)))
    one.press("u")
    expect(page.locator("#count")).to_have_text("2")
    one.press("Escape")
    expect(page.locator("#count")).to_have_text(str(len(one.subject.rows)))
    one.press("u", "m", "i")
    expect(page.locator("#failure")).to_contain_text("Only the folder of a verification has an injected run.")
    expect(page.locator("[name=metric]")).to_have_value("mean-abs")
    page.reload()
    expect(page.locator("html[data-ready=true]")).to_have_count(1)
    one.expect_open("layers.0.mlp.up/input.x")
    expect(page.locator("#count")).to_have_text("2")
    expect(page.locator("[name=metric]")).to_have_value("mean-abs")
    expect(page.locator("[name=sort]")).to_have_value("execution")
    one.shoot("keyboard")


@pytest.mark.spec("VIEW-41")
def test_maps_zoom_together_and_show_the_values_of_the_tensors(
    serve: Callable[..., Served], plain: tuple[Path, Path]
) -> None:
    one = serve(*plain)
    page = one.page
    one.press("s")
    one.expect_open(f"{WRONG}/output")
    ours, theirs = (run(wrong=wrong)[0][f"0/{WRONG}/output"] for wrong in (False, True))
    difference = abs(theirs.astype("f8") - ours)
    one.show_worst()
    worst = np.unravel_index(difference.argmax(), difference.shape)
    expect(page.locator("#plane")).to_have_attribute("data-at", ",".join(map(str, worst)))
    expect(page.locator("#maps .map")).to_have_count(3)
    for row, column in ((0, 0), (int(worst[1]), int(worst[2])), (5, 31)):
        box = page.locator("#maps .map").nth(1).bounding_box()
        assert box is not None
        page.mouse.move(
            box["x"] + (column + 0.5) / 32 * box["width"], box["y"] + (row + 0.5) / 6 * box["height"]
        )
        expect(page.locator("#hover")).to_contain_text(f"[{worst[0]},{row},{column}]")
        text = page.locator("#hover").inner_text()
        numbers = [float(word) for word in text.split()[2::2]]
        at = int(worst[0]), row, column
        assert numbers == pytest.approx([ours[at], difference[at], theirs[at]], rel=1e-5, abs=1e-7)
    # The colours at these places, read off the image: the worst is the last colour of its ramp.
    colour = page.evaluate(
        """([row, column]) => {
            const image = document.querySelectorAll('#maps .map')[1]
            const size = { width: image.naturalWidth, height: image.naturalHeight }
            const canvas = Object.assign(document.createElement('canvas'), size).getContext('2d')
            canvas.drawImage(image, 0, 0)
            return [...canvas.getImageData(column, row, 1, 1).data].slice(0, 3)
        }""",
        [int(worst[1]), int(worst[2])],
    )
    assert colour == [0x7F, 0, 0]
    box = page.locator("#maps .map").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.7, steps=3)
    page.mouse.up()
    expect(page.locator("#plane")).to_have_attribute("data-box", "1,5,9,23")
    expect(page.locator("[name=box]")).to_have_value("1,5,9,23")
    one.press("l")
    expect(page.locator("[name=log]")).to_be_checked()
    expect(page.locator("#plane")).to_have_attribute("data-box", "1,5,9,23")
    one.press("z")
    expect(page.locator("#plane")).to_have_attribute("data-box", "0,6,0,32")
    page.locator("#view [name=rows]").select_option("0")
    expect(page.locator("#plane")).to_have_attribute("data-drawn", "0,2")
    expect(page.locator("label.at:has([name=at1])")).to_be_visible()
    one.shoot("maps")


@pytest.mark.spec("VIEW-24", "VIEW-30", "VIEW-94", "VIEW-95", "VIEW-96")
def test_source_structure_and_tree_are_in_step_with_what_is_open(
    serve: Callable[..., Served], with_ops: tuple[Path, Path]
) -> None:
    one = serve(*with_ops, color_scheme="dark")
    page = one.page
    one.press("/")
    page.keyboard.type("layers.2.mlp.up:")
    one.press("Enter")
    expect(page.locator("#count")).to_have_text("1")
    one.press("Home")
    one.expect_open("layers.2.mlp.up:aten.mm/output")
    expect(page.locator("#text .hll")).to_contain_text("return self.act(self.up(x))")
    page.locator("#text .crumb", has_text="mlp").click()
    expect(page.locator("#text .crumb.open")).to_contain_text("mlp")
    expect(page.locator("#text .hll")).to_contain_text("self.up(x)")
    one.press("v")
    expect(page.locator("#text .side.open")).to_have_text("target")
    expect(page.locator("#text .crumb.open")).to_contain_text("mlp")
    one.press("F")
    expect(page.locator("#text .crumb.open")).to_contain_text("up")
    one.press("F")
    expect(page.locator("#text .crumb.open")).to_contain_text("mm")
    one.press("v", "?")
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#keys .dead dt")).to_have_text(["w", "d", "i"])  # identical, and no injected run
    one.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    one.press("/", "Escape", "t")
    expect(page.locator("#tree [aria-selected=true]")).to_be_visible()
    one.shoot("tree")
    one.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    expect(page.locator("#tree summary:focus")).to_have_count(1)
    one.press("ArrowRight", "t", "s")
    one.expect_open(f"{WRONG}/output")
    expect(page.locator("#beside .box.centre")).to_contain_text("act")
    page.locator("#beside .box:not(.centre)").first.focus()
    one.press("Enter")
    expect(page.locator("#shown h2")).not_to_have_text(f"0/{WRONG}/output")
    expect(page.locator("#beside .box.centre:focus")).to_have_count(1)


def test_answers_that_come_late_are_of_what_is_open(
    serve: Callable[..., Served], with_ops: tuple[Path, Path]
) -> None:
    """The whole plane is asked for while another tensor is opened, whose maps are those that stay."""
    one = serve(*with_ops)
    page = one.page
    one.press("s")
    one.expect_open(f"{WRONG}/output")
    late: list[Any] = []
    page.route("**/maps?*", lambda route: late.append(route))
    one.press("z", "End")
    expect(page.locator("#shown h2")).not_to_have_text(f"0/{WRONG}/output")
    with page.expect_response("**/maps?*"):
        late[0].continue_()
    page.wait_for_timeout(500)
    shown, own = page.evaluate(
        """async () => {
            const sources = page => [...page.querySelectorAll('#maps img')].map(map => map.src)
            const { number } = document.querySelector('.row[aria-selected]').dataset
            const answer = await (await fetch(`row/${number}`)).text()
            return [sources(document), sources(new DOMParser().parseFromString(answer, 'text/html'))]
        }"""
    )
    assert len(own) == 3
    assert shown == own


@pytest.mark.spec("VIEW-3", "VIEW-4")
def test_a_second_run_is_opened_closed_and_opened_again_after_it_changed(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    reference, target = pair(tmp_path, ops=False)
    one = serve(reference)
    page = one.page
    expect(page.locator(".verdict")).to_contain_text("nothing to compare with")
    one.press("Home")
    one.expect_open("@root/input.x")
    expect(page.locator("#maps .map")).to_have_count(1)
    page.locator("#second [name=path]").fill(str(tmp_path / "none.h5"))
    page.locator("#second [name=path]").press("Enter")
    expect(page.locator("#failure")).to_contain_text("there is no such file")
    with page.expect_response("**/state"):  # asked for again and again, and answered
        pass
    expect(page.locator("#failure")).to_contain_text("there is no such file")
    one.complaints.clear()  # the browser tells of the answer that refused
    page.locator("#second [name=path]").fill(str(target))
    page.locator("#second [name=path]").press("Enter")
    expect(page.locator(".verdict")).to_contain_text("not green")
    write_archive(tmp_path / "other.h5", run(wrong=False)[0])
    os.replace(tmp_path / "other.h5", target)
    page.locator("#remarks .again").click()
    expect(page.locator(".verdict")).to_contain_text("all that is required is green")
    page.locator("#second [name=close]").click()
    expect(page.locator(".verdict")).to_contain_text("nothing to compare with")


def test_a_browser_that_loses_the_server_says_so_and_goes_on_when_it_is_back(
    serve: Callable[..., Served], plain: tuple[Path, Path]
) -> None:
    one = serve(*plain)
    one.press("Home")
    expect(one.page.locator("#shown h2")).to_be_visible()
    one.page.context.set_offline(True)
    one.press("End")
    expect(one.page.locator("#failure")).to_have_text("The server does not answer. Trying again …")
    one.page.context.set_offline(False)
    one.press("Home")
    expect(one.page.locator("#failure")).to_be_hidden()
    expect(one.page.locator("#shown h2")).to_have_text(f"0/{WRONG}/output")
    one.complaints.clear()  # the browser tells of requests that found nobody


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 800)])
def test_nothing_is_wider_than_the_screen(
    serve: Callable[..., Served], plain: tuple[Path, Path], scheme: str, width: int
) -> None:
    one = serve(*plain, viewport={"width": width, "height": 800}, color_scheme=scheme)
    one.press("s", "w")
    one.expect_open(f"{WRONG}/output")
    expect(one.page.locator("#charts figure")).to_have_count(4)
    assert one.page.evaluate("() => document.documentElement.scrollWidth") == width
    one.shoot(f"page-{scheme}-{width}")


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a verification of a real torch model, with the wrong activation in its second layer."""
    torch = pytest.importorskip("torch")
    import tensorcap

    def workload(*, wrong: bool) -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU()) for _ in range(3)]
        if wrong:
            layers[1][1] = torch.nn.GELU(approximate="tanh")
        return tensorcap.Workload(
            torch.nn.Sequential(*layers).eval(), (torch.linspace(-2, 2, 64).reshape(4, 16),)
        )

    folder = tmp_path_factory.mktemp("verified") / "report"
    tensorcap.verify(workload(wrong=False), workload(wrong=True), folder)
    return folder


@pytest.mark.spec("VIEW-1", "VIEW-25")
def test_a_verification_has_own_errors_and_the_curves_of_the_injected_run(
    serve: Callable[..., Served], verified: Path
) -> None:
    one = serve(verified)
    page = one.page
    free, injected = (page.locator(f".run.{run}") for run in ("free", "injected"))
    expect(free).to_be_visible()
    expect(injected).to_be_hidden()
    one.press("i")
    expect(injected).to_be_visible()
    expect(free).to_be_hidden()
    # Of the injected run the guilty module alone errs, and the one around it, which returns its result.
    heights = [
        float(height)
        for path in injected.locator(".dots").all()
        for height in re.findall(r"M[\d.]+,([\d.]+)h0", path.get_attribute("d") or "")
    ]
    assert sum(height < 180 for height in heights) == 2
    one.press("o", "o", "o")
    expect(page.locator("[name=sort]")).to_have_value("own error")
    one.press("Home")
    one.expect_open("1.1/output")
    expect(page.locator("#text .hll")).to_contain_text("def forward(self, input: Tensor)")
    page.locator("#text .side", has_text="target").click()
    expect(page.locator("#text .crumb.open")).to_contain_text("GELU")
    one.shoot("verified")


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A torch module and its port to real MAX with a wrong weight: a graph that other tests compile."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("max.nn")
    from tensorcap import MaxModel, Workload
    from tensorcap.session import capture_workload
    from tests.max.nets import WEIGHTS, X, chain, with_wrong_first

    class Scale(torch.nn.Module):  # type: ignore[misc,name-defined] # imported only here
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight))

        def forward(self, x: Any) -> Any:
            return x * self.weight + 1.0

    class Chain(torch.nn.Module):  # type: ignore[misc,name-defined] # as above
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Scale(weight) for weight in WEIGHTS.values())

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    folder = tmp_path_factory.mktemp("ported")
    capture_workload(Workload(Chain().eval(), {"x": torch.tensor(X)}), folder / "ref.h5")
    port = MaxModel(chain(with_wrong_first()), control=False)
    capture_workload(Workload(port, {"x": X}), folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5"


@pytest.mark.spec("VIEW-1", "VIEW-30", "VIEW-41")
def test_a_port_to_max_is_looked_at_as_any_other(
    serve: Callable[..., Served], ported: tuple[Path, Path]
) -> None:
    one = serve(*ported)
    page = one.page
    one.press("s")
    one.expect_open("layers.0/output")
    one.press("o", "m")
    expect(page.locator("[name=sort]")).to_have_value("execution")
    expect(page.locator("[name=metric]")).to_have_value("mean-abs")
    one.show_worst()
    expect(page.locator("#maps .map")).to_have_count(3)
    # x is 0 to 7 in two rows; x * 2 + 1 in the reference, x * 3 + 1 in the port: the last one errs most.
    for (row, column), values in {(0, 0): [1, 0, 1], (0, 3): [7, 3, 10], (1, 3): [15, 7, 22]}.items():
        box = page.locator("#maps .map").nth(1).bounding_box()
        assert box is not None
        across, down = (column + 0.5) / 4, (row + 0.5) / 2
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        expect(page.locator("#hover")).to_contain_text(f"[{row},{column}]")
        assert [float(word) for word in page.locator("#hover").inner_text().split()[2::2]] == values
    pin = page.locator("#maps .pin")
    expect(pin).to_have_attribute("data-row", "1")
    expect(pin).to_have_attribute("data-column", "3")
    for side, line in (("reference", "def forward(self, x: Any)"), ("target", "def __call__(self, x: Any)")):
        page.locator("#text .side", has_text=side).click()
        expect(page.locator("#text .hll")).to_contain_text(line)
    one.press("j")
    one.expect_open("layers.1/input.x")
    one.press("/")
    page.keyboard.type("layers.2")
    expect(page.locator("#count")).to_have_text("2")
    one.shoot("max")
