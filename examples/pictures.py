"""Make README's pictures of what `make demo` leaves: the report and the page, in a headless Chromium."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

REPORT = Path("demo/report.html")
VERIFIED = Path("demo/verified")
FOLDER = Path("examples")
LARGEST = 300_000  # bytes of a picture
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    """Run it from the project's root, after the demo."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"no browser on the PATH, expected one of {', '.join(BROWSERS)}")
    for path in (REPORT, VERIFIED):
        if not path.exists():
            sys.exit(f"{path}: is not there; `make demo` writes it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        picture_of_report(browser, FOLDER / "report.png")
        picture_of_page(browser, FOLDER / "view.png")
        browser.close()


def picture_of_report(browser: Browser, path: Path) -> None:
    """The first screen of the report."""
    page = browser.new_page(viewport={"width": 960, "height": 1120}, device_scale_factor=0.8)
    page.goto(REPORT.resolve().as_uri())
    page.screenshot(path=path)
    check_size(path)


def picture_of_page(browser: Browser, path: Path) -> None:
    """The page of `tcap view`: the first suspect, diagnosed."""
    with served(VERIFIED) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(address)
        page.locator("html[data-ready=true]").wait_for()
        page.keyboard.press("s")
        page.locator("#charts figure").first.wait_for()
        page.keyboard.press("d")
        page.locator("#diagnosis h3").first.wait_for()
        page.wait_for_load_state("networkidle")
        page.screenshot(path=path)
    check_size(path)


@contextmanager
def served(subject: Path) -> Iterator[str]:
    """The address at which `tcap view` serves a subject."""
    command = [sys.executable, "-m", "tensorcap_cli", "view", str(subject), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            words = (word for line in process.stdout or () for word in line.split())
            yield next(word for word in words if word.startswith("http://"))
        finally:
            process.terminate()


def check_size(path: Path) -> None:
    """A picture that README shows is small."""
    size = path.stat().st_size
    if size > LARGEST:
        sys.exit(f"{path}: {size:,} bytes, expected at most {LARGEST:,}")
    print(f"{path}: {size:,} bytes")


if __name__ == "__main__":
    main()
