"""``report.html``: a run at a glance, from what it left on disk. One file, no script, no network.

Reads ``run.json`` and ``metrics.jsonl`` only, so it can be made again at any time and says the same.
"""

import html
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem } p.line { color: #57606a }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .25rem .75rem;
border-bottom: 1px solid #d0d7de } .scroll { overflow-x: auto }
"""


def write_report(folder: Path, line: str, answers: list[Any]) -> None:
    """Write ``folder/report.html``.

    Args:
        line: what really ran, as said at the start.
        answers: of the last evaluation: objects with ``prompt``, ``reference``, ``text`` and ``exact``.
    """
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    training = [row for row in rows if "loss" in row]
    evaluation = [row for row in rows if "eval_loss" in row]
    charts = [
        chart(
            "loss, nats per supervised token", [("training", training, "loss"), ("evaluation", evaluation, "eval_loss")]
        ),
        chart("gradient norm", [("", training, "grad_norm")]),
        chart("learning rate", [("", training, "learning_rate")]),
        chart("tokens per second", [("", training, "tokens_per_second")]),
        chart("peak memory of rank 0, GiB", [("", training, "peak_memory_bytes")], scale=2**-30),
    ]
    if any("eval_exact_match" in row for row in evaluation):
        charts.append(chart("exact match", [("", evaluation, "eval_exact_match")]))
    recipe = {key: value for key, value in run["recipe"].items() if value not in (None, [], {})}
    parts = [
        f"<h1>{html.escape(folder.name)}</h1><p class=line>{html.escape(line)}</p>",
        f"<div class=charts>{''.join(f'<div>{svg}</div>' for svg in charts)}</div>",
        section("Evaluation", table(["step", *_eval_keys(evaluation)], evaluation)) if evaluation else "",
        section("Answers", _answers(answers)) if answers else "",
        section("Data", _data_table(run["data"])),
        section("Recipe", table(["key", "value"], [{"key": k, "value": v} for k, v in recipe.items()])),
        section("Versions", table(list(run["versions"]), [run["versions"]])),
    ]
    page = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    page += f"<title>{html.escape(folder.name)}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    temporary = folder / ".report.partial"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(folder / "report.html")


def chart(title: str, series: list[tuple[str, list[dict[str, Any]], str]], scale: float = 1.0) -> str:
    """An inline SVG: a line for each (label, rows, key) over the step."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.subplots()
    for label, rows, key in series:
        points = [(row["step"], row[key] * scale) for row in rows if key in row]
        if points:
            marker = "o" if len(points) < 20 else None
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=label)
    axes.set_ylim(bottom=0)  # or noise looks like news
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        axes.legend(fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2><div class=scroll>{body}</div>"


def table(columns: list[str], rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_shown(row.get(name))}</td>' for name in columns)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _eval_keys(rows: list[dict[str, Any]]) -> list[str]:
    return [key for key in rows[-1] if key.startswith("eval_")]


def _data_table(data: dict[str, Any]) -> str:
    sets = [name for name in ("train", "evaluation") if data[name]]
    rows = [{"": measure, **{name: data[name].get(measure) for name in sets}} for measure in data["train"]]
    return table(["", *sets], rows)


def _answers(answers: list[Any]) -> str:
    rows = [{"asked": a.prompt, "expected": a.reference, "answered": a.text, "exact": a.exact} for a in answers]
    return table(["asked", "expected", "answered", "exact"], rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = html.escape(str(value))
    return f"<pre>{text}</pre>" if " " in text else text
