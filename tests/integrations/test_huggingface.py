"""transformers' Trainer: its updates have the whole batch's gradient, and all else is as it was."""

import importlib
import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from anybatch import Fit, LossError, Tokens, UnitsError, UpdateError
from anybatch.integrations.huggingface import SPLIT_FILE, ExactTrainer, exact
from benchmarks.tiny_models import bert, class_loss, classified, gpt2, llama, next_token_loss, pad, texts
from benchmarks.trainers import Handed, errors, trained, windows_of
from tests.processes.ranks import on_ranks

EXACT = 5e-7
WEIGHT = torch.tensor([0.2, 1.0, 20.0])
TEXTS, CLASSES = texts(19), classified(19)


class Weighted(transformers.Trainer):
    """Class weights, as the documentation of the Trainer has them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=WEIGHT)(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def summed(outputs, labels, num_items_in_batch=None):
    """A `compute_loss_func` that divides by what it is given."""
    logits = outputs["logits"]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def weighted_mean(outputs, labels, num_items_in_batch=None):
    """One that divides by something of its own."""
    return F.cross_entropy(outputs["logits"], labels, WEIGHT)


class OwnModel(nn.Module):
    """A model of one's own, that returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.head(self.embed(input_ids).mean(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels, WEIGHT), "logits": logits}


class LineConfig(transformers.PretrainedConfig):
    model_type = "line"


class Line(transformers.PreTrainedModel):
    """A head of one's own, for numbers, that returns a tuple."""

    config_class = LineConfig

    def __init__(self, config=None):
        super().__init__(config or LineConfig())
        torch.manual_seed(0)
        self.line = nn.Linear(4, 1)
        self.post_init()

    def forward(self, input_x, labels=None, **_):
        y = self.line(input_x).squeeze(-1)
        return (y,) if labels is None else (F.mse_loss(y, labels), y)


def line_rows():
    torch.manual_seed(8)
    return [{"input_x": torch.randn(4), "labels": torch.randn(())} for _ in range(19)]


def line_loss(model, batch):
    double = {key: value.double() for key, value in batch.items()}
    return model(**double)[0]


def weighted_loss(model, batch):
    return class_loss(model, batch, WEIGHT)


def smoothed(is_shifted):
    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
        labels = batch["labels"]
        if is_shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten(), label_smoothing=0.1)

    return loss


CASES = {
    "Llama, ragged": (transformers.Trainer, llama, TEXTS, next_token_loss, {}, {}),
    "GPT-2, whose loss type says nothing": (transformers.Trainer, gpt2, TEXTS, next_token_loss, {}, {}),
    "Bert, whose head takes **kwargs": (transformers.Trainer, bert, CLASSES, class_loss, {}, {}),
    "class weights in compute_loss": (Weighted, bert, CLASSES, weighted_loss, {}, {}),
    "a function that divides by num_items_in_batch": (
        transformers.Trainer, llama, TEXTS, next_token_loss, {"compute_loss_func": summed}, {}),
    "a function that does not": (
        transformers.Trainer, bert, CLASSES, weighted_loss, {"compute_loss_func": weighted_mean}, {}),
    "label smoothing, next token": (
        transformers.Trainer, llama, TEXTS, smoothed(True), {}, {"label_smoothing_factor": 0.1}),
    "label smoothing, classes": (
        transformers.Trainer, bert, CLASSES, smoothed(False), {}, {"label_smoothing_factor": 0.1}),
    "a head for numbers": (
        transformers.Trainer, Line, line_rows(), line_loss, {"data_collator": torch.utils.data.default_collate}, {}),
    "a model of one's own": (transformers.Trainer, OwnModel, CLASSES, weighted_loss, {}, {}),
}  # fmt: skip
WRONG_WITHOUT = {
    "GPT-2, whose loss type says nothing": 0.01,
    "Bert, whose head takes **kwargs": 2.0,
    "class weights in compute_loss": 0.1,
    "a function that does not": 1.0,
    "a head for numbers": 1.0,
    "a model of one's own": 0.1,
}


def error_of(name, made, micro_batch=None):
    cls, model, rows, loss, given, options = CASES[name]
    _, handed = trained(made(cls, micro_batch), model(), rows, given=given, **options)
    collate = given.get("data_collator", pad)
    return max(errors(handed, model(), windows_of(rows, collate=collate), loss))


