"""Scenarios of the golden record (`benchmarks/golden.py`): a name, a function of the recorder, a number of ranks.

Tiny models, ragged data, the public API only. A scenario records through `seen`: `result`, `tensors`, `say`, `refuse`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import anybatch as ab
from benchmarks.models import ResidualNet, TokenModel

Scenario = Callable[[Any], None]
CE = ab.supervised(nn.CrossEntropyLoss())
SIZES = (64, 61, 40)


def data(*sizes: int, classes: int = 3) -> list[Any]:
    return [(torch.randn(size, 6), torch.randint(0, classes, (size,))) for size in sizes or SIZES]


def mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)


def train(seen: Any, model: nn.Module | None = None, objective: Any = CE, batches: Any = None, **options: Any) -> Any:
    """Updates on all batches; an error of anybatch is recorded, and the next batch is given."""
    model = model or mlp()
    optimizer = options.pop("optimizer", sgd)(model)
    if schedule := options.pop("schedule", None):
        options["scheduler"] = schedule(optimizer)
    update = ab.Update(model, optimizer, objective, **{"micro_batch": 16} | options)
    learn(seen, update, data() if batches is None else batches)
    seen.say(update.guard.finding)
    return update


def learn(seen: Any, update: Any, batches: Iterable[Any], mode: Any = None) -> None:
    for batch in batches:
        try:
            with mode or contextlib.nullcontext():
                result = update(batch)
            seen.result(result)
        except ab.AnybatchError as error:
            seen.say(f"{type(error).__name__}: {error}")
        seen.tensors(update.model)


def with_options(**options: Any) -> Scenario:
    return lambda seen: train(seen, **options) and None


# ---- objectives and batches
def texts(count: int, vocabulary: int = 50) -> list[Tensor]:
    lengths = torch.empty(count).log_normal_(2.0, 0.8).clamp(3, 40).long()
    return [torch.randint(1, vocabulary, (int(length),)) for length in lengths]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    ids, labels = pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def token_pairs(count: int = 24) -> tuple[Tensor, Tensor]:
    batch = padded(texts(count))
    return batch["input_ids"][:, :-1], batch["labels"][:, 1:]


def criterion(seen: Any, made: nn.Module, targets: str = "classes") -> None:
    batches = data()
    if targets == "ignored":
        batches = [(x, y.masked_fill(torch.rand(len(y)) < 0.4, -100)) for x, y in batches]
    if targets == "numbers":
        batches = [(x, torch.rand(len(x), 3)) for x, _ in batches]
    train(seen, objective=ab.supervised(made), batches=batches)


def per_row(model: nn.Module, batch: Any) -> Any:
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return each.mean(), {"rows": ab.PerRow(each), "sum": ab.Sum(each.sum()), "mean": ab.Mean(each.mean(), len(each))}


def terms() -> Any:
    def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch[0])
        return {
            "kept": F.cross_entropy(logits, batch[1]),
            "square": logits.square().mean(),
            "w": model[0].weight.norm(),
        }

    units = {"kept": lambda batch: (batch[1] != -100).sum(), "square": ab.rows, "w": None}
    return ab.Terms(losses, units=units, weights={"square": 0.1, "w": 0.01})


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pairs(*sizes: int) -> list[Any]:
    return [(x, x + 0.3 * torch.randn_like(x)) for x, _ in data(*sizes)]


def coupled(loss: Any) -> Any:
    return ab.Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), loss)


def spread(pair: tuple[Tensor, Tensor]) -> Tensor:
    return (pair[0] @ pair[1].T).var() + pair[0].std(0).sum()


def clip_tower(seen: Any) -> None:
    objective = coupled(ab.clip_loss())
    chosen = lambda model: torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=0.01)  # noqa: E731
    train(seen, mlp(), objective, pairs(), optimizer=chosen, micro_batch=9)
    seen.tensors(objective.loss)


def nested(seen: Any, kind: str) -> None:
    """The same rows in containers of several kinds."""
    kinds = {
        "dict": lambda x, y: {"in": {"x": x}, "y": y, "names": [f"row {number}" for number in range(len(x))]},
        "list": lambda x, y: [x, y],
        "image and dicts": lambda x, y: (x, [{"label": one, "boxes": torch.ones(2, 4)} for one in y]),
        "samples": lambda x, y: ab.SampleList(zip(x, y, strict=True)),
    }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = {
            "dict": lambda: (batch["in"]["x"], batch["y"]),
            "list": lambda: batch,
            "image and dicts": lambda: (batch[0], torch.stack([one["label"] for one in batch[1]])),
            "samples": lambda: map(torch.stack, zip(*batch, strict=True)),
        }[kind]()
        return F.cross_entropy(model(x), y)

    train(seen, objective=ab.Objective(loss), batches=[kinds[kind](*batch) for batch in data()])


def with_inf(number: int = 1, row: int = 20) -> list[Any]:
    batches = data()
    batches[number][0][row, 3] = torch.inf
    return batches


def half_ignored(*sizes: int) -> list[Any]:
    return [(x, y.where(x[:, 0] > 0, -100)) for x, y in data(*sizes)]


def empty(batches: list[Any]) -> list[Any]:
    return [(x, torch.full_like(y, -100)) if number == 1 else (x, y) for number, (x, y) in enumerate(batches)]


# ---- other entrances
def accumulator(seen: Any) -> None:
    model, batches = mlp(nn.BatchNorm1d(8)), data()
    accumulated = ab.Accumulator(model, CE, micro_batch=7, batch_norm="exact")
    for batch in batches:  # gradients of three batches add up
        seen.result(accumulated.backward(batch))
        seen.tensors(model)


def window(seen: Any) -> None:
    model = mlp()
    with ab.Window(model.parameters()) as opened:
        for x, y in data():
            opened.backward(F.cross_entropy(model(x), y), units=len(x))
    seen.say((float(opened.loss).hex(), opened.units, opened.micro_batches))
    seen.tensors(model)


def resumed(seen: Any) -> None:
    batches = data(64, 61, 40, 33)
    make = lambda model: ab.Update(model, torch.optim.AdamW(model.parameters()), CE, micro_batch=ab.Rows(16))  # noqa: E731
    first = make(ab.row_dropout(mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))))
    learn(seen, first, batches[:2])
    ab.save("checkpoints", first, number=2, progress={"epoch": 1})
    torch.rand(3)
    second = make(ab.row_dropout(mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))))
    found = ab.resume("checkpoints", second)
    seen.say((found.ranks, dict(found.progress), found.passed_over))
    learn(seen, second, batches[2:])


class OutOfMemory(TorchDispatchMode):
    """Raises once, at operation `point` of the first and third update; the step of the third is left out."""

    def __init__(self, point: int) -> None:
        super().__init__()
        self.point, self.count, self.updates, self.is_left_out = point, 0, 0, False

    def before_step(self, *_: Any) -> None:
        self.is_left_out = self.updates == 2

    def after_step(self, *_: Any) -> None:
        self.updates += 1
        self.is_left_out = self.updates == 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.is_left_out
        if self.count == self.point and not self.is_left_out:
            self.point = -1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def out_of_memory(seen: Any, model: nn.Module, objective: Any, batches: list[Any], **options: Any) -> None:
    """Each operation of the first and third update fails once; `operations` has all outcomes, `messages` the distinct ones."""
    start, state, outcomes = (
        {name: one.clone() for name, one in model.state_dict().items()},
        torch.get_rng_state(),
        set(),
    )
    for point in itertools.count(1):
        model.load_state_dict(start)
        torch.set_rng_state(state)
        optimizer, run, mode = sgd(model), type(seen)(), OutOfMemory(point)
        optimizer.register_step_pre_hook(mode.before_step)
        optimizer.register_step_post_hook(mode.after_step)
        learn(run, ab.Update(model, optimizer, objective, micro_batch=4, check="off", **options), batches, mode)
        seen.fields["operations"].append(str(run.short()))
        outcomes.add((run.short()["weights"], *run.fields["messages"]))
        if mode.point > 0:  # there was no such operation
            break
    seen.fields["messages"] = sorted({*seen.fields["messages"], *map(str, outcomes)})


def verdict(seen: Any, model: nn.Module, objective: Any, batch: Any) -> None:
    found = ab.verify(model, objective, batch, micro_batch=5)
    seen.say((found.finding, [cause.kind for cause in found.causes]))
    seen.say(found)
    seen.tensors(model)


def planned(seen: Any, memory: str) -> None:
    model = mlp()
    found = ab.plan(model, sgd(model), CE, data(64)[0], memory=memory)
    seen.say((found.micro_batch, found.micro_batch > 0))
    seen.tensors(model)


# ---- ranks
def dealt(batches: list[Any], empty_rank: int = -1) -> list[Any]:
    """This rank's rows of each batch: uneven, and none for one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = []
    for batch in batches:
        left = len(batch[0])
        taken = [
            0 if other == empty_rank else 3 + left * (other + 1) // (ranks * (ranks + 1)) for other in range(ranks)
        ]
        taken[0 if empty_rank else -1] += left - sum(taken)
        start = sum(taken[:rank])
        columns = [column[start : start + taken[rank]] for column in batch]
        mine.append(tuple(columns) if taken[rank] else None)
    return mine


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def on_ranks(seen: Any, wrap: Any, layers: Any = (), batches: Any = data, empty_rank: int = -1, **options: Any) -> None:
    batches = dealt(batches(), empty_rank)
    torch.manual_seed(7)
    model = wrap(mlp(*(layer() for layer in layers)))
    train(seen, model, batches=batches, **{"micro_batch": 5, "clip_norm": 0.5} | options)


