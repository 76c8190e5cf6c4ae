"""A script as launchers start it in each of two processes: 33 rows in batches of 12, by an Update, by Accelerate, by a Trainer.

    launched.py FOLDER by_update|by_accelerate|by_trainer...

Each rank leaves in its file how far each ended from one process that runs whole batches.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import GlobalBatches, Update, supervised

SIZE, MICRO, LR = 12, 3, 0.1
OBJECTIVE = supervised(nn.CrossEntropyLoss())


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(33, 6), torch.randint(0, 3, (33,))


def rows() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*data(), strict=True))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def whole() -> Tensor:
    model, (x, y) = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for start in range(0, 33, SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + SIZE]), y[start : start + SIZE]).backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_update(folder: Path) -> nn.Module:
    model = DistributedDataParallel(net())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=LR), OBJECTIVE, micro_batch=MICRO)
    for batch in GlobalBatches(rows(), SIZE, shuffle=False).loader():
        update(batch)
    return model


def by_accelerate(folder: Path) -> nn.Module:
    import accelerate

    from anybatch.integrations.accelerate import global_loader, prepared_update

    accelerator = accelerate.Accelerator(cpu=True)
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=LR))
    update = prepared_update(accelerator, model, optimizer, OBJECTIVE, micro_batch=MICRO)
    for batch in global_loader(accelerator, rows(), SIZE, shuffle=False):
        update(batch)
    return plain


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def by_trainer(folder: Path) -> nn.Module:
    import transformers

    from anybatch.integrations.huggingface import exact

    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=MICRO, gradient_accumulation_steps=2, num_train_epochs=1,
        learning_rate=LR, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_strategy="no", train_sampling_strategy="sequential", dataloader_pin_memory=False,
        ddp_backend="gloo",
    )  # fmt: skip
    model = WithLoss()
    trainer = exact(transformers.Trainer)(model, args, train_dataset=[{"x": x, "labels": int(y)} for x, y in rows()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return model


def main() -> None:
    folder, names, ways = Path(sys.argv[1]), sys.argv[2:], (by_update, by_accelerate, by_trainer)
    dist.init_process_group("gloo")
    told: dict[str, Any] = {"ranks": dist.get_world_size()}
    for way in [way for way in ways if way.__name__ in names]:
        told[way.__name__] = float((flat(way(folder)) - whole()).norm() / whole().norm())
    torch.save(told, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
