"""Draw the pictures of `specs/equivalence-knowledge.md`: `python -m tests.equivalence.knowledge_pictures`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from tensorcap.equivalence.forced_plot import plot_forced
from tests.equivalence.test_forced_decoding import stages_5_and_6

FOLDER = Path(__file__).parents[2] / "specs" / "pictures"
PICTURES = {
    "": "a right port, with attention by another kernel",
    "scale": "attention scores 10 % too large in one of two layers",
    "cache": "positions off by one behind the prompt",
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for mistake, title in PICTURES.items():
        path = FOLDER / f"equivalence-{mistake or 'right'}.png"
        plot_forced(path, stages_5_and_6(mistake), title=title)
        Image.open(path).quantize(16).save(path, optimize=True)
