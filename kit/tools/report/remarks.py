"""What the reader of a report should know, in sentences: what went wrong, and what was wasted.

Promises: a remark follows from the record or the metrics, gives the figures, and says what to do where that is known.
"""

from collections.abc import Iterator

import numpy as np

from kit.failures.exits import ERROR_FILE
from kit.run.answers import few_texts, unended
from kit.tools.report.measures import LOSS
from kit.tools.report.metrics import FEWEST_ROWS, finite_number, first_and_last
from kit.tools.report.preference_remarks import preference_remarks, unmoved_loss
from kit.tools.report.runs import ReportedRun
from kit.tools.report.words import after, words

# Below these thresholds there is no remark.
MUCH_WAITING, MUCH_PADDING, MUCH_CLIPPING = 0.1, 0.25, 0.9  # shares of the time, of the tokens, of the steps
MUCH_CUT = 0.05  # share of the samples
OVERFITTING, MORE_MEMORY = 1.02, 1.1  # ratios: eval_loss to its lowest; measured memory to the predicted
MUCH_SENT = 0.3  # share of the time, in collectives
NUM_LISTED = 5  # data sets named in a remark


def remarks(run: ReportedRun) -> list[str]:
    """Return the remarks about a run, the most serious first; empty for a run without any."""
    of_preferences = preference_remarks(run)
    return [*_end(run), *_steps(run), *_losses(run), *of_preferences, *_answers(run), *_waste(run), *_data(run)]


def _end(run: ReportedRun) -> Iterator[str]:
    if not run.record.get("finished_steps") and (run.folder / ERROR_FILE).is_file():
        text = (run.folder / ERROR_FILE).read_text(encoding="utf-8", errors="replace").strip()
        yield f"The run ended with an error:\n{text[:2000]}"
    if run.strategy.rehearsal:
        yield "This was a rehearsal on a CPU of a config for GPUs: its speed and its memory say nothing about GPUs."
    if not len(run.training):
        yield "No step has been done yet."


def _steps(run: ReportedRun) -> Iterator[str]:
    skipped = [row["step"] for row in run.odd_steps if "nonfinite" in row]
    if skipped:
        yield (
            f"{_steps_named(skipped)} skipped because loss or gradient was not finite. The samples are listed below. A "
            "frequent cause is a learning rate that is too high."
        )
    spikes = [row["step"] for row in run.odd_steps if "loss_spike" in row]
    if spikes:
        yield f"{_steps_named(spikes)} marked by a loss far above the usual. The samples are listed below."
    limit = run.recipe.max_grad_norm
    norms = run.training.values("grad_norm")
    clipped = (norms > limit).mean() if len(norms) and limit else 0.0
    if clipped > MUCH_CLIPPING and len(norms) >= FEWEST_ROWS:
        yield (
            f"The gradient was clipped in {clipped:.0%} of the steps (max_grad_norm {limit:g}), so its length had "
            "hardly any effect."
        )


def _steps_named(steps: list[int]) -> str:
    return f"Step {steps[0]:,} was" if len(steps) == 1 else f"{len(steps):,} steps, the first {steps[0]:,}, were"


def _losses(run: ReportedRun) -> Iterator[str]:
    ends = first_and_last(run.training.values("loss"))
    has_fallen = not ends or ends[1] < ends[0]
    if ends and not has_fallen and not (run.is_of_preferences and unmoved_loss(run)):
        first, last, num = ends
        yield (
            f"The training loss did not fall: {first:.4g} in the first {num} logged steps, {last:.4g} in the last "
            f"{num}."
        )
    evaluations, best = run.evaluations, LOSS.best(run.evaluations)
    if not best or len(evaluations) < 2:
        return
    last_row = evaluations[-1]
    if best["eval_loss"] > 0 and last_row["eval_loss"] > OVERFITTING * best["eval_loss"]:
        yield (
            f"The evaluation loss was lowest {after(best['step'])} ({best['eval_loss']:.4g}) and is "
            f"{last_row['eval_loss']:.4g} {after(last_row['step'])}: "
            f"{'the model overfits. Train fewer steps' if has_fallen else 'try a lower learning_rate'}, or keep the "
            "best checkpoint (--keep_best true)."
        )
    exact = [row["eval_exact_match"] for row in evaluations if "eval_exact_match" in row]
    if len(exact) > 1 and exact[-1] < exact[0]:
        yield f"Fewer answers are exact than before: {exact[0]:.1%} at first, {exact[-1]:.1%} at last."


