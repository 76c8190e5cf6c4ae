"""Lightning: the module stays as it is, and its optimizer gets the whole batch's gradient."""

import contextlib
import logging
import warnings
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from anybatch import GlobalBatches, LossError, UnitsError, Update, UpdateError, rows, supervised
from anybatch.integrations.lightning import ExactDDPStrategy, ExactFSDP2Strategy, ExactStrategy
from benchmarks.trainers import vector_of
from tests.processes.ranks import on_ranks

EXACT = 5e-7
WEIGHT = torch.tensor([0.2, 1.0, 20.0])
for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)


def data(count: int = 57) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    classes = torch.multinomial(torch.tensor([0.6, 0.35, 0.05]), count, replacement=True)
    return list(zip(torch.randn(count, 6), classes, strict=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0].to(next(model.parameters()).dtype))
    return F.cross_entropy(logits, batch[1], WEIGHT.to(logits.dtype))


class Module(lightning.LightningModule):
    """Class weights, a log, a schedule; and what its optimizer was handed."""

    def __init__(self, loss: Any = weighted_loss, extra: Any = None) -> None:
        super().__init__()
        self.net, self.loss_of, self.extra = net(), loss, extra
        self.gradients: list[Tensor] = []
        self.weights: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss_of(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch[1])), reduce_fx="sum")
        return loss if self.extra is None else self.extra(loss, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([vector_of(parameter) for parameter in self.net.parameters()]))
        state = {name: value.detach() for name, value in self.net.state_dict().items()}
        full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        self.weights.append({name: value.clone() for name, value in full.items()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(module: Any, strategy: Any, batch: int = 24, count: int = 57, loader: Any = None, **options: Any) -> Any:
    usual = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "log_every_n_steps": 1,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*number of training batches.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        trainer = lightning.Trainer(strategy=strategy, **usual | options)
        resume = options.get("ckpt_path")
        trainer.fit(module, loader or DataLoader(data(count), batch_size=batch), ckpt_path=resume)
    return trainer


def error_of(module: Any, batch: int = 24, count: int = 57, loss: Any = weighted_loss) -> float:
    all_rows, found = data(count), []
    starts = range(0, count, batch)
    assert len(module.gradients) == len(starts)
    for gradient, weights, start in zip(module.gradients, module.weights, starts, strict=True):
        twin = net()
        twin.load_state_dict(weights)
        twin.double()
        x, y = zip(*all_rows[start : start + batch], strict=True)
        loss(twin, (torch.stack(x), torch.stack(y))).backward()
        wanted = torch.cat([vector_of(parameter) for parameter in twin.parameters()])
        found.append(float((gradient - wanted).norm() / wanted.norm()))
    return max(found)


@pytest.mark.parametrize("micro_batch", [5, 24])
def test_the_optimizer_gets_the_whole_batchs_gradient(micro_batch):
    module = Module()
    fitted(module, ExactStrategy(micro_batch=micro_batch))
    assert error_of(module) <= EXACT


def test_accumulate_grad_batches_does_not():
    module = Module()
    fitted(module, "auto", batch=6, accumulate_grad_batches=4)
    assert error_of(module) > 0.1


def test_units_may_be_given():
    def summed(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0].to(next(model.parameters()).dtype))
        return F.cross_entropy(logits, batch[1], reduction="sum") / len(batch[1])

    module = Module(summed)
    fitted(module, ExactStrategy(micro_batch=5, units=rows))
    assert error_of(module, loss=summed) <= EXACT
    with pytest.raises(UnitsError, match="none of torch's mean-reducing functions"):
        fitted(Module(summed), ExactStrategy(micro_batch=5))


def test_a_loss_that_adds_a_penalty_asks_for_units():
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        return weighted_loss(model, batch) + 0.1 * model[0].weight.square().sum()

    with pytest.raises(UnitsError, match="adds something to its mean"):
        fitted(Module(penalised), ExactStrategy(micro_batch=5))


def test_what_is_logged_is_the_batchs_weighted_by_units_and_logged_once():
    class Logged(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            seen.append(
                {name: float(value) for name, value in trainer.callback_metrics.items()} | {"out": outputs["loss"]}
            )

    seen: list[dict[str, Any]] = []
    module = Module()
    trainer = fitted(module, ExactStrategy(micro_batch=5), callbacks=[Logged()], num_sanity_val_steps=0)
    x, y = zip(*data()[:24], strict=True)
    first = weighted_loss(net().double(), (torch.stack(x), torch.stack(y))).item()
    assert seen[0]["loss_step"] == pytest.approx(first, rel=1e-6)
    assert float(seen[0]["out"]) == pytest.approx(first, rel=1e-6)
    means = [float(one["loss_step"]) for one in seen]
    wanted = sum(mean * size for mean, size in zip(means, (24, 24, 9), strict=True)) / 57
    assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(wanted, rel=1e-6)
    assert [one["rows"] for one in seen] == [24.0, 24.0, 9.0]


def test_what_a_step_returns_beside_its_loss_is_put_together():
    class Kept(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            kept.append(outputs)

    kept: list[Any] = []
    module = Module(extra=lambda loss, batch: {"loss": loss, "targets": batch[1]})
    fitted(module, ExactStrategy(micro_batch=5), callbacks=[Kept()])
    assert torch.equal(kept[0]["targets"], torch.stack([row[1] for row in data()[:24]]))


def test_batch_norm_sees_the_whole_batch():
    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    module = Module()
    module.net = normed()
    fitted(module, ExactStrategy(micro_batch=5, batch_norm="exact"), max_steps=1)
    x, y = (torch.stack(column) for column in zip(*data()[:24], strict=True))
    twin = normed().double()
    weighted_loss(twin, (x, y)).backward()
    wanted = torch.cat([vector_of(parameter) for parameter in twin.parameters()])
    assert float((module.gradients[0] - wanted).norm() / wanted.norm()) <= 3e-6


class Counting(Callback):
    """Which hooks ran at which step."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and not name.startswith(("on_save", "on_load", "on_exception")):
            return lambda trainer, *_, **__: self.told.append((name, trainer.global_step))
        return object.__getattribute__(self, name)


def test_hooks_steps_and_the_schedule_are_those_of_lightning():
    told = []
    for strategy in ("auto", ExactStrategy(micro_batch=5)):
        counting = Counting()
        trainer = fitted(Module(), strategy, callbacks=[counting], max_epochs=2, gradient_clip_val=0.1)
        told.append(
            (counting.told, trainer.global_step, trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"])
        )
    assert told[0] == told[1]


def test_clipping_sees_the_whole_gradient():
    class Clipped(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms.append(None)

    norms: list[Any] = []
    module = Module()
    trainer = fitted(module, ExactStrategy(micro_batch=5), gradient_clip_val=0.1, callbacks=[Clipped()], max_steps=1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(net().parameters(), module.net.parameters(), strict=True)])
    assert trainer.global_step == 1
    assert float(moved.detach().norm()) == pytest.approx(0.1 * 0.1, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "scaled"])
def test_precision_plugins_stay_lightnings(precision):
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))]
    module = Module()
    options = {"plugins": plugins} if precision == "scaled" else {"precision": precision}
    fitted(module, ExactStrategy(micro_batch=5), **options)
    assert error_of(module) <= 3e-2


class Scaled(MixedPrecision):
    """A loss scale, without the autocast to fp16 that comes with Lightning's."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("strategy", "steps"), [("auto", 3), (ExactStrategy(micro_batch=5), 2)], ids=["stock", "exact"]
)
def test_the_schedule_waits_for_an_update_that_the_loss_scale_leaves_out(strategy, steps):
    """The second of three batches has an inf. Lightning alone goes on with the schedule."""
    rows = data()
    rows[30] = (torch.full((6,), torch.inf), rows[30][1])
    module = Module()
    trainer = fitted(module, strategy, loader=DataLoader(rows, batch_size=24), plugins=[Scaled()])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * (1 - steps / 6))
    assert "step" not in vars(trainer.lr_scheduler_configs[0].scheduler)


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    def run(resume: Any = None, **options: Any) -> Any:
        module = Module()
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                strategy=ExactStrategy(micro_batch=5), accelerator="cpu", devices=1, max_epochs=2, logger=False,
                enable_progress_bar=False, enable_model_summary=False, callbacks=[saving], **options,
            )  # fmt: skip
            trainer.fit(module, DataLoader(data(), batch_size=24), ckpt_path=resume)
        return module.net.state_dict()

    whole = run()
    resumed = run(resume=tmp_path / "epoch=0.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_would_be_wrong_is_refused_by_name():
    with pytest.raises(UpdateError, match="accumulate_grad_batches=2 beside ExactStrategy"):
        fitted(Module(), ExactStrategy(micro_batch=5), accumulate_grad_batches=2)

    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(UpdateError, match="optimizes by hand"):
        module = Module()
        module.automatic_optimization = False
        fitted(module, ExactStrategy(micro_batch=5))
    with pytest.raises(LossError, match="training_step returned NoneType"):
        fitted(Module(extra=lambda loss, batch: None), ExactStrategy(micro_batch=5))


class Sharded(Module):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is not None and not hasattr(self.net[0].weight, "full_tensor"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def on_two(kind: str, count: int) -> float:
    import os

    rank = torch.distributed.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1",
                      TORCHELASTIC_RUN_ID="x", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")  # fmt: skip
    try:
        strategy = {"ddp": ExactDDPStrategy, "fsdp2": ExactFSDP2Strategy}[kind](micro_batch=5)
        module = {"ddp": Module, "fsdp2": Sharded}[kind]()
        loader = GlobalBatches(data(count), 24, shuffle=False).loader()
        fitted(module, strategy, loader=loader, devices=2, use_distributed_sampler=False)
        return error_of(module, count=count)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("count", [57, 49])
def test_on_two_ranks_a_tail_of_one_row_is_exact_too(kind, count):
    assert max(on_ranks(2, on_two, kind, count)) <= EXACT


def set_up_by_fabric() -> tuple[Any, nn.Module, Any, Update]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss(WEIGHT)), micro_batch=5)
    return fabric, plain, {"model": model, "optimizer": optimizer}, update


def test_a_killed_run_of_fabric_resumes_from_what_fabric_saved(tmp_path):
    fabric, whole, state, update = set_up_by_fabric()
    first, *rest = DataLoader(data(), batch_size=24)
    update(first)
    fabric.save(tmp_path / "state.ckpt", state)
    for batch in rest:
        update(batch)
    fabric, resumed, state, update = set_up_by_fabric()
    fabric.load(tmp_path / "state.ckpt", state)
    for batch in rest:
        update(batch)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_fabric_takes_an_update_of_what_it_set_up():
    _, plain, _, update = set_up_by_fabric()
    x, y = (torch.stack(column) for column in zip(*data(24), strict=True))
    update((x, y))
    twin = net().double()
    weighted_loss(twin, (x, y)).backward()
    wanted = torch.cat([vector_of(parameter) for parameter in twin.parameters()])
    gradient = torch.cat([vector_of(parameter) for parameter in plain.parameters()])
    assert float((gradient - wanted).norm() / wanted.norm()) <= EXACT
