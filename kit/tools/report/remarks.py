"""The warnings of a report: errors, overfitting, likelihood displacement, wasted computation.

Promises: a warning follows from the record or the metrics, and gives the figures.
"""

from collections.abc import Iterator

from kit.failures.exits import ERROR_FILE
from kit.run.generation_warnings import limits_of, missing_prompts, truncated_answers
from kit.scoring.own_metric import key_of
from kit.tools.report.runs import ACCURACY, ReportedRun, finite_number

FEWEST_STEPS = 20  # for a tendency
OVERFITTING = 1.02  # ratio of eval_loss to its lowest
FALLEN = 0.2  # nats a token: each token of a chosen answer lost a fifth of its probability; some loss is usual
MANY_FAILED = 0.1  # fraction of the completions
# The lines that count: the last five, or all but the first, which is slow. Then the fraction from which on there is a
# warning, and what to do.
_WASTE = (
    (
        "frac_reward_zero_std",
        -5,
        0.8,
        "of the last groups had zero reward variance, and so no gradient: take harder or easier prompts, or "
        "--dynamic_sampling true",
    ),
    (
        "completions/clipped_ratio",
        -5,
        0.5,
        "of the last completions were truncated at {}: raise it",
    ),
    (
        "data_wait_share",
        1,
        0.1,
        "of the time was spent waiting for data: --streaming false prepares them before training",
    ),
    ("padding_share", 1, 0.25, "of the computed tokens were padding: --packing true avoids it"),
)


def remarks(run: ReportedRun) -> list[str]:
    """Return the warnings about a run, the most serious first; empty for a run without any."""
    return [*_end(run), *_losses(run), *_preferences(run), *_rewards(run), *_answers(run), *_waste(run)]


def _end(run: ReportedRun) -> Iterator[str]:
    if not run.record.get("finished_steps") and (run.folder / ERROR_FILE).is_file():
        text = (run.folder / ERROR_FILE).read_text(encoding="utf-8", errors="replace").strip()
        yield f"The run ended with an error:\n{text[:2000]}"
    if run.strategy.cpu_dry_run:
        yield "This was a dry run on a CPU of a config for GPUs: its speed and memory say nothing about GPUs."
    for key, what in (("nonfinite", "Skipped steps (NaN or Inf in loss or gradient)"), ("loss_spike", "Loss spikes")):
        steps = [row["step"] for row in run.odd_steps if key in row]
        if steps:
            yield f"{what}: {len(steps):,}, the first at step {steps[0]:,}. Samples: below."


def _losses(run: ReportedRun) -> Iterator[str]:
    if run.recipe.rolls_out:
        return  # the loss of a step says nothing, and that of an evaluation is not minimised
    losses, evaluations = run.values("loss"), run.values("eval_loss")
    tenth = max(len(losses) // 10, 5)
    if len(losses) >= FEWEST_STEPS and losses[-tenth:].mean() >= losses[:tenth].mean():
        yield (
            f"The training loss did not fall: {losses[:tenth].mean():.4g} in the first {tenth} logged steps, "
            f"{losses[-tenth:].mean():.4g} in the last {tenth}. Try another learning_rate."
        )
    step, lowest = run.best("eval_loss") or (0, 0.0)
    if lowest > 0 and evaluations[-1] > OVERFITTING * lowest:
        yield (
            f"The model overfits: the evaluation loss was lowest after step {step:,} ({lowest:.4g}) and is "
            f"{evaluations[-1]:.4g} at the end. --keep_best true keeps the best checkpoint."
        )


def _preferences(run: ReportedRun) -> Iterator[str]:
    accuracies = run.values(ACCURACY)
    if run.steps_done >= FEWEST_STEPS and len(accuracies) and accuracies[-1] <= 0.5:
        yield (
            f"The accuracy is not above chance: {accuracies[-1]:.1%} of the evaluation pairs. Try another "
            "learning_rate, and check in `kit inspect` whether chosen and rejected are swapped."
        )
    logps, lengths = (run.values(f"eval_{key}/chosen") for key in ("logps", "lengths"))
    if len(logps) > 1 and len(lengths) and logps[0] - logps[-1] > FALLEN * lengths[-1] > 0:
        yield (
            f"Likelihood displacement: the log-probability of chosen answers fell, {logps[0]:,.1f} → {logps[-1]:,.1f}. "
            "Only the margin to the rejected ones is trained. Try fewer steps, or a lower learning_rate."
        )


def _rewards(run: ReportedRun) -> Iterator[str]:
    for name in map(key_of, run.recipe.rewards):
        failed = run.values(f"rewards/{name}/failed").sum()
        if failed > MANY_FAILED * run.recipe.global_batch_size * len(run.values("reward")):
            yield f"The reward {name} failed for {failed:,.0f} completions, which were dropped. See the run's output."


def _answers(run: ReportedRun) -> Iterator[str]:
    last = run.answered[-1] if run.answered else {}
    counts = {key: int(number) for key, value in last.items() if (number := finite_number(value)) is not None}
    stops = run.record["data"].get("stop_tokens") or {}
    doubts = truncated_answers(counts, run.recipe, stops) if counts.get("step") else []
    for doubt in [*doubts, *missing_prompts(counts)]:
        yield f"{doubt[0].upper()}{doubt[1:]}."


def _waste(run: ReportedRun) -> Iterator[str]:
    for key, start, much, text in _WASTE:
        shares = run.values(key)[start:]
        if len(shares) and shares.mean() > much:
            yield f"{shares.mean():.0%} {text.format(' or '.join(limits_of(run.recipe)))}."
