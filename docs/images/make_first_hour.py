"""Draw the picture of docs/first-hour.md: python docs/images/make_first_hour.py RUN

The first screens of RUN/report.html in headless Chromium, which has to be installed: wide and narrow, light and dark.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

TARGET = Path(__file__).parent / "first_hour.png"
HEIGHT = 1500
WIDTHS = (1180, 420)
SCHEMES = {"light": 1, "dark": 0}  # Chromium's values of preferredColorScheme
ZOOM = 0.6  # of the picture, in pixels of the page


def main(run: str) -> None:
    """Write the picture, of 256 colours."""
    page = (Path(run) / "report.html").resolve().as_uri()
    with tempfile.TemporaryDirectory() as folder:
        shots = [
            screen(page, width, scheme, Path(folder) / f"{scheme}{width}.png") for scheme in SCHEMES for width in WIDTHS
        ]
    picture = Image.new("RGB", (sum(shot.width for shot in shots) + 12 * (len(shots) - 1), HEIGHT), "grey")
    left = 0
    for shot in shots:
        picture.paste(shot, (left, 0))
        left += shot.width + 12
    small = picture.resize((round(ZOOM * picture.width), round(ZOOM * HEIGHT)), Image.Resampling.LANCZOS)
    small.quantize(256).save(TARGET, optimize=True)


def screen(page: str, width: int, scheme: str, target: Path) -> Image.Image:
    """The first screen of a page."""
    options = [f"--window-size={width},{HEIGHT}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    command = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000"]
    subprocess.run([*command, *options, f"--screenshot={target}", page], check=True, capture_output=True, timeout=300)
    return Image.open(target).convert("RGB")


if __name__ == "__main__":
    main(*sys.argv[1:])
