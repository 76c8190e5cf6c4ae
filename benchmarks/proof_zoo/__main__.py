"""`python -m benchmarks.proof_zoo OUT.json`: `verify` on every setup, what it said, and whether the fixes that it printed work.

A second call goes on where the first stopped; `--only` takes a regex of names, `--table` prints the table alone.
"""

import argparse
import json
import os
import random
import re
import time
import traceback
import warnings
from pathlib import Path

import numpy
import torch

import anybatch
from benchmarks.proof_zoo import fixing, zoo

COLUMNS = {
    "sound": ("exact", "false alarm", "not judged", "refused", "crash"),
    "broken": ("named right", "named wrong", "missed", "not judged", "refused", "crash"),
    "unjudged": ("not judged", "refused", "named right", "named wrong", "exact, right", "exact, wrong", "crash"),
}


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def leaves(batch, at=""):
    if torch.is_tensor(batch):
        yield at, batch
    elif hasattr(batch, "items"):
        for key, value in batch.items():
            yield from leaves(value, f"{at}.{key}")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from leaves(value, f"{at}[{index}]")


def snapshot(setup) -> dict:
    """All that verify is to leave alone."""
    model = setup.model
    state = {f"parameter {name}": held.detach().clone() for name, held in model.named_parameters()}
    state |= {f"buffer {name}": held.detach().clone() for name, held in model.named_buffers()}
    state |= {f"grad {name}": held.grad is None for name, held in model.named_parameters()}
    state |= {f"mode {name}": module.training for name, module in model.named_modules()}
    state |= {f"batch {name}": held.clone() for name, held in leaves(setup.batch)}
    state |= {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": str(numpy.random.get_state())}
    return state | ({"watched": setup.watch()} if setup.watch else {})


def is_same(one, other) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return False if torch.is_tensor(one) or torch.is_tensor(other) else one == other


def verified(setup):
    return anybatch.verify(setup.model, setup.objective, setup.batch, micro_batch=setup.micro_batch, **setup.options)


def run(entry) -> dict:
    seed()
    setup = entry.build()
    before, begin = snapshot(setup), time.perf_counter()
    result = {"verdict": entry.verdict}
    try:
        verdict = verified(setup)
        causes = [{"kind": cause.kind, "explanation": cause.explanation, "fix": cause.fix} for cause in verdict.causes]
        result |= {"finding": verdict.finding, "causes": causes, "notes": list(verdict.notes)}
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        is_refused = isinstance(error, anybatch.AnybatchError)
        result |= {"crash": told, "refused": is_refused, "where": traceback.format_exc()[-900:]}
    result["seconds"] = round(time.perf_counter() - begin, 2)
    after = snapshot(setup)
    result["changed"] = [key for key in before if key not in after or not is_same(before[key], after[key])]
    result["result"] = judge(entry, result)
    if entry.verdict == "broken" and result.get("causes") and entry.literal:
        result["fixed"] = fixed(entry, result["causes"])
    return result


def fixed(entry, causes) -> str:
    def again(setup):
        verdict = verified(setup)
        return verdict.is_exact, f"{verdict.error:.2g} {[cause.kind for cause in verdict.causes]}"

    try:
        return fixing.apply(entry, causes, again)
    except Exception as error:
        return f"error {type(error).__name__}: {error}"


def matches(entry, kind: str, text: str) -> bool:
    if entry.accept and re.search(rf"^(?:{entry.accept})$", kind):
        return True
    return bool(entry.text and re.search(entry.text, text.lower(), re.DOTALL))


def judge(entry, result) -> str:
    if "crash" in result:
        if entry.verdict != "sound" and result["refused"] and matches(entry, "", result["crash"]):
            return "named right"
        return "refused" if result["refused"] else "crash"
    if result["finding"] == "could not be judged":
        return "not judged"
    if result["finding"] == "exact":
        says_note = "saysnote" in entry.text and re.search("even", " ".join(result["notes"]))
        if entry.verdict == "unjudged" and says_note:
            return "not judged"
        right = "exact, right" if entry.exact_ok else "exact, wrong"
        return {"sound": "exact", "broken": "missed", "unjudged": right}[entry.verdict]
    if entry.verdict == "sound":
        return "false alarm"
    cause = result["causes"][0]
    return "named right" if matches(entry, cause["kind"], f"{cause['explanation']} {cause['fix']}") else "named wrong"


def table(results: dict) -> None:
    for verdict, columns in COLUMNS.items():
        mine = {name: result for name, result in results.items() if result["verdict"] == verdict}
        print(f"\n{verdict}: {len(mine)}")
        for column in columns:
            names = [name for name, result in mine.items() if result["result"] == column]
            is_right = column in ("exact", "named right") and verdict != "unjudged"
            print(f"  {column:12} {len(names):4}" + ("" if is_right or not names else f": {', '.join(names)}"))
    tried = {name: result["fixed"] for name, result in results.items() if "fixed" in result}
    print(f"\nprinted fixes applied literally: {sum(told == 'exact' for told in tried.values())} of {len(tried)} exact")
    for name, told in tried.items():
        if told != "exact":
            print(f"    {name}: {told}")
    print(f"left changed: {[name for name, result in results.items() if result['changed']]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    entries, begin = zoo.load(), time.time()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, entry in entries.items():
        if options.table or time.time() - begin > options.seconds:
            break
        if name not in results and re.search(options.only, name):
            results[name] = run(entry)
            told = results[name]
            print(
                f"{entry.verdict:8} {name:48} {told['result']:12} {told['seconds']:6} s {told.get('fixed', '')}",
                flush=True,
            )
            options.out.write_text(json.dumps(results, indent=1, default=str))
    table(results)


if __name__ == "__main__":
    main()