def _answers(run: ReportedRun) -> Iterator[str]:
    last = run.evaluations[-1] if run.evaluations else {}
    stops = run.record["data"].get("stop_tokens")
    doubts = unended(last, run.recipe, stops if isinstance(stops, dict) else {}) if last.get("step") else []
    yield from (f"{doubt[0].upper()}{doubt[1:]}." for doubt in doubts + few_texts(last))


def _waste(run: ReportedRun) -> Iterator[str]:
    waiting = mean(run, "data_wait_share")
    if waiting is not None and waiting > MUCH_WAITING:
        way = "; --streaming false reads and tokenises the data before training" if run.recipe.streaming else ""
        yield f"{waiting:.0%} of the time was spent waiting for data{way}."
    waiting = mean(run, "rank_wait_share")
    if waiting is not None and waiting > MUCH_WAITING:
        slowest, counts = np.unique(run.training.values("slowest_rank"), return_counts=True)
        often = f", most often rank {slowest[counts.argmax()]:.0f}" if len(slowest) else ""
        yield f"{waiting:.0%} of the time was spent waiting for the slowest rank{often}."
    sending = mean(run, "communication_share")
    if sending is not None and sending > MUCH_SENT:
        yield (
            f"{sending:.0%} of the time even the slowest rank waited for collectives: the network between the ranks is "
            f"what is slow, not their computation. {_fewer_bytes(run)}"
        )
    padding = mean(run, "padding_share")
    if padding is not None and padding > MUCH_PADDING:
        way = "" if run.recipe.packing else "; --packing true, or a smaller per_device_train_batch_size, avoids it"
        yield f"{padding:.0%} of the computed tokens were padding{way}."
    predicted, measured = predicted_bytes(run), peak_bytes(run)
    if predicted and measured and measured > MORE_MEMORY * predicted:
        yield f"The run needed {measured / 2**30:.1f} GiB of memory, {predicted / 2**30:.1f} GiB were predicted."


def _fewer_bytes(run: ReportedRun) -> str:
    """What sends fewer bytes over the network under the strategy of the run, what changes no result first."""
    ways = []
    if run.strategy.sharded_layers:
        ways.append("a larger per_device_train_batch_size, as far as memory goes, gathers the weights less often")
        ways.append("--config fsdp_hybrid gathers them within a machine only")
    if run.recipe.method == "full":
        ways.append("--method lora exchanges gradients of adapters only")
    return f"What sends fewer bytes: {'; '.join(ways)}." if ways else "`kit doctor` measures it."


def _data(run: ReportedRun) -> Iterator[str]:
    left_out, cut = [], []
    for source in run.record["data"]["sources"]:
        if not isinstance(source, dict):
            continue
        counts = {key: n for key, n in source.items() if isinstance(n, int) and finite_number(n) is not None}
        for key, number in counts.items():
            if words(key).startswith("left out: ") and number:
                left_out.append(f"{number:,} of {source.get('name')} ({words(key).removeprefix('left out: ')})")
        share = counts.get("num_truncated", 0) / max(counts.get("num_samples", 0), 1)
        if share > MUCH_CUT:
            cut.append(f"{share:.0%} of {source.get('name')}")
    if left_out:
        yield f"Rows were left out: {_listed(left_out)}."
    if cut:
        yield f"Samples were cut at {run.recipe.max_length:,} tokens (max_length): {_listed(cut)}."


def _listed(texts: list[str]) -> str:
    more = len(texts) - NUM_LISTED
    return ", ".join(texts[:NUM_LISTED]) + (f" and {more} more" if more > 0 else "")


def mean(run: ReportedRun, key: str) -> float | None:
    """Return the mean of a share over the logged steps, without the first, which is slow; None without any."""
    values = run.training.values(key)
    return float((values[1:] if len(values) > 1 else values).mean()) if len(values) else None


def predicted_bytes(run: ReportedRun) -> float | None:
    """Return the peak memory of a process that was predicted before the run; None if it was not."""
    plan = run.record.get("plan")
    value = plan.get("tensors") if isinstance(plan, dict) else None
    number = finite_number(value)
    return number if number and number > 0 else None


def peak_bytes(run: ReportedRun) -> float | None:
    """Return the highest memory that rank 0 measured; None if it measured none."""
    return float(max(run.training.values("peak_memory_bytes"), default=0.0)) or None
