"""Makes the pictures in docs/pictures: runs the kit in a temporary folder, and photographs its pages with Chromium.

    python docs/pictures.py                   # all, in about five minutes on two cores
    python docs/pictures.py report inspect

Each is a PNG of few colours, at most ``MOST_BYTES`` large.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("pictures")
MOST_BYTES = 250_000
FINETUNE = f"{sys.executable} {ROOT}/recipes/finetune.py"
KIT = f"{sys.executable} -m kit.cli.main"
# Makes what a page shows: each command runs once, in the folder of the pages, before the first page that needs it.
RUNS = {
    "tiny": f"{FINETUNE} --output_dir runs/tiny-single",
}


@dataclass(frozen=True)
class Picture:
    """A page, and the part of it that is in the picture: its upper left corner."""

    command: str  # writes the page, in the folder of the pages
    page: str  # relative to that folder
    width: int  # CSS pixels
    height: int
    needs: tuple[str, ...] = ()  # of RUNS
    scale: float = 1  # pixels of the picture for each CSS pixel


PICTURES = {
    "report": Picture(f"{KIT} report runs/tiny-single", "runs/tiny-single/report.html", 1280, 850, ("tiny",)),
    "readme-report": Picture(
        f"{KIT} report runs/tiny-single", "runs/tiny-single/report.html", 860, 530, ("tiny",), scale=1.86
    ),
    "inspect": Picture(
        f"cp {ROOT}/recipes/tiny/*.jsonl . && {KIT} inspect --recipe tiny --dataset train.jsonl "
        "--eval_dataset eval.jsonl --max_length 96 -n 2 --html look.html",
        "look.html",
        1280,
        730,
    ),
}


def main(names: list[str]) -> int:
    """Make the named pictures, or all."""
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        print(f"error: no picture {unknown[0]}; there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    done: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PICTURES:
            picture = PICTURES[name]
            for command in [*(RUNS[each] for each in picture.needs), picture.command]:
                if command not in done:
                    subprocess.run(command, shell=True, cwd=folder, env=_environment(), check=True)
                    done.add(command)
            path = FOLDER / f"{name}.png"
            photograph(Path(folder) / picture.page, picture, path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


def photograph(page: Path, picture: Picture, path: Path) -> None:
    """Write the upper left part of a page as a PNG with 256 colours."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--force-device-scale-factor={picture.scale}"]
        command += [f"--window-size={picture.width},{picture.height}", f"--screenshot={path}"]
        command += [f"{page.as_uri()}"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    # The method keeps colours of few points, such as that of a thin line.
    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    size = path.stat().st_size
    assert size <= MOST_BYTES, f"{path} has {size:,} bytes, more than {MOST_BYTES:,}: take a smaller part of the page"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
