"""The pages for users of a framework print what they say, and quote the errors that their users get."""

import tempfile
from types import SimpleNamespace

import accelerate
import deepspeed  # noqa: F401  # prints where it is first imported, which a Trainer does
import lightning
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch import supervised
from anybatch.integrations.accelerate import _check_loader, prepared_update
from anybatch.integrations.huggingface import exact
from anybatch.integrations.lightning import ExactStrategy
from tests.test_docs import run_page
from tests.test_docs_errors import check_quotes, message_of

PAGES = ["huggingface.md", "lightning.md", "accelerate.md", "loaders.md"]
ROWS = TensorDataset(torch.randn(57, 6), torch.randint(0, 3, (57,)))


@pytest.mark.filterwarnings("ignore:.*set_vital.*is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(page):
    blocks = run_page(page)
    assert any(written for _, written in blocks)
    for printed, written in blocks:
        assert printed == written


class WithPenalty(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().sum()
        return (loss, outputs) if return_outputs else loss


class GRPOTrainer(transformers.Trainer):
    """Goes by the name of TRL's."""


def train(kind: type) -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    rows = [{"input_ids": torch.randint(3, 50, (6,)), "labels": torch.randint(0, 3, ())} for _ in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=4,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        kind(transformers.BertForSequenceClassification(config), args, train_dataset=rows).train()


def test_the_errors_of_the_trainer_read_as_quoted():
    trainer = object.__new__(transformers.Trainer)
    messages = [
        message_of(lambda _: exact(trainer), f"object at {id(trainer):#x}"),
        message_of(lambda _: train(exact(WithPenalty)), "nowhere"),
        message_of(lambda _: train(exact(GRPOTrainer)), "nowhere"),
    ]
    check_quotes("huggingface.md", [message.replace("Trainer ...", "Trainer object at ...") for message in messages])


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Penalised(Module):
    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.net.weight.square().sum()


class Silent(Module):
    def training_step(self, batch, index):
        return None


def fit(module: Module, **options) -> None:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, strategy=ExactStrategy(micro_batch=6), **quiet, **options
    )
    trainer.fit(module, DataLoader(ROWS, batch_size=24))


def test_the_errors_of_lightning_read_as_quoted():
    actions = [
        lambda _: fit(Module(), accumulate_grad_batches=4),
        lambda _: fit(Penalised()),
        lambda _: fit(Silent()),
    ]
    check_quotes("lightning.md", [message_of(action, "nowhere") for action in actions])


def update(**options) -> None:
    accelerator = SimpleNamespace(
        distributed_type=accelerate.DistributedType.NO, num_processes=1, gradient_accumulation_steps=1
    )
    vars(accelerator).update(options)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared_update(accelerator, model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=16)


def test_the_errors_of_accelerate_read_as_quoted():
    repeating = prepare_data_loader(DataLoader(ROWS, batch_size=10), num_processes=2, process_index=0)
    actions = [
        lambda _: update(gradient_accumulation_steps=4),
        lambda _: update(num_processes=2),
        lambda _: _check_loader(repeating, 2),
    ]
    check_quotes("accelerate.md", [message_of(action, "nowhere") for action in actions])
