"""Ragged batches: anybatch's cut against a loop by hand, Accelerate, Lightning and the Hugging Face Trainer.

    python -m benchmarks.ragged [--quick] [--sizes 32 128 512] [--laws stdlib bimodal ...]

A byte-level GPT of 4 layers x 256 learns from one batch at a time, the same for all, with the same cap on the padded tokens
of a micro-batch: 8 of the batch's longest row. All take their turn on each batch in one process and one thread, by
processor time; ratios are taken batch by batch, then their median. Padding waste and peak memory follow from the
micro-batches; the gradient's error is against float64. Weights stay as they are, so that all see the same model.
"""

import argparse
import copy
import json
import statistics
from dataclasses import asdict, dataclass
from datetime import date

import torch
from torch import Tensor, nn

from benchmarks.contenders import CONTENDERS, Contender, without_warnings
from benchmarks.gpt import ByteGPTForCausalLM
from benchmarks.meter import peak_bytes
from benchmarks.pictures import ragged_picture
from benchmarks.results import DOCS, versions
from benchmarks.texts import LAWS, Sample, collate, draw

RESULTS = DOCS / "benchmarks" / "ragged.json"
PICTURE = DOCS / "pictures" / "ragged.svg"
ROUNDS = {32: 3, 128: 2, 512: 1}
FEW = ["anybatch Tokens", "loop by hand", "HF Trainer, batch_rebalance"]
"""Who runs where a batch takes most of a minute; the others run the loop's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contender on one law of lengths and size of batch."""

    seconds: float
    """Median processor time of an update."""
    speedup: float
    """How many times the rate of the loop by hand; the median over batches."""
    waste: float
    """Padding, as a share of the real tokens."""
    micro_batches: float
    peak_bytes: int
    """Activations at the peak: beyond parameters and gradients."""
    error: float
    """|g - g64| / |g64| of the first batch's gradient."""


def compare(law: str, rows: int, names: list[str], rounds: int) -> dict[str, Result]:
    """All contenders on the same batches, in turn."""
    torch.manual_seed(0)
    model = ByteGPTForCausalLM()
    contenders = {name: CONTENDERS[name](model) for name in names}
    batches = [draw(law, rows, seed) for seed in range(rounds)]
    for contender in contenders.values():
        contender.run(draw(law, 32, seed=1000))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        # who begins changes from batch to batch
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(contenders[name].run(batch))
            if number == 0:
                gradients[name] = contenders[name].optimizer.gradient
    reference = float64_gradient(model, batches[0])
    return {
        name: Result(
            seconds=statistics.median(seconds[name]),
            speedup=statistics.median(
                theirs / mine for mine, theirs in zip(seconds[name], seconds["loop by hand"], strict=True)
            ),
            error=float((gradients[name].double() - reference).norm() / reference.norm()),
            **shape(contender, batches),
        )
        for name, contender in contenders.items()
    }


def shape(contender: Contender, batches: list[list[Sample]]) -> dict[str, float | int]:
    """What the micro-batches say: how many, how much padding, and the peak of the largest."""
    cuts = [contender.micro_batches(batch) for batch in batches]
    real = sum(len(sample["input_ids"]) for batch in batches for sample in batch)
    padded = sum(padded_tokens(part) for cut in cuts for part in cut)
    largest = max((part for cut in cuts for part in cut), key=padded_tokens)
    return {
        "waste": padded / real - 1,
        "micro_batches": statistics.mean(map(len, cuts)),
        "peak_bytes": activations(contender.model, largest),
    }


def padded_tokens(samples: list[Sample]) -> int:
    return len(samples) * max(len(sample["input_ids"]) for sample in samples)


def activations(model: nn.Module, samples: list[Sample]) -> int:
    """Live bytes at the peak of one forward and backward, beyond parameters and gradients."""
    part = collate(samples)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    peak = peak_bytes(lambda: model(**part).loss.backward(), [])
    for parameter in parameters:
        parameter.grad = None
    return peak


def float64_gradient(model: nn.Module, samples: list[Sample]) -> Tensor:
    """The whole batch's gradient in float64: the summed loss of rows of like length at a time, over all target tokens."""
    twin = copy.deepcopy(model).double()
    total = sum(len(sample["labels"]) - 1 for sample in samples)
    ordered = sorted(samples, key=lambda sample: len(sample["input_ids"]))
    for start in range(0, len(ordered), 4):
        twin(**collate(ordered[start : start + 4]), num_items_in_batch=total).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])


def show(title: str, results: dict[str, Result]) -> None:
    print(f"\n{title}\n  {'':30} rate    waste  micro-batches   peak MB   error    seconds")
    for name, result in results.items():
        print(
            f"  {name:30} {result.speedup:4.2f} x {result.waste:6.1%} {result.micro_batches:10.0f} "
            f"{result.peak_bytes / 2**20:12.0f}   {result.error:7.1e}  {result.seconds:7.2f}",
            flush=True,
        )


def save(title: str, results: dict[str, Result]) -> None:
    """Put one case into the results, beside those of earlier runs, and draw them all again."""
    kept = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    kept[title] = {"date": date.today().isoformat(), **{name: asdict(result) for name, result in results.items()}}
    used = versions("accelerate", "lightning", "transformers")
    RESULTS.write_text(json.dumps({"versions": used, "cases": kept}, indent=1) + "\n")
    PICTURE.write_text(ragged_picture(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches of 32, one each, nothing written: two minutes")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--laws", nargs="+", default=["stdlib", *LAWS], choices=["stdlib", *LAWS])
    parser.add_argument("--rounds", type=int, help="batches per case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_warnings()
    for rows in [32] if options.quick else options.sizes:
        for law in options.laws:
            # functions are long: a batch of 512 of them takes minutes
            if law == "stdlib" and rows == 512:
                continue
            is_slow = rows == 512 or (law == "stdlib" and rows == 128)
            rounds = options.rounds or (1 if options.quick or is_slow else ROUNDS[rows])
            results = compare(law, rows, FEW if is_slow else list(CONTENDERS), rounds)
            title = f"{law}, batch {rows}"
            show(title, results)
            if not options.quick:
                save(title, results)


if __name__ == "__main__":
    main()
