"""The first thing a reader sees: one sentence that says how it went, and the few numbers that matter."""

from dataclasses import dataclass

from anybatch.app.records.run_folder import Results
from anybatch.app.records.schema import Comparison, PlanRecord, ProofRecord, Scalar, at_epoch
from anybatch.app.report.comparison_charts import num_seeds
from anybatch.app.report.proof_charts import finding_of, largest_error, proof_sentence, written_precision
from anybatch.app.report.writing import duration, is_share, number, percent, plural, size, words, written_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number at the head of the page."""

    label: str
    value: str
    note: str = ""


def summary(results: Results) -> str:
    """One plain sentence on the whole run."""
    task = written_task(results.run.task)
    if results.proof is not None:
        return proof_sentence(task, results.proof)
    if results.comparison is not None and results.comparison.arms:
        return _compared(task, results.comparison)
    if results.trace is not None:
        return _traced(results)
    if results.plan is not None and results.plan.sentences:
        return results.plan.sentences[0]
    if results.run.kind == "advise":  # of an earlier version
        return f"Advice on {task}, by a command that is no longer there: advice.json in this folder holds what it said."
    return _trained(results)


def headline(results: Results) -> tuple[Figure, ...]:
    """The few numbers that matter; what the run does not have is left out."""
    if results.proof is not None:
        return _proof_figures(results.proof)
    if results.comparison is not None and results.comparison.arms:
        return _comparison_figures(results.comparison)
    if results.plan is not None:
        return _plan_figures(results.plan)
    return _training_figures(results)


def _plan_figures(plan: PlanRecord) -> tuple[Figure, ...]:
    total = sum(part or 0 for part in plan.breakdown.values())
    fits = f"{number(plan.micro_batch)} {plan.unit}" if plan.micro_batch else "none"
    return (
        Figure(label="largest micro-batch", value=fits),
        Figure(label="its peak", value=size(total)),
        Figure(label="what there is", value=size(plan.limit), note="after the margin"),
    )


def last_metric(results: Results) -> tuple[str, float] | None:
    """The first metric of the last epoch that has one, and its value."""
    for point in reversed(results.epochs):
        for name, value in point.metrics.items():
            if value is not None:
                return name, value
    return None


def total_seconds(results: Results) -> float | None:
    """Seconds of all epochs; of all updates where no epoch has ended."""
    spans = [point.seconds for point in results.epochs] or [point.seconds for point in results.updates]
    known = [seconds for seconds in spans if seconds is not None]
    return sum(known) if known else None


def written_metric(name: str, value: float) -> str:
    """A metric's value, as a percentage where it is a share."""
    return percent(value) if is_share(name, [value]) else number(value)


def _trained(results: Results) -> str:
    task = written_task(results.run.task)
    done = results.updates[-1].update if results.updates else 0
    if not done and not results.epochs:
        return f"{task} has not finished an update yet."
    planned = _count(results.run.plan.get("updates"))
    reached = last_metric(results)
    score = f"{written_metric(*reached)} validation {words(reached[0])}" if reached else ""
    if not score and results.epochs and results.epochs[-1].valid_loss is not None:
        score = f"a validation loss of {number(results.epochs[-1].valid_loss)}"
    after = f" after {plural(len(results.epochs), 'epoch')}" if results.epochs else ""
    begin = f"{task} reached {score}{after}" if score else f"{task} trained{after}"
    batch, micro_batch = _count(results.run.plan.get("batch")), _count(results.run.plan.get("micro_batch"))
    of_rows = f" with batches of {plural(batch, 'row')}" if batch else ""
    cut = f" in micro-batches of {number(micro_batch)}" if batch and micro_batch and micro_batch < batch else ""
    seconds = total_seconds(results)
    took = f", in {duration(seconds)}" if seconds else ""
    sentence = f"{begin}: {plural(done, 'update')}{of_rows}{cut}{took}."
    of_planned = f" of {number(planned)}" if planned else ""
    because = f": {results.run.reason}" if results.run.reason else ""
    if results.run.status == "stopped":
        return f"{sentence} It was stopped at update {number(done)}{of_planned}{because}."
    if results.run.status == "failed":
        return f"{sentence} It failed at update {number(done)}{of_planned}{because}."
    if results.run.status == "running":
        return f"{sentence} It had not ended when this page was written: update {number(done)}{of_planned}."
    return sentence


def _traced(results: Results) -> str:
    assert results.trace is not None
    micro_batches = {entry.micro_batch for entry in results.trace.stages} - {None}
    parts = [f"One update of {written_task(results.run.task)}, stage by stage"]
    if micro_batches:
        parts.append(f" through {plural(len(micro_batches), 'micro-batch')}")
    layers = [layer for layer in results.trace.layers if layer.kind != "prediction"]
    if layers:
        parts.append(f"; then one sample through {plural(len(layers), 'layer')}")
    return "".join(parts) + "."


