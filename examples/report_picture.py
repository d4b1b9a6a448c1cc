"""Make README's picture of a report: the page that `make demo` leaves, in a headless Chromium."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path("demo/report.html")
PICTURE = Path("examples/report.png")
SIZE = (960, 1120)  # pixels of the page
SCALE = 0.8  # pixels of the picture for one of the page
LARGEST = 150_000  # bytes
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    """Run it from the project's root, after the demo."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser on the PATH, expected one of {', '.join(BROWSERS)}")
    if not PAGE.is_file():
        sys.exit(f"{PAGE}: is not there; `make demo` writes it")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}"]
        options += [f"--force-device-scale-factor={SCALE}"]
        url = PAGE.resolve().as_uri()
        subprocess.run([browser, *options, f"--screenshot={PICTURE.resolve()}", url], check=True, timeout=300)
    size = PICTURE.stat().st_size
    if size > LARGEST:
        sys.exit(f"{PICTURE}: {size:,} bytes, expected at most {LARGEST:,}")
    print(f"{PICTURE}: {size:,} bytes")


if __name__ == "__main__":
    main()
