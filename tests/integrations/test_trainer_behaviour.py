"""With `exact` in the place of the Trainer, all that its documentation promises is as it was."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback

from anybatch.integrations.huggingface import exact
from tests.integrations.trainer_scenarios import Line, Named, Told, made, rows, run, seen, timeless

SCENARIOS: dict[str, Callable[[type, Path], Any]] = {}


def scenario(function: Callable[[type, Path], Any]) -> Callable[[type, Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


def plain(name: str, **given: Any) -> None:
    SCENARIOS[name] = lambda cls, folder: run(cls, folder, **given)


class At(TrainerCallback):
    """Sets a flag of the control at the end of one step."""

    def __init__(self, step: int, flag: str, event: str = "on_step_end") -> None:
        self.step, self.flag = step, flag
        setattr(self, event, self._set)

    def _set(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.step:
            setattr(control, self.flag, True)
        return control


# --- callbacks and counts
plain("every_event_of_a_run", eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=2)
plain("every_event_by_epochs", eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch")
plain("nothing_but_training", logging_strategy="no")
plain("a_callback_stops_training", kept={"callbacks": [At(3, "should_training_stop")]})
plain("a_callback_stops_the_epoch", kept={"callbacks": [At(2, "should_epoch_stop")]})
plain("a_callback_asks_for_a_checkpoint", kept={"callbacks": [At(3, "should_save")]})
plain("a_callback_asks_for_an_evaluation", kept={"callbacks": [At(5, "should_evaluate")]})
plain("a_callback_asks_for_a_log", logging_strategy="no", kept={"callbacks": [At(5, "should_log")]})
plain(
    "early_stopping", num_train_epochs=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.5, save_total_limit=2,
    kept={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
)  # fmt: skip


@scenario
def a_callback_stops_in_the_middle_of_a_window(cls: type, folder: Path) -> Any:
    """A window that is broken off is never run, so that its rows are in no mean of losses; they moved no weight in either."""
    found = run(cls, folder, kept={"callbacks": [At(1, "should_training_stop", "on_substep_end")]})
    return {name: found[name] for name in ("step", "epoch", "weights", "told")}


@scenario
def callbacks_are_added_popped_and_removed(cls: type, folder: Path) -> Any:
    trainer = made(cls, folder)
    told = Told()
    trainer.add_callback(told)
    trainer.add_callback(EarlyStoppingCallback)
    popped = type(trainer.pop_callback(EarlyStoppingCallback)).__name__
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    trainer.train()
    trainer.remove_callback(told)
    trainer.train()
    return seen(trainer, told, popped=popped, names=names)


# --- data
plain("random_order", seed=3)
plain("random_order_with_its_own_seed", seed=3, data_seed=9)
plain("in_order", train_sampling_strategy="sequential")
plain("an_uneven_tail_is_dropped", train=rows(30), dataloader_drop_last=True)
plain("fewer_steps_than_an_epoch", max_steps=3)
plain("more_steps_than_an_epoch", max_steps=7)
plain("an_epoch_and_a_half", num_train_epochs=1.5)
plain("one_row_at_a_time", per_device_train_batch_size=1, gradient_accumulation_steps=8)
plain("no_accumulation", gradient_accumulation_steps=1)
plain("more_accumulation_than_an_epoch_has", gradient_accumulation_steps=8, num_train_epochs=3)
plain("a_window_longer_than_an_epoch", gradient_accumulation_steps=12, num_train_epochs=3)
plain("workers", dataloader_num_workers=1)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


plain("a_stream", train=Stream(), max_steps=6)


def columns(count: int = 32) -> Any:
    return Dataset.from_list(
        [
            {"input_x": row["input_x"].tolist(), "labels": float(row["labels"]), "name": f"row {at}"}
            for at, row in enumerate(rows(count))
        ]
    )


@scenario
def unused_columns_are_removed(cls: type, folder: Path) -> Any:
    return run(cls, folder, train=columns(), kept={"eval_dataset": columns(8)})


@scenario
def a_stream_of_datasets(cls: type, folder: Path) -> Any:
    return run(cls, folder, train=columns().to_iterable_dataset(), max_steps=5)


@scenario
def unused_columns_go_to_a_collator(cls: type, folder: Path) -> Any:
    names: list[str] = []

    def collate(batch: list[Any]) -> Any:
        names.extend(row["name"] for row in batch)
        return transformers.default_data_collator([{key: row[key] for key in ("input_x", "labels")} for row in batch])

    kept = {"data_collator": collate, "eval_dataset": columns(8)}
    return run(cls, folder, train=columns(), kept=kept, remove_unused_columns=False) | {"names": names}


@scenario
def labels_of_another_name(cls: type, folder: Path) -> Any:
    data = [{"input_x": row["input_x"], "goal": row["labels"]} for row in rows()]
    kept = {"eval_dataset": data[:8]}
    return run(cls, folder, model=Named(), train=data, kept=kept, label_names=["goal"], eval_strategy="epoch")


@scenario
def a_label_column(cls: type, folder: Path) -> Any:
    """The default collator renames it."""
    data = [{"input_x": row["input_x"], "label": float(row["labels"])} for row in rows()]
    return run(cls, folder, train=data)


@scenario
def rows_grouped_by_length(cls: type, folder: Path) -> Any:
    order: list[int] = []
    data = columns().add_column("length", [1 + at % 7 for at in range(32)])

    def collate(batch: list[Any]) -> Any:
        order.extend(row["length"] for row in batch)
        return transformers.default_data_collator([{key: row[key] for key in ("input_x", "labels")} for row in batch])

    found = run(cls, folder, train=data, kept={"data_collator": collate}, train_sampling_strategy="group_by_length",
                length_column_name="length", remove_unused_columns=False)  # fmt: skip
    return found | {"order": order}


@scenario
def sizes_of_loaders(cls: type, folder: Path) -> Any:
    trainer = made(cls, folder)
    loader = trainer.get_train_dataloader()
    return {
        "length": len(loader),
        "examples": trainer.num_examples(loader),
        "evaluation": len(trainer.get_eval_dataloader()),
        "test": len(trainer.get_test_dataloader(rows(5))),
        "batch": {key: tuple(value.shape) for key, value in next(iter(loader)).items()},
    }


plain("tokens_are_counted", include_num_input_tokens_seen="all", kept={})


# --- checkpoints
plain("checkpoints_every_two_steps", save_strategy="steps", save_steps=2)
plain("checkpoints_every_epoch", save_strategy="epoch")
plain("only_the_last_two_are_kept", save_strategy="steps", save_steps=1, save_total_limit=2)
plain("only_the_model_is_saved", save_strategy="steps", save_steps=4, save_only_model=True)
plain("the_best_is_saved", save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")
plain("a_share_of_all_steps", save_strategy="steps", save_steps=0.5, logging_steps=0.25)
plain(
    "the_best_model_is_loaded", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
    load_best_model_at_end=True, learning_rate=0.8, metric_for_best_model="eval_loss",
)  # fmt: skip


def resumed(name: str, at: Any, **given: Any) -> None:
    def both(cls: type, folder: Path) -> Any:
        saving = {
            "save_strategy": "steps",
            "save_steps": 1,
            "optim": "adamw_torch",
            "lr_scheduler_type": "cosine",
        } | given
        whole = run(cls, folder, **saving)
        again = run(cls, folder, resume=str(folder / at) if isinstance(at, str) else at, **saving)
        assert again["weights"] == whole["weights"], "resumed bit for bit"
        return whole | {"again": again}

    SCENARIOS[name] = both


resumed("resumed_in_the_middle_of_an_epoch", "checkpoint-3")
resumed("resumed_at_the_end_of_an_epoch", "checkpoint-4")
resumed("resumed_from_the_last", True, save_steps=3)
resumed("resumed_in_order", "checkpoint-2", train_sampling_strategy="sequential")
resumed("resumed_when_all_is_done", "checkpoint-8")
resumed("resumed_by_max_steps", "checkpoint-5", max_steps=6)
resumed("resumed_stream", "checkpoint-3", train=Stream(), max_steps=6)


@scenario
def resumed_without_skipping_rows(cls: type, folder: Path) -> Any:
    run(cls, folder, save_strategy="steps", save_steps=3)
    return run(cls, folder, resume=str(folder / "checkpoint-3"), ignore_data_skip=True)


@scenario
def resumed_for_longer(cls: type, folder: Path) -> Any:
    run(cls, folder, save_strategy="steps", save_steps=3, max_steps=3)
    return run(cls, folder, resume=True, max_steps=6)


@scenario
def nothing_to_resume(cls: type, folder: Path) -> Any:
    with pytest.raises(ValueError, match="No valid checkpoint") as caught:
        run(cls, folder, resume=True)
    return str(caught.value).replace(str(folder), "")


@scenario
def a_saved_model_is_read_again(cls: type, folder: Path) -> Any:
    trainer = made(cls, folder)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    again = Line.from_pretrained(folder)
    x = rows(1)[0]["input_x"]
    return seen(trainer, output=again(x[None])[0].tolist())


# --- the core
for kind in ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"):
    plain(f"schedule_{kind}", lr_scheduler_type=kind, warmup_steps=2)
plain("schedule_by_plateau", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
for kind in ("adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad"):
    plain(f"optimizer_{kind}", optim=kind, weight_decay=0.1, adam_epsilon=1e-4)
plain("clipping_by_norm", max_grad_norm=0.05)
plain("clipping_is_off", max_grad_norm=0.0)
plain("the_first_step_is_logged", logging_first_step=True, logging_steps=4)
plain("logs_average_over_their_steps", logging_steps=3)
plain("evaluation_on_start", eval_on_start=True, eval_strategy="epoch")
plain("evaluation_waits", eval_strategy="steps", eval_steps=1, eval_delay=4)
plain("bf16", bf16=True)
plain("a_batch_size_that_is_looked_for", auto_find_batch_size=True)
plain("a_seed_for_all", full_determinism=False, seed=11)
plain("memory_is_measured_too", skip_memory_metrics=True, torch_empty_cache_steps=1)


@scenario
def frozen_layers(cls: type, folder: Path) -> Any:
    model = Line()
    model.first.requires_grad_(False)
    return run(cls, folder, model=model)


@scenario
def several_evaluation_sets(cls: type, folder: Path) -> Any:
    kept = {"eval_dataset": {"one": rows(8, 6), "two": rows(5, 7)}}
    return run(cls, folder, kept=kept, eval_strategy="epoch")


@scenario
def metrics_and_predictions(cls: type, folder: Path) -> Any:
    def metrics(found: Any) -> Any:
        return {"mean": float(found.predictions.mean()), "labels": float(found.label_ids.sum())}

    kept = {"compute_metrics": metrics, "preprocess_logits_for_metrics": lambda logits, labels: logits * 2}
    trainer = made(cls, folder, kept=kept, eval_strategy="epoch")
    trainer.train()
    found = trainer.predict(rows(7, 8))
    return seen(trainer, evaluated=timeless(trainer.evaluate()), predicted=found.predictions.tolist(),
                labels=found.label_ids.tolist(), metrics=timeless(found.metrics))  # fmt: skip


@scenario
def training_twice(cls: type, folder: Path) -> Any:
    trainer = made(cls, folder)
    first = trainer.train().training_loss
    second = trainer.train().training_loss
    return seen(trainer, losses=(first, second))


@scenario
def a_model_made_when_it_is_needed(cls: type, folder: Path) -> Any:
    return run(cls, folder, kept={"model_init": Line})


@scenario
def an_optimizer_of_ones_own(cls: type, folder: Path) -> Any:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return run(cls, folder, model=model, kept={"optimizers": (optimizer, schedule)})


@scenario
def an_optimizer_class_of_ones_own(cls: type, folder: Path) -> Any:
    return run(
        cls,
        folder,
        kept={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.5})},
    )


@scenario
def a_loss_of_ones_own(cls: type, folder: Path) -> Any:
    class Mine(cls):  # type: ignore[misc, valid-type]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.smooth_l1_loss(outputs[0], labels)
            return (loss, {"logits": outputs[0]}) if return_outputs else loss

    return run(Mine, folder, eval_strategy="epoch")


@scenario
def hooks_of_ones_own(cls: type, folder: Path) -> Any:
    told: list[Any] = []

    class Mine(cls):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            told.append("step")
            return loss

        def create_optimizer(self, *args: Any) -> Any:
            told.append("optimizer")
            return super().create_optimizer(*args)

        def log(self, logs: Any, *args: Any) -> None:
            told.append(sorted(name for name in logs if "per_second" not in name))
            super().log(logs, *args)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            told.append("evaluation")
            return super().evaluation_loop(*args, **kwargs)

    return run(Mine, folder, eval_strategy="epoch") | {"hooks": told}


@scenario
def a_loss_that_is_not_a_number_is_left_out_of_the_log(cls: type, folder: Path) -> Any:
    data = rows()
    data[0]["labels"] = torch.tensor(math.nan)
    found = run(cls, folder, train=data, train_sampling_strategy="sequential", num_train_epochs=1)
    return [sorted(entry) for entry in found["log"]], found["step"], len(found["told"])


@scenario
def the_model_is_the_users(cls: type, folder: Path) -> Any:
    model = Line()
    trainer = made(cls, folder, model=model)
    trainer.train()
    return trainer.model is model, trainer.model_wrapped is model, model.training, trainer.is_in_train


@scenario
def noise_on_embeddings(cls: type, folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=2, pad_token_id=0, use_cache=False)  # fmt: skip
    data = [{"input_ids": torch.arange(1, 7) + at % 9, "labels": torch.arange(1, 7) + at % 9} for at in range(16)]
    found = run(cls, folder, model=transformers.LlamaForCausalLM(config), train=data, kept={"eval_dataset": None},
                neftune_noise_alpha=0.1)  # fmt: skip
    return {key: found[key] for key in ("step", "weights", "told")}


@scenario
def adapters_are_saved_and_resumed(cls: type, folder: Path) -> Any:
    import peft

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(Line(), peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["first"]))

    saving = {"save_strategy": "steps", "save_steps": 3, "label_names": ["labels"], "optim": "adamw_torch"}
    whole = run(cls, folder, model=adapted(), **saving)
    again = run(cls, folder, model=adapted(), resume=str(folder / "checkpoint-3"), **saving)
    assert again["weights"] == whole["weights"]
    return whole


@scenario
def a_sequence_to_sequence_trainer(cls: type, folder: Path) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, dropout_rate=0.0,
                      decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    data = [{"input_ids": torch.arange(1, 7) + at % 9, "labels": torch.arange(1, 5) + at % 7} for at in range(8)]
    kind = Seq2SeqTrainer if cls is transformers.Trainer else exact(Seq2SeqTrainer)
    args = Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", predict_with_generate=True, generation_max_length=6, num_train_epochs=1,
        learning_rate=0.05, optim="sgd", dataloader_pin_memory=False, eval_strategy="epoch",
    )  # fmt: skip
    trainer = kind(model, args, train_dataset=data, eval_dataset=data[:4])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return seen(trainer, predicted=trainer.predict(data[:3]).predictions.tolist())


def assert_alike(found: Any, wanted: Any, where: str = "") -> None:
    """The same, numbers up to the order of additions."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_alike(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), (where, found, wanted)
        for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_alike(one, other, f"{where}[{at}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-6, nan_ok=True), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize("name", SCENARIOS)
def test_seen_from_outside_a_run_is_the_trainers(name: str, tmp_path: Path) -> None:
    wanted = SCENARIOS[name](transformers.Trainer, tmp_path / "stock")
    found = SCENARIOS[name](exact(transformers.Trainer), tmp_path / "exact")
    assert_alike(found, wanted)


def test_what_differs_is_seen(tmp_path: Path) -> None:
    """The twin: a Trainer that leaves one event out, and one whose steps are a little larger."""

    class Silent(transformers.Trainer):
        def log(self, *args: Any) -> None:
            pass

    class Larger(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            for parameter in self.model.parameters():
                parameter.grad.mul_(1.01)
            return loss

    wanted = run(transformers.Trainer, tmp_path / "stock")
    for cls in (Silent, Larger):
        with pytest.raises(AssertionError):
            assert_alike(run(cls, tmp_path / cls.__name__), wanted)