# ---- transformers and the integrations
def head(kind: str, **config: Any) -> nn.Module:
    import transformers

    made: Any = getattr(transformers, kind)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_labels": 3, "pad_token_id": 0, "use_cache": False}
    return made(made.config_class(**sizes | config))


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
HEADS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {}, "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "BertForMaskedLM": {}, "BertForSequenceClassification": {}, "BertForTokenClassification": {},
    "T5ForConditionalGeneration": T5,
}  # fmt: skip


def language(seen: Any, kind: str, gap: bool = False, **options: Any) -> None:
    batches: list[Any] = [padded(texts(24)) for _ in range(3)]
    for batch in batches:
        if kind.endswith("SequenceClassification"):
            batch["labels"] = torch.randint(0, 3, (24,))
        elif "Token" in kind:
            batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 3)
        if gap:
            batch["labels"][4:8] = -100
    train(seen, head(kind, **HEADS[kind]), ab.huggingface(), batches, **{"micro_batch": 4} | options)


def hugging_face_trainer(seen: Any) -> None:
    import transformers

    from anybatch.integrations.huggingface import exact

    rows = [{"input_ids": torch.randint(3, 50, (6,)), "labels": torch.randint(0, 3, ())} for _ in range(19)]
    args = transformers.TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=3, gradient_accumulation_steps=4, num_train_epochs=2,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    model = head("BertForSequenceClassification")
    trainer = exact(transformers.Trainer)(model, args, train_dataset=rows)
    trainer.train()
    seen.fields["loss"] += [float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry]
    seen.tensors(model)


