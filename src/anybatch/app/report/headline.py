"""The head of the page: one sentence on how the run went, and the few numbers that matter."""

from typing import NamedTuple

from anybatch.app.records.run_folder import Results
from anybatch.app.records.schema import Comparison, PlanRecord, ProofRecord, at_epoch
from anybatch.app.report.comparison_charts import num_seeds
from anybatch.app.report.proof_charts import proof_sentence, written_error, written_precision
from anybatch.app.report.writing import duration, is_share, number, percent, size, words, written_task
from anybatch.display import plural


class Figure(NamedTuple):
    """One number at the head of the page."""

    label: str
    value: str
    note: str = ""


def summary(results: Results) -> str:
    """Summarize the run in one sentence."""
    task = written_task(results.run.task)
    if results.proof is not None:
        return proof_sentence(task, results.proof)
    if results.comparison is not None and results.comparison.arms:
        return _compared(task, results.comparison)
    if results.trace is not None:
        micro_batches = {entry.micro_batch for entry in results.trace.stages} - {None}
        num_layers = sum(layer.kind != "prediction" for layer in results.trace.layers)
        through = f" through {plural(len(micro_batches), 'micro-batch')}" if micro_batches else ""
        then = f"; then one sample through {plural(num_layers, 'layer')}" if num_layers else ""
        return f"One update of {task}, stage by stage{through}{then}."
    if results.plan is not None and results.plan.sentences:
        return results.plan.sentences[0]
    if results.run.kind == "advise":  # written by an earlier version
        return f"Advice on {task}, by a command that is no longer there: advice.json in this folder holds what it said."
    return _trained(task, results)


def _compared(task: str, comparison: Comparison) -> str:
    seeds = plural(num_seeds(comparison), "seed")
    sentence = f"{task}, trained in {plural(len(comparison.arms), 'way')}, {seeds} each"
    ends = _ends(comparison)
    if ends is None:
        return f"{sentence}."
    (low, lowest), (high, highest) = ends
    metric = words(comparison.metric)
    if low == high:
        return f"{sentence}: all end with a validation {metric} of {low}."
    return f"{sentence}: their mean validation {metric} ends between {low} ({lowest}) and {high} ({highest})."


