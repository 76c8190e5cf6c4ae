"""`micro_batch="auto"` against an exhaustive search over the sizes of micro-batches.

    python -m benchmarks.tuning [--quick]

Auto tunes itself on a dozen updates. Then every size on its ladder, its own choice among them, runs the same batch, in turn,
for several rounds, by processor time: the best of these is what an exhaustive search would have found.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import process_time

import torch
from torch import nn

from anybatch import Accumulator, Auto, Batch, Objective, Rows, Split, Tokens, huggingface, supervised
from anybatch.core import cutting as timing
from anybatch.ragged.tuning import LIMIT, sizes_between
from benchmarks.gpt import ByteGPTForCausalLM
from benchmarks.models import SmallTransformer
from benchmarks.texts import collate, draw

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "tuning.json"


def tune(
    model: nn.Module, objective: Objective, auto: Auto, batch: Batch, make: Callable[[int], Split], rounds: int
) -> dict[str, object]:
    """What auto chose, and how its rate compares with that of the best size."""
    accumulator = Accumulator(model, objective, micro_batch=auto)
    for _ in range(LIMIT):
        model.zero_grad()
        accumulator.backward(batch)
    choice = auto.choice
    assert choice is not None
    print(f"  {choice.describe()}")
    sizes = sorted({choice.size, *(trial.size for trial in choice.trials), *_between(choice.trials)})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            accumulator.split = make(size)
            model.zero_grad()
            start = process_time()
            accumulator.backward(batch)
            seconds[size].append(process_time() - start)
    typical = {size: statistics.median(taken) for size, taken in seconds.items()}
    best = min(typical, key=lambda size: typical[size])
    share = typical[best] / typical[choice.size]
    print(f"  best of {len(sizes)} sizes: {best}; auto's {choice.size} runs at {share:.1%} of its rate")
    return {
        "chosen": choice.size,
        "updates": choice.num_updates,
        "best": best,
        "share": share,
        "seconds": {str(size): taken for size, taken in typical.items()},
    }


def _between(trials: tuple) -> list[int]:
    return sizes_between(trials[0].size, trials[-1].size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of seven")
    rounds = 3 if parser.parse_args().quick else 7
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # with one thread, the work done; wall time on a shared machine would tune to who else is at work
    timing.perf_counter = process_time  # type: ignore[assignment]
    tokens = torch.randint(0, 256, (128, 64))
    print("transformer 4 x 128, 128 rows of 64 tokens, by rows")
    by_rows = tune(
        SmallTransformer(),
        supervised(nn.CrossEntropyLoss()),
        Auto(most=128),
        (tokens, tokens.roll(-1, 1)),
        Rows,
        rounds,
    )
    print("GPT 4 x 256, 32 rows of log-normal length, by tokens")
    most = Tokens(4096, learn=True)
    by_tokens = tune(
        ByteGPTForCausalLM(),
        huggingface(),
        Auto(most=most),
        collate(draw("log-normal 1.0", 32, 0)),
        lambda size: Tokens(size, cost=most.cost),
        rounds,
    )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {"date": date.today().isoformat(), "versions": versions, "rows": by_rows, "tokens": by_tokens}, indent=1
        )
        + "\n"
    )
    print(f"\nwritten to docs/benchmarks/{RESULTS.name}")


if __name__ == "__main__":
    main()
