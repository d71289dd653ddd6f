"""Build the pages of the documentation as a website, in build/site/.

python docs/site.py     # needs the extra docs: python -m pip install -c constraints.txt -e ".[docs]"

The pages are the files of the repository: README.md and what can be reached from it by links. A file of code that a
page links to becomes a page too, so that the site needs no address of a repository. The status is 1 if a link leads
nowhere.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".sh": "bash", ".jinja": "jinja"}
PICTURES = (".svg", ".png")


def stage(folder: Path) -> int:
    """Copy the pages to ``folder``, which they keep their places in. Return their number."""
    waiting, seen = [ROOT / "README.md"], set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        target = folder / page_of(source).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copy(source, target)
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            linked = [(link, (source.parent / link).resolve()) for link in LINK.findall(text)]
            waiting += [path for _, path in linked if path.exists()]  # the build names those that do not
            links = iter([as_page(*each) for each in linked])
            target.write_text(LINK.sub(lambda _, links=links: next(links), text), encoding="utf-8")
        elif source.is_dir():
            names = sorted(path for path in source.iterdir() if path.is_file())
            waiting += names
            lines = [f"- [{path.name}]({page_of(path).name})" for path in names]
            target.write_text("\n".join([f"# {source.relative_to(ROOT).as_posix()}/", "", *lines, ""]))
        elif source.suffix == ".ipynb":
            cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
            target.write_text("\n\n".join(map(text_of_cell, cells)) + "\n", encoding="utf-8")
        else:
            fence = f"````{LANGUAGES.get(source.suffix, '')}\n{source.read_text(encoding='utf-8')}\n````\n"
            target.write_text(f"# {source.relative_to(ROOT).as_posix()}\n\n{fence}", encoding="utf-8")
    return len(seen)


def text_of_cell(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook as Markdown."""
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else f"````python\n{text}\n````"


def page_of(path: Path) -> Path:
    """Return the file of a page: its own, or for code and folders one that is named after it."""
    if path.suffix in (".md", *PICTURES):
        return path
    return path / "index.md" if path.is_dir() else path.with_name(f"{path.name}.md")


def as_page(link: str, path: Path) -> str:
    """Return a link that leads to the page of ``path`` in the site."""
    if path.is_dir():
        return f"{link.rstrip('/')}/index.md"
    return link if page_of(path) == path or not path.exists() else f"{link}.md"


def main() -> int:
    """Write the site. Return the status of the build."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    count = stage(BUILD / "pages")
    shutil.copy(ROOT / "mkdocs.yml", BUILD / "mkdocs.yml")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(BUILD / "mkdocs.yml")]
    done = subprocess.run(command, cwd=BUILD)
    print(f"build/site/: {count} files" if not done.returncode else "the site was not built")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