@pytest.mark.parametrize("name", CASES)
def test_every_update_has_the_gradient_of_its_window(name):
    assert error_of(name, lambda cls, size: exact(cls)) <= EXACT


@pytest.mark.parametrize(("name", "at_least"), WRONG_WITHOUT.items())
def test_the_trainer_alone_does_not(name, at_least):
    assert error_of(name, lambda cls, size: cls) > at_least


@pytest.mark.parametrize("micro_batch", [1, 2, Tokens(64)], ids=str)
def test_micro_batches_may_be_smaller_than_the_batches_of_the_loader(micro_batch):
    assert error_of("Llama, ragged", lambda cls, size: exact(cls, micro_batch=size), micro_batch) <= EXACT


def test_fit_chooses_what_fits():
    assert error_of("a model of one's own", lambda cls, size: exact(cls, micro_batch=Fit("1GiB"))) <= EXACT


def test_options_may_be_attributes_of_a_class():
    class Mine(ExactTrainer):
        micro_batch = 2
        units = staticmethod(lambda batch: (batch["labels"][:, 1:] != -100).sum())

    _, handed = trained(Mine, llama(), TEXTS)
    assert max(errors(handed, llama(), windows_of(TEXTS), next_token_loss)) <= EXACT


def test_units_that_are_wrong_are_what_the_user_said():
    """The twin: the units are really used."""
    wrong = exact(transformers.Trainer, units=lambda batch: len(batch["labels"]))
    _, handed = trained(wrong, llama(), TEXTS)
    assert max(errors(handed, llama(), windows_of(TEXTS), next_token_loss)) > 0.01


def test_the_logged_loss_is_that_of_the_window():
    trainer, _ = trained(exact(transformers.Trainer), bert(), CLASSES, learning_rate=0.0)
    stock, _ = trained(transformers.Trainer, bert(), CLASSES, learning_rate=0.0)
    wanted = [class_loss(bert().double(), batch).item() for batch in windows_of(CLASSES)]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(wanted, rel=1e-6)
    assert [entry["loss"] for entry in stock.state.log_history if "loss" in entry] != pytest.approx(wanted, rel=1e-2)


class Counting(transformers.TrainerCallback):
    """Which events were told at which step."""

    def __init__(self):
        self.told = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **_: self.told.append((name, state.global_step))
        return object.__getattribute__(self, name)


def test_callbacks_steps_epochs_evaluations_and_the_schedule_are_those_of_the_trainer():
    told, measured = [], []
    for cls in (transformers.Trainer, exact(transformers.Trainer)):
        counting = Counting()
        trainer, _ = trained(
            cls, llama(), TEXTS, given={"callbacks": [counting], "eval_dataset": TEXTS[:5]}, num_train_epochs=2,
            lr_scheduler_type="linear", max_grad_norm=0.5, eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        kept = ("step", "epoch", "learning_rate")
        log = [[entry.get(key) for key in kept] for entry in trainer.state.log_history]
        told.append(
            (counting.told, log, trainer.state.global_step, trainer.state.epoch, trainer.lr_scheduler.last_epoch)
        )
        measured.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
    assert told[0] == told[1]
    assert len(measured[0]) == 2
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)


def test_a_window_without_a_single_target_among_others_counts_for_nothing():
    rows = [
        row | {"labels": torch.full_like(row["labels"], -100)} if 3 <= at < 6 else row for at, row in enumerate(TEXTS)
    ]
    _, handed = trained(exact(transformers.Trainer), llama(), rows)
    assert max(errors(handed, llama(), windows_of(rows), next_token_loss)) <= EXACT


class Stream(torch.utils.data.IterableDataset):
    """15 rows of unknown number: 5 batches of 3, in windows of 4."""

    def __iter__(self):
        return iter(TEXTS[:15])


