"""The order of the packages, and a picture of it made from their imports.

python docs/architecture.py     # draws docs/architecture.svg
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From below: a package, or a module right in kit/, imports only from floors below its own, and nothing on its floor.
# The core is what training, evaluating, saving and exporting need.
CORE = [
    ["system"],
    ["hub", "scoring"],
    ["schema"],
    ["specs"],
    ["config"],
    ["data"],
    ["model"],
    ["strategy"],
    ["checkpoint", "failures"],
    ["memory"],
    ["train"],
    ["run"],
    ["rollouts"],
    ["tasks"],
    ["evaluate"],
    ["preflight", "export"],
]
# Tools look at a machine, a plan, data or a run. The core imports none of them.
TOOLS = [["tools"], ["cli"]]
# kit/tasks/spec.py and kit/tasks/*/spec.py, which the recipe is made of, are below it, and the rest of a task above.
SPECS = "kit.specs"
# By package. In one that is not named here, parts import each other without a circle.
FLOORS = {
    "kit": [*CORE, *TOOLS, ["optional_tools"]],  # what only the script calls is above all
    "kit.data": [["media", "strict_json"], ["read", "chat"], ["kinds"], ["samples"], ["feed"], ["stream"], ["open"]],
    "kit.tools": [
        ["text_table", "typed"],
        ["plan", "convert", "opened", "push", "verify_resume"],
        ["doctor", "report", "api", "chat"],
    ],
}


@cache
def modules() -> dict[str, ast.Module]:
    """The parsed source of each module of the kit by its full name: ``kit.train.step``."""
    paths = [path for path in (ROOT / "kit").rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def running(tree: ast.AST, at_import_only: bool = False) -> Iterator[ast.AST]:
    """All nodes, without blocks for tools if there are any; or those that run at import."""
    skipped = ("HAS_TOOLS", "TYPE_CHECKING") if at_import_only else ("HAS_TOOLS",)
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in skipped:
            nodes += node.orelse
            continue
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        nodes += ast.iter_child_nodes(node)


@cache
def imported(tree: ast.AST, at_import_only: bool = False) -> list[str]:
    """Full names of what is imported: ``kit.train.step.train_step``, or ``kit.preflight`` for ``from kit import``."""
    names = []
    for node in running(tree, at_import_only):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the order"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def part_of(name: str, depth: int) -> str:
    """The part that a module belongs to, named by ``depth`` words."""
    words = name.split(".")
    return SPECS if depth == 2 and words[1:2] == ["tasks"] and "spec" in words else ".".join(words[:depth])


def arrows(depth: int, under: str = "kit") -> set[tuple[str, str]]:
    """(importer, imported) for all parts of ``under``, named by ``depth`` words of their full names."""
    found = set()
    for name, tree in modules().items():
        for other in imported(tree):
            one, two = (part_of(each, depth) for each in (name, other))
            inside = one.startswith(f"{under}.") and two.startswith(f"{under}.") and "__" not in two
            if one != two and inside:
                found.add((one.split(".")[-1], two.split(".")[-1]))
    return found


def reached(name: str, direct: set[tuple[str, str]]) -> set[str]:
    """What ``name`` imports, directly or through others."""
    below = {two for one, two in direct if one == name}
    return below.union(*(reached(each, direct) for each in below))


def closure(imports: list[str]) -> set[str]:
    """Full names of the modules that ``imports`` reach, directly or through others, also inside functions."""
    found: set[str] = set()
    names = list(imports)
    while names:
        name = names.pop()
        module = name if name in modules() else name.rpartition(".")[0]
        if module in modules() and module not in found:
            found.add(module)
            names += imported(modules()[module])
    return found


def main() -> None:
    """Draw the floors and the wall, with an arrow from each package to those it imports, but for what others imply."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 11), layout="constrained")
    axes = figure.subplots()
    at = {}
    for height, names in enumerate(FLOORS["kit"]):
        for i, name in enumerate(names):
            at[name] = ((i + 0.5) / len(names) * 10, height)
    is_root = {"system"}
    direct = {(one, two) for one, two in arrows(2) if two not in is_root}  # everything imports those
    for one, two in sorted(direct):
        if not any((one, other) in direct and two in reached(other, direct) for other in at):
            style = {"arrowstyle": "-|>", "color": "#7799bb", "alpha": 0.7, "shrinkA": 18, "shrinkB": 20}
            axes.annotate("", at[two], at[one], arrowprops=style)
    for name, (x, y) in at.items():
        box = {
            "boxstyle": "round,pad=0.5",
            "facecolor": "#eef3f8" if name in is_root else "#cfe0f0",
            "edgecolor": "#456",
        }
        axes.text(x, y, name, ha="center", va="center", fontsize=12, bbox=box)
    wall = len(CORE) - 0.5
    axes.axhline(wall, color="#456", linestyle="--", linewidth=1)
    for word, y, side in (("tools", wall + 0.08, "bottom"), ("core", wall - 0.08, "top")):
        axes.text(10, y, word, ha="right", va=side, fontsize=10, style="italic", color="#456")
    axes.set_xlim(0, 10)
    axes.set_ylim(-0.6, len(FLOORS["kit"]) - 0.4)
    axes.axis("off")
    figure.savefig(ROOT / "docs/architecture.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