def _ends(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the lowest and the highest mean of the metric, each with its arm."""
    ends = [(at_epoch(arm, 0, lambda point: point.metric).mean, arm.name) for arm in comparison.arms]
    means = [(mean, name) for mean, name in ends if mean is not None]
    if not means:
        return None
    write = percent if is_share(comparison.metric, [mean for mean, _ in means]) else number
    (low, lowest), (high, highest) = min(means), max(means)
    return (write(low), lowest), (write(high), highest)


def _trained(task: str, results: Results) -> str:
    run, epochs = results.run, results.epochs
    done = results.updates[-1].update if results.updates else 0
    if not done and not epochs:
        return f"{task} has not finished an update yet."
    score = ""
    if reached := _last_metric(results):
        score = f" reached {reached[1]} validation {reached[0]}"
    elif epochs and epochs[-1].valid_loss is not None:
        score = f" reached a validation loss of {number(epochs[-1].valid_loss)}"
    after = f" after {plural(len(epochs), 'epoch')}" if epochs else ""
    batch, micro_batch, planned = (_planned(results, name) for name in ("batch", "micro_batch", "updates"))
    of_rows = f" with batches of {plural(batch, 'row')}" if batch else ""
    cut = f" in micro-batches of {number(micro_batch)}" if batch and micro_batch and micro_batch < batch else ""
    seconds = _total_seconds(results)
    took = f", in {duration(seconds)}" if seconds else ""
    sentence = f"{task}{score or ' trained'}{after}: {plural(done, 'update')}{of_rows}{cut}{took}."
    at = f"update {number(done)}" + (f" of {number(planned)}" if planned else "")
    because = f": {run.reason}" if run.reason else ""
    ended = {
        "stopped": f" It was stopped at {at}{because}.",
        "failed": f" It failed at {at}{because}.",
        "running": f" It had not ended when this page was written: {at}.",
    }
    return sentence + ended.get(run.status, "")


def _last_metric(results: Results) -> tuple[str, str] | None:
    """Return the name and value of the first metric of the last epoch that has one."""
    for point in reversed(results.epochs):
        for name, value in point.metrics.items():
            if value is not None:
                return words(name), percent(value) if is_share(name, [value]) else number(value)
    return None


def _total_seconds(results: Results) -> float | None:
    """Return the seconds of all epochs, or of all updates if no epoch has ended."""
    spans = [point.seconds for point in results.epochs] or [point.seconds for point in results.updates]
    known = [seconds for seconds in spans if seconds is not None]
    return sum(known) if known else None


def _planned(results: Results, name: str) -> int:
    value = results.run.plan.get(name)
    return int(value) if isinstance(value, int | float) else 0


def headline(results: Results) -> tuple[Figure, ...]:
    """Return the numbers at the head of the page."""
    if results.proof is not None:
        return _proof_figures(results.proof)
    if results.comparison is not None and results.comparison.arms:
        return _comparison_figures(results.comparison)
    if results.plan is not None:
        return _plan_figures(results.plan)
    return _training_figures(results)


def _proof_figures(proof: ProofRecord) -> tuple[Figure, ...]:
    verdict = "could not be judged" if proof.unjudged else "exact" if proof.is_exact else "not exact"
    figures = [Figure("verdict", verdict)]
    for precision in dict.fromkeys(cut.precision for cut in proof.cuts):
        cuts = [cut for cut in proof.cuts if cut.precision == precision]
        error = max((cut.error for cut in cuts if cut.error is not None), default=None)
        label = f"largest error, {written_precision(proof, precision)}"
        figures.append(Figure(label, written_error(error), f"over {plural(len(cuts), 'cut')}"))
    parameters = max((len(cut.parameters) for cut in proof.cuts), default=0)
    return (*figures, Figure("compared", plural(proof.rows or 0, "row"), plural(parameters, "parameter")))


def _comparison_figures(comparison: Comparison) -> tuple[Figure, ...]:
    runs = [run for arm in comparison.arms for run in arm.runs]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    figures = []
    if ends := _ends(comparison):
        (low, _), (high, _) = ends
        value = low if low == high else f"{low.removesuffix(' %')} to {high}"
        figures.append(Figure(f"validation {words(comparison.metric)}", value, "lowest and highest mean"))
    figures += [
        Figure("ways to train", number(len(comparison.arms))),
        Figure("training runs", number(len(runs))),
        Figure("epochs each", number(max((len(run.epochs) for run in runs), default=0))),
    ]
    return (*figures, Figure("time in all", duration(sum(seconds)))) if seconds else tuple(figures)


def _plan_figures(plan: PlanRecord) -> tuple[Figure, ...]:
    return (
        Figure("largest micro-batch", f"{number(plan.micro_batch)} {plan.unit}" if plan.micro_batch else "none"),
        Figure("its peak", size(sum(part or 0 for part in plan.breakdown.values()))),
        Figure("what there is", size(plan.limit), "after the margin"),
    )


def _training_figures(results: Results) -> tuple[Figure, ...]:
    figures: list[Figure] = []
    if reached := _last_metric(results):
        figures.append(Figure(f"validation {reached[0]}", reached[1], "last epoch"))
    losses = [(point.valid_loss, point.epoch) for point in results.epochs if point.valid_loss is not None]
    if losses:
        lowest, epoch = min(losses)
        note = "last epoch" if losses[-1] == (lowest, epoch) else f"lowest {number(lowest)}, epoch {epoch}"
        figures.append(Figure("validation loss", number(losses[-1][0]), note))
    if results.updates:
        done, planned = results.updates[-1].update, _planned(results, "updates")
        note = f"of {number(planned)} planned" if planned and planned != done else ""
        figures.append(Figure("updates", number(done), note))
    if batch := _planned(results, "batch"):
        micro_batch = _planned(results, "micro_batch")
        note = f"in micro-batches of {number(micro_batch)}" if micro_batch else ""
        figures.append(Figure("rows per batch", number(batch), note))
    if parameters := _planned(results, "parameters"):
        figures.append(Figure("parameters", number(parameters)))
    peaks = [curve.peak_bytes for curve in results.memory if curve.peak_bytes is not None]
    if peaks:
        figures.append(Figure("peak memory", size(max(peaks))))
    if seconds := _total_seconds(results):
        figures.append(Figure("time", duration(seconds)))
    return tuple(figures)