def _compared(task: str, comparison: Comparison) -> str:
    seeds = plural(num_seeds(comparison), "seed")
    sentence = f"{task}, trained in {plural(len(comparison.arms), 'way')}, {seeds} each"
    ends = _ends(comparison)
    if ends is None:
        return f"{sentence}."
    (low, lowest), (high, highest) = ends
    if low == high:
        return f"{sentence}: all end with a validation {words(comparison.metric)} of {low}."
    return f"{sentence}: their mean validation {words(comparison.metric)} ends between {low} ({lowest}) and {high} ({highest})."


def _ends(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """The lowest and the highest mean of the metric, each with its arm. Whether they differ is for the findings to say."""
    means = [
        (mean, arm.name)
        for arm in comparison.arms
        if (mean := at_epoch(arm, 0, lambda point: point.metric).mean) is not None
    ]
    if not means:
        return None
    write = percent if is_share(comparison.metric, [mean for mean, _ in means]) else number
    lowest, highest = min(means), max(means)
    return (write(lowest[0]), lowest[1]), (write(highest[0]), highest[1])


def _proof_figures(proof: ProofRecord) -> tuple[Figure, ...]:
    verdict = Figure(label="verdict", value=finding_of(proof))
    errors = [
        Figure(
            label=f"largest error, {written_precision(proof, precision)}",
            value="not finite" if (error := largest_error(proof, precision)) is None else number(float(f"{error:.2g}")),
            note=f"over {plural(sum(cut.precision == precision for cut in proof.cuts), 'cut')}",
        )
        for precision in dict.fromkeys(cut.precision for cut in proof.cuts)
    ]
    parameters = max((len(cut.parameters) for cut in proof.cuts), default=0)
    return (
        verdict,
        *errors,
        Figure(label="compared", value=plural(proof.rows or 0, "row"), note=plural(parameters, "parameter")),
    )


def _comparison_figures(comparison: Comparison) -> tuple[Figure, ...]:
    runs = [run for arm in comparison.arms for run in arm.runs]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    figures = []
    if ends := _ends(comparison):
        (low, _), (high, _) = ends
        value = low if low == high else f"{low.removesuffix(' %')} to {high}"
        figures.append(
            Figure(label=f"validation {words(comparison.metric)}", value=value, note="lowest and highest mean")
        )
    figures.append(Figure(label="ways to train", value=number(len(comparison.arms))))
    figures.append(Figure(label="training runs", value=number(len(runs))))
    epochs = max((len(run.epochs) for run in runs), default=0)
    figures.append(Figure(label="epochs each", value=number(epochs)))
    if seconds:
        figures.append(Figure(label="time in all", value=duration(sum(seconds))))
    return tuple(figures)


def _training_figures(results: Results) -> tuple[Figure, ...]:
    figures: list[Figure] = []
    plan = results.run.plan
    if reached := last_metric(results):
        name, value = reached
        figures.append(Figure(label=f"validation {words(name)}", value=written_metric(name, value), note="last epoch"))
    losses = [(point.valid_loss, point.epoch) for point in results.epochs if point.valid_loss is not None]
    if losses:
        lowest, epoch = min(losses)
        note = (
            "last epoch"
            if (losses[-1][0], losses[-1][1]) == (lowest, epoch)
            else f"lowest {number(lowest)}, epoch {epoch}"
        )
        figures.append(Figure(label="validation loss", value=number(losses[-1][0]), note=note))
    if results.updates:
        done, planned = results.updates[-1].update, _count(plan.get("updates"))
        note = f"of {number(planned)} planned" if planned and planned != done else ""
        figures.append(Figure(label="updates", value=number(done), note=note))
    batch, micro_batch = _count(plan.get("batch")), _count(plan.get("micro_batch"))
    if batch:
        note = f"in micro-batches of {number(micro_batch)}" if micro_batch else ""
        figures.append(Figure(label="rows per batch", value=number(batch), note=note))
    if parameters := _count(plan.get("parameters")):
        figures.append(Figure(label="parameters", value=number(parameters)))
    peaks = [curve.peak_bytes for curve in results.memory if curve.peak_bytes is not None]
    if peaks:
        figures.append(Figure(label="peak memory", value=size(max(peaks))))
    if seconds := total_seconds(results):
        figures.append(Figure(label="time", value=duration(seconds)))
    return tuple(figures)


def _count(value: Scalar) -> int:
    return int(value) if isinstance(value, int | float) else 0
