"""Small run folders as `anybatch train`, `compare` and `trace` leave them; every number follows from the seed."""

import json
import math
import random
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)>"
STAGES = (("load", 0.0002), ("forward", 0.0011), ("loss", 0.0001), ("backward", 0.0021), ("accumulate", 0.0003))


def run_fields(**changed: Any) -> dict[str, Any]:
    """`run.json` of a finished training run."""
    return {
        "anybatch": "0.1.0",
        "kind": "train",
        "task": "digits",
        "created": "2026-03-01T12:00:00+00:00",
        "command": "anybatch train digits --batch-size 64 --micro-batch 16",
        "seed": 7,
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "git": "0123abc",
        "settings": {
            "batch_size": 64,
            "micro_batch": 16,
            "lr": 0.1,
            "clip_norm": 1.0,
            "precision": "fp32",
            "quiet": False,
        },
        "plan": {
            "parameters": 12810,
            "rows": 1437,
            "batch": 64,
            "micro_batch": 16,
            "micro_batches_per_update": 4,
            "updates_per_epoch": 23,
            "updates": 230,
            "lr_first": 0.01,
            "lr_peak": 0.1,
            "lr_last": 0.0,
        },
        "status": "finished",
        "summary": {"valid_accuracy": 0.978, "seconds": 12.5, "peak_bytes": 9437184},
    } | changed


def training_events(*, epochs: int = 10, updates_per_epoch: int = 23, seed: int = 7) -> list[dict[str, Any]]:
    """The metrics of a run that learns, one update of it skipped."""
    luck = random.Random(seed)
    total = epochs * updates_per_epoch
    events: list[dict[str, Any]] = []
    for update in range(1, total + 1):
        epoch = (update - 1) // updates_per_epoch + 1
        loss = 2.2 * math.exp(-4 * update / total) + 0.08 + luck.gauss(0, 0.04) * math.exp(-2 * update / total)
        events.append(
            {
                "event": "update",
                "update": update,
                "epoch": epoch,
                "loss": max(0.01, loss),
                "grad_norm": 0.3 + luck.expovariate(2),
                "lr": 0.1 * min(1.0, update / 20) * (1 - update / (total + 1)),
                "units": 64.0,
                "rows": 64,
                "micro_batches": 4,
                "applied": update != 12,
                "seconds": 0.05 + luck.random() / 100,
            }
        )
        if update % updates_per_epoch == 0:
            progress = epoch / epochs
            events.append(
                {
                    "event": "epoch",
                    "epoch": epoch,
                    "update": update,
                    "train_loss": 2.0 * math.exp(-4 * progress) + 0.1,
                    "valid_loss": 2.0 * math.exp(-3.6 * progress) + 0.13,
                    "metrics": {"accuracy": 0.978 - 0.5 * math.exp(-5 * progress)},
                    "train_metrics": {"accuracy": 0.99 - 0.5 * math.exp(-4 * progress)},
                    "seconds": 1.25,
                }
            )
    return [*events, window_event(update=total), memory_event(update=1), memory_event(update=total)]


def window_event(*, update: int = 230, num_micro_batches: int = 4) -> dict[str, Any]:
    """The timeline of one update."""
    luck = random.Random(update)
    clock = 5.0
    stages: list[dict[str, Any]] = []

    def ran(stage: str, micro_batch: int | None, seconds: float) -> None:
        nonlocal clock
        seconds *= 0.8 + 0.4 * luck.random()
        stages.append({"stage": stage, "micro_batch": micro_batch, "start": clock, "seconds": seconds})
        clock += seconds * 1.02

    ran("zero", None, 0.0002)
    for micro_batch in range(num_micro_batches):
        for stage, seconds in STAGES:
            ran(stage, micro_batch, seconds)
    ran("clip", None, 0.0003)
    ran("step", None, 0.0006)
    parts = [{"rows": 16, "units": 16.0, "share": 1 / num_micro_batches}] * num_micro_batches
    return {"event": "window", "update": update, "stages": stages, "micro_batches": parts}