def lightning_trainer(seen: Any) -> None:
    import lightning

    from anybatch.integrations.lightning import ExactStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.log("loss", loss := own_loss(self.net, batch))
            return loss

        def configure_optimizers(self) -> Any:
            return sgd(self)

    module, rows = Module(), list(zip(*data(57)[0], strict=True))
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=ExactStrategy(micro_batch=6),
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=24))
    seen.fields["loss"].append(float(trainer.callback_metrics["loss"]).hex())
    seen.tensors(module)


def accelerate_loop(seen: Any) -> None:
    import accelerate

    from anybatch.integrations.accelerate import global_loader, prepared_update

    accelerator, model, rows = accelerate.Accelerator(cpu=True), mlp(), list(zip(*data(57)[0], strict=True))
    model, optimizer = accelerator.prepare(model, sgd(model))
    update = prepared_update(accelerator, model, optimizer, CE, micro_batch=16)
    learn(seen, update, global_loader(accelerator, rows, batch_size=24))


# ---- the table of scenarios
def bf16(seen: Any, **options: Any) -> None:
    batches = [(x.bfloat16(), y) for x, y in data(128, 128, 100)]
    train(seen, mlp().bfloat16(), batches=batches, **{"micro_batch": 2} | options)


def scaled(seen: Any, batches: list[Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    train(seen, batches=batches, scaler=scaler, schedule=linear, clip_norm=0.5)
    seen.say(scaler.get_scale())


def linear(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 16)


def refusal(**options: Any) -> Scenario:
    return lambda seen: seen.refuse(lambda: train(seen, **options))


def images() -> list[Any]:
    return [(torch.randn(count, 3, 8, 8), torch.randint(0, 10, (count,))) for count in (12, 10)]


def norms(seen: Any, **options: Any) -> None:
    train(seen, mlp(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), **options)


def rmse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1].float()).sqrt()