def test_a_stream_that_ends_in_a_window_leaves_its_rows_to_the_next():
    """The Trainer steps after 4 batches; the fifth's gradient would be added to the next epoch's first window, unscaled."""
    _, handed = trained(exact(transformers.Trainer), llama(), Stream(), max_steps=2)
    batches = [pad(TEXTS[:12]), pad(TEXTS[12:15] + TEXTS[:12])]
    assert max(errors(handed, llama(), batches, next_token_loss)) <= EXACT


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    def run(folder, **options):
        model = llama(attention_dropout=0.1)
        options = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "optim": "adamw_torch"} | options
        trainer, _ = trained(exact(transformers.Trainer, micro_batch=2), model, TEXTS, folder=str(folder),
                             train_sampling_strategy="random", **options)  # fmt: skip
        return trainer, model.state_dict()

    _, whole = run(tmp_path / "whole")
    _, resumed = run(tmp_path / "whole", resume=str(tmp_path / "whole/checkpoint-1"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_after_memory_ran_out_the_window_starts_again_and_the_checkpoint_remembers(tmp_path):
    class Small(exact(transformers.Trainer)):
        def compute_loss(self, model, inputs, **options):
            if len(inputs["labels"]) > 2:
                raise torch.OutOfMemoryError("3 rows do not fit")
            self.sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, **options)

    Small.sizes = []
    _, handed = trained(Small, bert(), CLASSES, folder=str(tmp_path), save_strategy="steps", save_steps=1)
    assert max(errors(handed, bert(), windows_of(CLASSES), class_loss)) <= EXACT
    assert max(Small.sizes) <= 2
    assert json.loads(Path(tmp_path, "checkpoint-1", SPLIT_FILE).read_text()) == {"size": 1}
    again, _ = trained(Small, bert(), CLASSES, folder=str(tmp_path), resume=True)
    assert again._accumulator is None or again._accumulator.split.size == 1


def test_adapters_checkpointing_and_autocast_go_on():
    import peft

    def model():
        torch.manual_seed(0)
        return peft.get_peft_model(
            llama(), peft.LoraConfig(r=2, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj"])
        )

    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    _, handed = trained(exact(transformers.Trainer), model(), TEXTS, **options)
    assert max(errors(handed, model(), windows_of(TEXTS), next_token_loss)) <= EXACT
    _, handed = trained(exact(transformers.Trainer), model(), TEXTS, bf16=True)
    assert max(errors(handed, model(), windows_of(TEXTS), next_token_loss)) <= 2e-2


def test_batch_norm_sees_the_whole_window():
    class Normed(OwnModel):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, input_ids, attention_mask, labels=None):
            logits = self.head(self.norm(self.embed(input_ids).mean(1)))
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    cls = exact(transformers.Trainer, batch_norm="exact", units=lambda batch: len(batch["labels"]))
    _, handed = trained(cls, Normed(), CLASSES)
    assert max(errors(handed, Normed(), windows_of(CLASSES), class_loss)) <= 3e-6


def test_a_loss_that_shows_nothing_asks_for_units():
    class Opaque(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            mask = inputs["labels"] >= 0
            return (model(**inputs).logits.logsumexp(-1) * mask).sum() / mask.sum()

    with pytest.raises(UnitsError, match=r"Objective\(loss, units\)"):
        trained(exact(Opaque), bert(), CLASSES)


def test_what_divides_otherwise_than_in_the_first_window_is_seen():
    class Turning(Weighted):
        def compute_loss(self, model, inputs, **options):
            is_late = self.state.global_step > 0
            labels = inputs.pop("labels")
            return nn.CrossEntropyLoss(None if is_late else WEIGHT)(model(**inputs).logits, labels)

    with pytest.raises(UnitsError, match="what it divides by has changed"):
        trained(exact(Turning), bert(), CLASSES)


def test_a_training_step_that_passes_ours_by_is_an_error():
    class Own(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    with pytest.raises(UpdateError, match=r"super\(\)\.training_step"):
        trained(exact(Own), bert(), CLASSES)


def test_what_cannot_be_exact_is_refused_by_name():
    class GRPOTrainer(transformers.Trainer):
        pass

    with pytest.raises(LossError, match=r"exact\(GRPOTrainer\) is not built: it makes its batches itself"):
        trained(exact(GRPOTrainer), bert(), CLASSES)
    with pytest.raises(UpdateError, match="expected a class"):
        exact(bert())
    with pytest.raises(UpdateError, match="steps inside backward"):
        trained(exact(transformers.Trainer), bert(), CLASSES, optim="lomo")


class AsUnderDeepSpeed(transformers.TrainerCallback):
    """The engine's own accumulation, played by autograd: it takes each loss as it is given."""

    def __init__(self, box):
        self.box = box

    def on_train_begin(self, args, state, control, **_):
        trainer = self.box[0]
        plain = trainer.accelerator.backward
        trainer.is_deepspeed_enabled = True
        trainer.accelerator.backward = lambda loss, scale_wrt_gas: plain(loss)

    def on_train_end(self, args, state, control, **_):
        self.box[0].is_deepspeed_enabled = False


@pytest.mark.parametrize("name", ["Llama, ragged", "Bert, whose head takes **kwargs"])
def test_under_deepspeed_each_loss_is_multiplied_by_its_share_and_it_is_said(name):
    cls, model, rows, loss, _, _ = CASES[name]
    box = []

    class Boxed(exact(cls)):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            box.append(self)

    with pytest.warns(UserWarning, match="DeepSpeed accumulates by itself"):
        _, handed = trained(Boxed, model(), rows, given={"callbacks": [AsUnderDeepSpeed(box)]})
    assert max(errors(handed, model(), windows_of(rows), loss)) <= EXACT


class FullySharded(exact(transformers.Trainer)):
    """FSDP2 as `fsdp=True` sets it up on a device: on a CPU, Accelerate passes over it and takes DDP."""

    def create_accelerator_and_postprocess(self):
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        self.is_fsdp_enabled = True


KINDS = {"stock": transformers.Trainer, "exact": exact(transformers.Trainer), "sharded": FullySharded}


@contextmanager
def as_launched():
    """The variables of a rank that was launched, and no state of Accelerate's from before."""
    import accelerate

    rank, before = torch.distributed.get_rank(), dict(os.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            del os.environ[name]


def on_two(count, made):
    with as_launched():
        return _on_two(count, made)


def _on_two(count, made):
    """What rank 0's optimizer was handed, and the rows that each rank ran."""
    rows = texts(count, seed=count)
    numbers = {tuple(row["input_ids"].tolist()): at for at, row in enumerate(rows)}
    ran = []

    def hook(model, args, kwargs):
        ran.extend(numbers[tuple(row[row > 0].tolist())] for row in kwargs["input_ids"])

    model = llama()
    model.register_forward_pre_hook(hook, with_kwargs=True)
    trainer, handed = trained(KINDS[made], model, rows, ddp_backend="gloo", gradient_accumulation_steps=2)
    assert (made == "sharded") == type(trainer.model_wrapped).__name__.startswith("FSDP")
    return max(errors(handed, llama(), windows_of(rows), next_token_loss)), ran


@pytest.mark.parametrize(
    ("count", "made"), [(19, "exact"), (33, "exact"), (57, "exact"), (61, "exact"), (19, "sharded")]
)
def test_on_two_ranks_no_row_is_dealt_twice_and_none_is_lost(count, made):
    (error, first), (_, second) = on_ranks(2, on_two, count, made)
    assert error <= EXACT
    assert sorted({*first} | {*second}) == list(range(count))
    if made == "exact":
        stand_ins = len(first) + len(second) - count
        assert stand_ins <= 1, "only a rank without a row runs one of another's, with share 0"


def test_the_trainer_alone_repeats_rows():
    (error, first), (_, second) = on_ranks(2, on_two, 61, "stock")
    assert error > 1e-3
    assert len(first) + len(second) > 61


ENGINE = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": 0.0, "zero_optimization": {"stage": 0},
}  # fmt: skip


def under_deepspeed(made):
    """What DeepSpeed's engine handed to the optimizer, which it steps itself, inside backward."""

    class Seen(KINDS[made]):
        def create_optimizer(self, *args):
            is_new = self.optimizer is None
            optimizer = super().create_optimizer(*args)
            if is_new:
                optimizer.register_step_pre_hook(
                    lambda *_: given.on_pre_optimizer_step(None, None, None, model=self.model)
                )
            return optimizer

    backend = importlib.import_module("deepspeed.comm.torch")
    given, rows = Handed(), texts(19)
    # a kernel for the all-reduces of inference: a new machine would compile it for 50 s
    without_kernel = mock.patch.object(backend, "build_shm_op", return_value=None)
    with as_launched(), without_kernel, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(Seen, llama(), rows, ddp_backend="gloo", gradient_accumulation_steps=2, deepspeed=ENGINE)
    return max(errors(given, llama(), windows_of(rows), next_token_loss))


def test_under_deepspeed_itself_two_ranks_are_exact():
    assert max(on_ranks(2, under_deepspeed, "exact")) <= EXACT


def test_deepspeed_under_the_trainer_alone_is_not():
    assert min(on_ranks(2, under_deepspeed, "stock")) > 0.1
