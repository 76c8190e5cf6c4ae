"""What people do with a Trainer, told by what its documentation says: each scenario gives what can be seen of it from outside.

Rows fill every window, and the head's mean is one over rows, so that the Trainer alone is right: whatever differs is ours.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import TrainingArguments

ROWS, BATCH, STEPS = 32, 4, 2
"""4 updates an epoch."""
CLOCKS = ("runtime", "per_second", "flos")
"""Parts of the names of what no two runs share."""


class LineConfig(transformers.PretrainedConfig):
    model_type = "scenario_line"


class Line(transformers.PreTrainedModel):
    """y = w x + b of four numbers."""

    config_class = LineConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or LineConfig())
        torch.manual_seed(3)
        self.first, self.norm, self.line = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, input_x: Any, labels: Any = None) -> Any:
        y = self.line(self.norm(self.first(input_x)).tanh()).squeeze(-1)
        return (y,) if labels is None else (F.mse_loss(y, labels), y)


class Named(Line):
    """The same, with a dict out and labels of another name."""

    def forward(self, input_x: Any, goal: Any = None) -> Any:
        found = super().forward(input_x, goal)
        return {"logits": found[0]} if goal is None else {"loss": found[0], "logits": found[1]}


def rows(count: int = ROWS, seed: int = 5) -> list[dict[str, Any]]:
    chance = torch.Generator().manual_seed(seed)
    return [
        {"input_x": torch.randn(4, generator=chance), "labels": torch.randn((), generator=chance)} for _ in range(count)
    ]


class Told(transformers.TrainerCallback):
    """Every event, with the step and the flags of that moment."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def note(args: Any, state: Any, control: Any, **more: Any) -> None:
            flags = (control.should_log, control.should_save, control.should_evaluate, control.should_training_stop)
            epoch = None if state.epoch is None else round(state.epoch, 6)
            self.told.append((name, state.global_step, epoch, flags, sorted(more)))

        return note


def options(folder: Any, **given: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": STEPS, "num_train_epochs": 2,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 0.05,
        "dataloader_pin_memory": False, "per_device_eval_batch_size": 8, "optim": "sgd",
    }  # fmt: skip
    return TrainingArguments(str(folder), **usual | given)


def made(cls: type, folder: Any, *, model: Any = None, train: Any = None, kept: Any = None, **given: Any) -> Any:
    """A trainer of tiny rows that tells nothing on the screen; `kept` are arguments of its constructor."""
    kept = {"train_dataset": rows() if train is None else train, "eval_dataset": rows(8, 6)} | dict(kept or {})
    if "model_init" not in kept:
        kept["model"] = Line() if model is None else model
    trainer = cls(args=options(folder, **given), **kept)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def seen(trainer: Any, told: Told | None = None, **more: Any) -> dict[str, Any]:
    """All that is left of a run."""
    folder = Path(trainer.args.output_dir)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    state = trainer.state
    found = {
        "log": [timeless(entry) for entry in state.log_history],
        "step": state.global_step,
        "epoch": state.epoch,
        "best": (state.best_metric, Path(state.best_model_checkpoint or "").name, state.best_global_step),
        "max_steps": state.max_steps,
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
        "files": [name for name in files if not name.startswith("runs/")],
        "states": [timeless_state(path) for path in sorted(folder.glob("checkpoint-*/trainer_state.json"))],
        "told": [] if told is None else told.told,
    }
    return found | more


def timeless(entry: Any) -> Any:
    return {name: value for name, value in entry.items() if not any(clock in name for clock in CLOCKS)}


def timeless_state(path: Path) -> Any:
    state = json.loads(path.read_text())
    state["log_history"] = [timeless(entry) for entry in state["log_history"]]
    best = state.get("best_model_checkpoint")
    return {name: value for name, value in state.items() if name not in ("total_flos", "best_model_checkpoint")} | {
        "best_model_checkpoint": best and Path(best).name
    }


def run(cls: type, folder: Any, *, resume: Any = None, **given: Any) -> dict[str, Any]:
    told = Told()
    kept = dict(given.pop("kept", {}) or {})
    kept["callbacks"] = [told, *kept.get("callbacks", [])]
    trainer = made(cls, folder, kept=kept, **given)
    output = trainer.train(resume_from_checkpoint=resume)
    return seen(trainer, told, output=(output.global_step, output.training_loss, timeless(output.metrics)))