def memory_event(*, update: int = 230) -> dict[str, Any]:
    """Memory that grows in each forward pass and falls in each backward pass."""
    base = 4 * 2**20
    points = []
    for index, span in enumerate(window_event(update=update)["stages"]):
        extra = {"load": 1, "forward": 5, "loss": 5.2, "backward": 2}.get(span["stage"], 0.5) * 2**20
        points.append({"seconds": span["start"], "bytes": int(base + extra + 1000 * index), "stage": span["stage"]})
    return {"event": "memory", "update": update, "points": points, "peak_bytes": max(p["bytes"] for p in points)}


def comparison_fields(*, seeds: int = 3, epochs: int = 6) -> dict[str, Any]:
    """`compare.json` with the four arms of the textbook's experiment."""
    arms = (
        ("small batch", "an update after every 16 rows", 16, 0.1, 0.97, 0.6),
        ("textbook loop", "16 rows four times, then an update; the tail is dropped", 64, 0.1, 0.955, 2.2),
        ("exact 64", "the gradient of all 64 rows, same learning rate", 64, 0.1, 0.958, 2.0),
        ("exact 64, rate by rule", "the gradient of all 64 rows, learning rate times 4", 64, 0.4, 0.972, 0.6),
    )
    luck = random.Random(3)

    def seed_run(seed: int, batch: int, end: float, slow: float) -> dict[str, Any]:
        shift = luck.gauss(0, 0.006)
        points = [
            {
                "epoch": epoch,
                "train_loss": 0.1 + 0.6 * math.exp(-epoch / slow) + shift,
                "valid_loss": 0.14 + 0.6 * math.exp(-epoch / slow) + 2 * shift,
                "metric": min(1.0, end - 0.25 * math.exp(-epoch / slow) + shift),
            }
            for epoch in range(1, epochs + 1)
        ]
        return {
            "seed": seed,
            "updates": epochs * 1024 // batch,
            "samples_seen": epochs * 1000,
            "seconds": 0.4 + luck.random() / 10,
            "peak_bytes": None,
            "epochs": points,
        }

    return {
        "metric": "accuracy",
        "arms": [
            {
                "name": name,
                "description": description,
                "batch": batch,
                "micro_batch": 16,
                "lr": lr,
                "runs": [seed_run(seed, batch, end, slow) for seed in range(seeds)],
            }
            for name, description, batch, lr, end, slow in arms
        ],
        "findings": [
            "At the same learning rate the larger batch is slower per epoch: 84.9 % against 96.8 % after epoch 1.",
            "With the learning rate times 4 it recovers: 97.1 % after epoch 1.",
        ],
    }


def trace_fields() -> dict[str, Any]:
    """`trace.json` of one update in two micro-batches."""
    stages: list[dict[str, Any]] = []
    for index in range(2):
        stages += [
            {"stage": "load", "micro_batch": index, "title": "16 rows go to the model's device",
             "facts": {"rows": 16, "inputs": "16 x 10 float32", "targets": "16 int64"},
             "values": [[0.3345, -1.2, 0.5], [1.1, 0.7, -0.2]]},
            {"stage": "forward", "micro_batch": index, "title": "The model turns rows into scores",
             "facts": {"output": "16 x 2 float32"}, "values": [[0.1, -0.1], [0.35, 0.02]]},
            {"stage": "loss", "micro_batch": index, "title": "A mean loss, and its share of the batch's",
             "facts": {"loss": 0.71 - 0.02 * index, "units": 16, "share": 0.5}, "values": []},
            {"stage": "backward", "micro_batch": index, "title": "Gradients flow back", "facts": {}, "values": []},
            {"stage": "accumulate", "micro_batch": index, "title": "The gradient so far",
             "facts": {"gradient_norm": 0.21 + 0.2 * index}, "values": [0.01, -0.02, 0.003]},
        ]  # fmt: skip
    stages += [
        {"stage": "step", "micro_batch": None, "title": "Weights change", "facts": {"learning_rate": 0.1},
         "values": [0.5, 0.49]},
        {"stage": "zero", "micro_batch": None, "title": "Gradients are cleared", "facts": {"gradient_norm": 0},
         "values": [0, 0, 0]},
    ]  # fmt: skip
    layers = [
        {"name": "0", "kind": "Linear", "in": [[1, 10]], "out": [[1, 32]], "values": [0.5] * 20},
        {"name": "1", "kind": "ReLU", "in": [[1, 32]], "out": [[1, 32]], "values": [0.5, 0.0]},
        {"name": "2", "kind": "Linear", "in": [[1, 32]], "out": [[1, 2]], "values": [1.2, -0.7]},
        {
            "name": "class 0 (87.0%), label 0: right",
            "kind": "prediction",
            "in": [[1, 2]],
            "out": [[1]],
            "values": [0.87, 0.13],
        },
    ]
    image = {"width": 2, "height": 3, "channels": 1, "pixels": [0, 50, 100, 150, 200, 255]}
    return {"stages": stages, "layers": layers, "images": [image]}


