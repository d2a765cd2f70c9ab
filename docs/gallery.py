"""The pictures of docs/gallery.md, out of the notebooks: ``python docs/gallery.py`` writes docs/gallery/, and a test
compares."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "gallery"
# Which of a notebook's pictures stands for it.
CHOSEN = {
    "operators_and_adjoints": 0,
    "lenet": 0,
    "unet": 1,
    "derivatives": 0,
    "inversion": 0,
    "shallow_water": 0,
    "poisson": 1,
    "gpt": 1,
    "fno": 1,
    "graph": 2,
    "grid_training": 0,
    "benchmark": 0,
    "convnet_dist": 0,
    "gb_dist": 0,
}


def pictures(notebook: Path) -> list[bytes]:
    """The PNGs that a notebook shows, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = [o["data"]["image/png"] for c in cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
    return [base64.b64decode(png) for png in shown]


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, which in CHOSEN.items():
        (FOLDER / f"{name}.png").write_bytes(pictures(ROOT / "notebooks" / f"{name}.ipynb")[which])


if __name__ == "__main__":
    sys.exit(main())