WEIGHT = torch.tensor([0.2, 1.0, 20.0])
ALONE: dict[str, Scenario] = {
    "rows": lambda seen: train(seen, nn.Linear(6, 3), batches=data(*[64] * 15, 40), clip_norm=0.25),
    "linear learning rate": with_options(schedule=linear, clip_norm=0.25),
    "AdamW": with_options(optimizer=lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1)),
    "class weights": lambda seen: criterion(seen, nn.CrossEntropyLoss(WEIGHT)),
    "class weights, ignored, smoothed": lambda seen: criterion(
        seen, nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), "ignored"
    ),
    "ignore_index": lambda seen: criterion(seen, nn.CrossEntropyLoss(), "ignored"),
    "sum reduction": lambda seen: criterion(seen, nn.CrossEntropyLoss(reduction="sum")),
    "none reduction": lambda seen: seen.refuse(lambda: criterion(seen, nn.CrossEntropyLoss(reduction="none"))),
    "class probabilities": lambda seen: criterion(seen, nn.CrossEntropyLoss(), "numbers"),
    "squared error": lambda seen: criterion(seen, nn.MSELoss(), "numbers"),
    "binary cross-entropy": lambda seen: criterion(seen, nn.BCEWithLogitsLoss(pos_weight=WEIGHT), "numbers"),
    "PerRow, Sum, Mean": with_options(objective=ab.Objective(per_row)),
    "Terms": lambda seen: train(seen, objective=terms(), batches=data()),
    "observed": with_options(objective=ab.observed(own_loss)),
    "observed, ignored": lambda seen: train(seen, objective=ab.observed(own_loss), batches=empty(data())),
    "ragged tokens": lambda seen: train(seen, TokenModel(50, 8), batches=[token_pairs() for _ in SIZES], micro_batch=4),
    "info_nce by 8": lambda seen: train(seen, mlp(), coupled(ab.info_nce(0.05)), pairs(), micro_batch=8),
    "info_nce by 16, dropout": lambda seen: train(seen, mlp(nn.Dropout(0.2)), coupled(ab.info_nce(0.1)), pairs()),
    "info_nce, symmetric, drop": lambda seen: train(
        seen, mlp(), coupled(ab.info_nce(symmetric=True)), pairs(), on_nonfinite="drop"
    ),
    "clip_loss": clip_tower,
    "custom Coupled": lambda seen: train(seen, mlp(), coupled(spread), pairs(), micro_batch=9),
    "Coupled, exact BatchNorm": lambda seen: train(
        seen, mlp(nn.BatchNorm1d(8)), coupled(spread), pairs(), micro_batch=9, batch_norm="exact"
    ),
    "BatchNorm, exact": partial(norms, batch_norm="exact", micro_batch=8),
    "BatchNorm, exact, on disk": partial(norms, batch_norm="exact", offload="disk"),
    "BatchNorm, micro": partial(norms, batch_norm="micro"),
    "BatchNorm, frozen": partial(norms, batch_norm="frozen"),
    "BatchNorm, unsaid": norms,
    "ResNet, exact": lambda seen: train(seen, ResidualNet(4), batches=images(), batch_norm="exact", micro_batch=5),
    "row_dropout": lambda seen: train(seen, ab.row_dropout(mlp(nn.Dropout(0.3))), micro_batch=7),
    "stock dropout": lambda seen: train(seen, mlp(nn.Dropout(0.3))),
    "spectral norm": lambda seen: train(seen, mlp(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))),
    "Rows(tail=)": with_options(micro_batch=ab.Rows(16, tail=2)),
    "Rows(groups=)": lambda seen: train(seen, batches=data(64, 62, 40), micro_batch=ab.Rows(6, groups=2)),
    "Rows(batch_dim=1)": lambda seen: train(
        seen, nn.LSTM(6, 3), ab.Objective(lambda model, x: model(x)[0].square().mean(), lambda x: x.shape[1]),
        [torch.randn(9, 20, 6) for _ in SIZES], micro_batch=ab.Rows(6, batch_dim=1),
    ),
    "MicroBatches": lambda seen: train(seen, batches=[ab.MicroBatches(data(9, 5, 14)), ab.MicroBatches(data(7, 8))]),
    "windows()": lambda seen: train(seen, batches=ab.windows(data(16, 16, 9, 16, 4), 2)),
    "Fit, room for all": with_options(micro_batch=ab.Fit("1GiB", most=16)),
    "Fit, by itself": with_options(micro_batch=ab.Fit("1GiB")),
    "dict": partial(nested, kind="dict"),
    "list": partial(nested, kind="list"),
    "images and dicts": partial(nested, kind="image and dicts"),
    "SampleList": partial(nested, kind="samples"),
    "GlobalBatches": lambda seen: train(
        seen, batches=ab.GlobalBatches(list(zip(*data(104)[0], strict=True)), 40, rank=0, ranks=1).loader()
    ),
    "GradScaler": lambda seen: scaled(seen, data()),
    "GradScaler, overflow": lambda seen: scaled(seen, with_inf()),
    **{f"on_nonfinite={way!r}": lambda seen, way=way: train(seen, batches=with_inf(), on_nonfinite=way)
       for way in ("raise", "skip", "drop", "ignore")},
    "drop, coupled": lambda seen: train(
        seen, mlp(), coupled(spread), [(x, x.clone()) for x, _ in with_inf()], on_nonfinite="drop"
    ),
    "on_empty='skip'": lambda seen: train(seen, batches=empty(data())),
    "on_empty='step'": lambda seen: train(seen, batches=empty(data()), on_empty="step"),
    "bf16, 64 micro-batches": bf16,
    "bf16, sums='param'": partial(bf16, sums="param"),
    "autocast": with_options(autocast=torch.bfloat16),
    "clip_value": with_options(clip_value=0.01),
    "noise": lambda seen: train(seen, batches=data(*[64] * 7), noise=1),
    "prefetch": with_options(prefetch=True),
    "Accumulator": accumulator,
    "Window": window,
    "save and resume": resumed,
    "check: rmse": lambda seen: train(seen, objective=ab.Objective(rmse)),
    "check: wrong units": lambda seen: train(
        seen, objective=ab.Objective(own_loss), batches=half_ignored()
    ),
    "check: a sum": lambda seen: train(
        seen, objective=ab.Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    ),
    "check: contrastive": lambda seen: train(
        seen, objective=ab.Objective(lambda model, pair: ab.info_nce()((model(pair[0]), model(pair[1])))), batches=pairs()
    ),
    "check: off": with_options(objective=ab.Objective(rmse), check="off"),
    "out of memory, BatchNorm": lambda seen: out_of_memory(seen, mlp(nn.BatchNorm1d(8)), CE, data(8, 8, 8)),
    "out of memory, dropout": lambda seen: out_of_memory(seen, mlp(nn.Dropout(0.3)), CE, data(8, 7, 6)),
    "out of memory, coupled": lambda seen: out_of_memory(seen, mlp(), coupled(spread), pairs(8, 7, 6)),
    "verify, sound": lambda seen: verdict(seen, mlp(nn.Dropout(0.2)), CE, data(20)[0]),
    "verify, wrong units": lambda seen: verdict(
        seen, mlp(), ab.Objective(own_loss), half_ignored(20)[0]
    ),
    "verify, rmse": lambda seen: verdict(seen, mlp(), ab.Objective(rmse), data(20)[0]),
    "verify, BatchNorm": lambda seen: verdict(seen, mlp(nn.BatchNorm1d(8)), CE, data(20)[0]),
    "plan, all fits": partial(planned, memory="1GiB"),
    "plan, nothing fits": partial(planned, memory="1KiB"),
    "Hugging Face, no target": partial(language, kind="LlamaForCausalLM", gap=True),
    "Hugging Face, Tokens": lambda seen: language(seen, "LlamaForCausalLM", micro_batch=ab.Tokens(120)),
    "integration: Hugging Face Trainer": hugging_face_trainer,
    "integration: Lightning": lightning_trainer,
    "integration: Accelerate": accelerate_loop,
    **{f"Hugging Face, {kind}": partial(language, kind=kind) for kind in HEADS},
    **{f"refusal: {name}": refusal(**options) for name, options in {
        "micro_batch=0": {"micro_batch": 0}, "micro_batch='big'": {"micro_batch": "big"},
        "clip_norm=-1": {"clip_norm": -1.0}, "clip twice": {"clip_norm": 1.0, "clip_value": 1.0},
        "batch_norm='most'": {"batch_norm": "most"}, "on_nonfinite='panic'": {"on_nonfinite": "panic"},
        "on_empty='run'": {"on_empty": "run"}, "sums='fp8'": {"sums": "fp8"}, "check='twice'": {"check": "twice"},
        "offload='tape'": {"offload": "tape"}, "noise=0": {"noise": 0}, "unknown option": {"micro_batchs": 3},
        "a criterion": {"objective": nn.CrossEntropyLoss()}, "no rows": {"batches": [(torch.tensor(1.0), 2)]},
        "mismatched rows": {"batches": [(torch.randn(8, 6), torch.zeros(7).long())]},
        "a list of like tensors": {"batches": [[torch.randn(12) for _ in range(8)]]},
        "0 rows": {"batches": [(torch.randn(0, 6), torch.zeros(0).long())]},
        "a batch of None": {"batches": [None]},
    }.items()},
    "refusal: no micro_batch": lambda seen: seen.refuse(lambda: ab.Update(model := mlp(), sgd(model), CE)),
    "refusal: another model's optimizer": lambda seen: seen.refuse(
        lambda: ab.Update(mlp(), sgd(mlp()), CE, micro_batch=4)(data(9)[0])
    ),
    "refusal: Tokens too small": lambda seen: language(seen, "LlamaForCausalLM", micro_batch=ab.Tokens(5)),
}  # fmt: skip