def write_json(path: Path, value: object) -> None:
    """One JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, events: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def train_folder(folder: Path, **changed: Any) -> Path:
    """A finished training run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", run_fields(**changed))
    write_lines(folder / "metrics.jsonl", training_events())
    return folder


def compare_folder(folder: Path) -> Path:
    """A finished comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", run_fields(kind="compare", task="textbook", plan={}, summary={}))
    write_json(folder / "compare.json", comparison_fields())
    return folder


def trace_folder(folder: Path) -> Path:
    """A finished trace."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", run_fields(kind="trace", task="textbook", summary={}))
    write_json(folder / "trace.json", trace_fields())
    write_lines(folder / "metrics.jsonl", [window_event(update=1, num_micro_batches=2)])
    return folder


def proof_fields(**changed: Any) -> dict[str, Any]:
    """`verify.json` of a model with one cause, in two precisions, one cut of which could not run."""
    luck = random.Random(3)
    names = [f"layers.{layer}.self_attention.{kind}" for layer in range(2) for kind in ("weight", "bias")]
    cuts: list[dict[str, Any]] = []
    for precision, floor in (("float64", 4e-15), ("own", 3e-6)):
        for name, error in (("as configured: Rows(size=16)", 0.2), ("rows by 1", 0.9)):
            parameters = [
                {"name": each, "error": error * luck.uniform(0.5, 1.5), "floor": floor * luck.uniform(0.5, 9)}
                for each in names
            ]
            parameters[0]["error"] = floor / 20
            cut = {"name": name, "precision": precision, "micro_batches": 4, "rows": [16] * 4, "error": error}
            cuts.append(cut | {"parameters": parameters, "failure": None, "is_exact": False})
        failed = {"name": "in half", "precision": precision, "micro_batches": 2, "rows": [32, 32], "error": None}
        cuts.append(failed | {"parameters": [], "failure": "BatchError: no variance.", "is_exact": False})
    cause = {"kind": "units", "explanation": "The mean loss divides by tokens.", "fix": "Give units=tokens."}
    return {
        "is_exact": False,
        "error": None,
        "rows": 64,
        "rows_given": 128,
        "dtype": "float32",
        "cuts": cuts,
        "causes": [cause],
        "notes": ["one note."],
    } | changed


def verify_folder(path: Path) -> Path:
    """The folder of `anybatch verify`."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "run.json", run_fields(kind="verify", command="anybatch verify digits", plan={}, summary={}))
    write_json(path / "verify.json", proof_fields())
    return path


def plan_folder(folder: Path) -> Path:
    """A plan of a task in a file of its own, for a card of 6 GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    gib = 2**30
    parts = {
        "parameters": 0.5,
        "gradients": 0.5,
        "optimizer": 1,
        "activations": 2.4,
        "inputs": 0.01,
        "temporaries": 0.09,
    }
    write_json(
        folder / "run.json", run_fields(kind="plan", task="/somewhere/of/mine/mine.py", command="anybatch plan mine.py")
    )
    sizes = [
        {"size": size, "peak": round((0.9 + 0.22 * size) * gib), "fits": size <= 16} for size in (1, 2, 4, 8, 16, 32)
    ]
    plan = {
        "unit": "rows",
        "micro_batch": 16,
        "limit": round(5.7 * gib),
        "sizes": sizes,
        "breakdown": {name: round(part * gib) for name, part in parts.items()},
        "sentences": ["The largest micro-batch that fits is 16 rows.", "Of it: much.", "Predicted with fake tensors."],
    }
    write_json(folder / "plan.json", plan)
    return folder
