"""Where the kit's own files are. Plain Python, for commands that read no recipe."""

from pathlib import Path

from kit import __version__

PACKAGE = Path(__file__).resolve().parents[1]  # kit/
_IN_WHEEL = PACKAGE / "shipped"  # made when a wheel is built (pyproject.toml), and in no clone
# The folder of recipes/ and accelerate_configs/: of the clone, also where pip installed it editable, or in the wheel.
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE.parent
# Installs the versions again that the kit was tested with.
REINSTALL = "python -m pip install " + (
    f"accelerate-recipes=={__version__}" if ROOT == _IN_WHEEL else "-c constraints.txt -e ."
)
RECIPES = ROOT / "recipes"
ACCELERATE_CONFIGS = ROOT / "accelerate_configs"