WRAPS: dict[str, Any] = {"DDP": DistributedDataParallel, "FSDP2": sharded}
RANKED: dict[str, tuple[Scenario, int]] = {
    f"{wrap}, {name}, {ranks} rank{'s'[: ranks - 1]}": (partial(on_ranks, wrap=WRAPS[wrap], **options), ranks)
    for wrap in WRAPS
    for name, ranks, options in [
        ("plain", 1, {}),
        ("plain", 2, {}),
        ("plain", 3, {}),
        ("class weights", 2, {"objective": ab.supervised(nn.CrossEntropyLoss(WEIGHT))}),
        ("one empty", 2, {"empty_rank": 1}),
        ("one empty", 3, {"empty_rank": 1}),
        ("coupled", 2, {"objective": coupled(spread), "batches": pairs}),
        ("exact BatchNorm", 2, {"layers": [partial(nn.BatchNorm1d, 8)], "batch_norm": "exact"}),
        ("BatchNorm unsaid", 2, {"layers": [partial(nn.BatchNorm1d, 8)]}),
        ("skip", 2, {"batches": with_inf, "on_nonfinite": "skip"}),
        ("drop", 2, {"batches": with_inf, "on_nonfinite": "drop"}),
        ("raise", 2, {"batches": with_inf}),
        ("bf16 autocast", 2, {"autocast": torch.bfloat16, "reshard": False}),
    ]
}
dropping = RANKED["FSDP2, drop, 2 ranks"][0]
RANKED["FSDP2, drop, 2 ranks"] = (lambda seen: seen.refuse(lambda: dropping(seen)), 2)
SCENARIOS: dict[str, tuple[Scenario, int]] = {name: (run, 0) for name, run in ALONE.items()} | RANKED
