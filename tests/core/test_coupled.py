"""Coupled losses: all rows look at each other, micro-batch by micro-batch, and the gradient is the whole batch's.

The reference runs the encoder micro-batch by micro-batch with a graph, so that it draws the same dropout masks, and computes
one loss over all rows.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import (
    Accumulator,
    BatchError,
    Coupled,
    LossError,
    MicroBatches,
    NonFiniteError,
    Objective,
    Rows,
    Sum,
    Update,
    clip_loss,
    info_nce,
    stages,
)
from anybatch.core.batch import tensors
from tests.reference import gradient

SEED = 7


class Encoder(nn.Module):
    """Two layers with dropout between."""

    def __init__(self, width: int = 12, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Towers(nn.Module):
    """An encoder each for queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Encoder(), Encoder(10)

    def forward(self, pair: Any) -> tuple[Tensor, Tensor]:
        return self.query(pair[0]), self.key(pair[1])


def shared(model: nn.Module, pair: Any) -> tuple[Tensor, Tensor]:
    return model(pair[0]), model(pair[1])


def pairs(rows: int = 64, widths: tuple[int, int] = (12, 12)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, widths[0]), torch.randn(rows, widths[1])


def cut(batch: Any, sizes: list[int]) -> MicroBatches:
    columns = [column.split(sizes) for column in batch]
    return MicroBatches([tuple(parts) for parts in zip(*columns, strict=True)])


def at_once(model: nn.Module, coupled: Coupled, parts: MicroBatches) -> tuple[nn.Module, Coupled, Tensor]:
    """The same masks, one graph: every micro-batch through the encoder, one loss, one backward."""
    twin, objective = copy.deepcopy((model, coupled))
    torch.manual_seed(SEED)
    encoded = [objective.encode(twin, part) for part in parts]
    columns = [torch.cat(column) for column in zip(*(tensors(part) for part in encoded), strict=True)]
    loss = objective.loss(columns)
    loss.backward()
    return twin, objective, loss.detach()


def accumulated(model: nn.Module, coupled: Coupled, batch: Any, **settings: Any) -> tuple[nn.Module, Coupled, Any]:
    twin, objective = copy.deepcopy((model, coupled))
    torch.manual_seed(SEED)
    return twin, objective, Accumulator(twin, objective, micro_batch=Rows(16), **settings).backward(batch)


def error(model: nn.Module, reference: nn.Module) -> float:
    wanted = gradient(reference.parameters())
    return float((gradient(model.parameters()) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("sizes", [[16] * 4, [20, 20, 20, 4], [1] * 64, [64]])
def test_the_gradient_is_the_whole_batchs_with_the_same_dropout_masks(dtype, tolerance, sizes):
    model, batch = Encoder().to(dtype), tuple(column.to(dtype) for column in pairs())
    coupled = Coupled(shared, info_nce(0.1))
    parts = cut(batch, sizes)
    reference, _, loss = at_once(model, coupled, parts)
    run, _, result = accumulated(model, coupled, parts)
    assert error(run, reference) <= tolerance
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-6)
    assert (result.units, result.micro_batches) == (64, len(sizes))


def test_plain_accumulation_of_the_same_loss_is_not():
    model, batch = Encoder(), pairs()
    coupled = Coupled(shared, info_nce(0.1))
    reference, _, _ = at_once(model, coupled, cut(batch, [8] * 8))
    torch.manual_seed(SEED)
    Accumulator(model, coupled.whole(), micro_batch=8).backward(batch)
    assert error(model, reference) > 0.4


def test_without_the_random_state_of_the_first_pass_dropout_makes_it_wrong(monkeypatch):
    from anybatch.core.snapshot import RandomState

    model, parts = Encoder(), cut(pairs(), [16] * 4)
    coupled = Coupled(shared, info_nce(0.1))
    reference, _, _ = at_once(model, coupled, parts)
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    run, _, _ = accumulated(model, coupled, parts)
    assert error(run, reference) > 0.1


def test_random_draws_go_on_as_after_one_pass():
    model, parts, coupled = Encoder(), cut(pairs(), [16] * 4), Coupled(shared, info_nce())
    at_once(model, coupled, parts)
    wanted = torch.rand(3)
    accumulated(model, coupled, parts)
    assert torch.equal(torch.rand(3), wanted)


def test_two_towers_and_a_learned_temperature_get_the_whole_batchs_gradient():
    model, batch = Towers().double(), tuple(column.double() for column in pairs(40, (12, 10)))
    coupled = Coupled(lambda model, pair: model(pair), clip_loss().double())
    reference, objective, _ = at_once(model, coupled, cut(batch, [14, 13, 13]))
    run, mine, _ = accumulated(model, coupled, batch)
    assert error(run, reference) <= 1e-14
    (wanted,), (got,) = objective.parameters(), mine.parameters()
    assert wanted.grad.abs() > 0
    assert torch.allclose(got.grad, wanted.grad, rtol=1e-13)


def test_the_gradient_of_the_losss_own_parameters_is_added_to_and_put_back_after_an_error():
    model, coupled = Encoder(), Coupled(shared, clip_loss())
    (scale,) = coupled.parameters()
    accumulator = Accumulator(model, coupled, micro_batch=16)
    torch.manual_seed(SEED)
    accumulator.backward(pairs())
    once = scale.grad.clone()
    torch.manual_seed(SEED)
    accumulator.backward(pairs())
    assert torch.allclose(scale.grad, 2 * once)
    calls = []

    def fails_in_the_second_pass(module: nn.Module, inputs: Any) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("a bad row")

    model.register_forward_pre_hook(fails_in_the_second_pass)
    before = gradient(model.parameters())
    with pytest.raises(RuntimeError, match="a bad row"):
        accumulator.backward(pairs())
    assert torch.equal(scale.grad, 2 * once)
    assert torch.equal(gradient(model.parameters()), before)


def test_a_logit_scale_that_the_model_holds_may_come_as_a_representation():
    class Clip(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

    def encode(model: nn.Module, pair: Any) -> dict[str, Tensor]:
        image, text = model(pair)
        return {"image": image, "text": text, "scale": model.scale.exp()}

    def loss(seen: Any) -> Tensor:
        image, text, scale = seen.values() if isinstance(seen, dict) else seen
        logits = scale * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    model, batch = Clip().double(), tuple(column.double() for column in pairs(40, (12, 10)))
    twin = copy.deepcopy(model)
    torch.manual_seed(SEED)
    encoded = [encode(twin, part) for part in cut(batch, [14, 13, 13])]
    loss([*(torch.cat([part[name] for part in encoded]) for name in ("image", "text")), encoded[0]["scale"]]).backward()
    run, _, _ = accumulated(model, Coupled(encode, loss), batch)
    assert error(run, twin) <= 1e-14
    assert run.scale.grad.abs() > 0
    with pytest.raises(BatchError, match=r"batch\['scale'\] belongs to no row, but is .* one entry per row"):
        accumulated(model, Coupled(lambda m, p: {**encode(m, p), "scale": m(p)[0].mean()}, loss), batch)


def test_several_hard_negatives_per_row_and_labels_that_need_no_gradient():
    torch.manual_seed(0)
    batch = {
        "query": torch.randn(30, 12).double(),
        "key": torch.randn(30, 12).double(),
        "negatives": torch.randn(30, 3, 12).double(),
        "label": torch.randint(0, 4, (30,)),
    }

    class Seen(NamedTuple):
        vectors: list[Tensor]
        label: Tensor

    def encode(model: nn.Module, part: Any) -> Seen:
        return Seen([model(part[name]) for name in ("query", "key", "negatives")], part["label"])

    def loss(seen: Seen) -> Tensor:
        same = (seen.label[:, None] == seen.label).double()
        similarity = seen.vectors[0] @ seen.vectors[1].T
        return info_nce(0.2)(seen.vectors) + (same * similarity).mean()

    model = Encoder(dropout=0.2).double()
    twin = copy.deepcopy(model)
    torch.manual_seed(SEED)
    parts = [encode(twin, part) for part in Rows(16).cut(batch)]
    whole = Seen([torch.cat(column) for column in zip(*(part.vectors for part in parts), strict=True)], batch["label"])
    loss(whole).backward()
    run, _, _ = accumulated(model, Coupled(encode, loss), batch)
    assert error(run, twin) <= 1e-14


class Stateful(nn.Module):
    """Buffers that every forward changes: in place by BatchNorm, by assignment in a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("constant", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.into(x)) - self.average
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y * self.constant


@pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")
def test_the_second_pass_sees_the_buffers_that_the_first_saw_and_leaves_them_alone():
    model, parts, coupled = (
        Stateful().double(),
        cut([c.double() for c in pairs()], [16] * 4),
        Coupled(shared, info_nce()),
    )
    reference, _, _ = at_once(model, coupled, parts)
    run = copy.deepcopy(model)
    torch.manual_seed(SEED)
    Accumulator(run, coupled, micro_batch=16, batch_norm="micro").backward(parts)
    assert error(run, reference) <= 1e-13
    wanted = dict(reference.named_buffers())
    for name, buffer in run.named_buffers():
        if not name.startswith("norm."):
            assert torch.equal(buffer, wanted[name]), name
    assert run.norm.num_batches_tracked == 2, "the encoder runs twice over one batch: for queries and for keys"


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_bf16_autocast_keeps_its_cache_out_of_the_way_and_a_scaler_scales(scale):
    model, batch, coupled = Encoder(), pairs(), Coupled(shared, clip_loss(0.1))
    with torch.autocast("cpu", torch.bfloat16):
        reference, objective, _ = at_once(model, coupled, cut(batch, [16] * 4))
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    for ambient, own in ((True, None), (False, torch.bfloat16)):
        twin, mine = copy.deepcopy((model, coupled))
        torch.manual_seed(SEED)
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
            Accumulator(twin, mine, micro_batch=16, autocast=own).backward(batch, scaler=scaler)
        for parameter in (*twin.parameters(), *mine.parameters()):
            parameter.grad /= scale or 1
        assert error(twin, reference) <= 1e-2
        assert torch.allclose(mine.parameters()[0].grad, objective.parameters()[0].grad, rtol=1e-2)


def test_an_update_with_a_scaler_clipping_and_metrics_learns_from_the_whole_batch():
    model, batch = Encoder(dropout=0.0), pairs()

    def loss(seen: Any) -> Any:
        return info_nce(0.1)(seen), {"rows": Sum(len(seen[0])), "width": 8.0}

    twin = copy.deepcopy(model)
    info_nce(0.1)(shared(twin, batch)).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    update = Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Coupled(shared, loss),
        micro_batch=16,
        clip_norm=0.5,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12),
    )
    result = update(batch)
    assert result.applied
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    assert {name: float(value) for name, value in result.metrics.items()} == {"rows": 64, "width": 8}
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-6)


def test_bf16_parameters_are_summed_in_fp32():
    model, batch = Encoder(dropout=0.0).bfloat16(), tuple(column.bfloat16() for column in pairs())
    coupled = Coupled(shared, info_nce(0.5))
    twin = copy.deepcopy(model).float()
    coupled.loss(shared(twin, tuple(column.float() for column in batch))).backward()
    run, _, _ = accumulated(model, coupled, cut(batch, [1] * 64), keep_fp32=True)
    assert all(parameter.grad.dtype == torch.float32 for parameter in run.parameters())
    assert error(run, twin) < 3e-2


def test_a_micro_batch_that_is_not_finite_is_dropped_and_no_other_row_sees_it():
    model, (queries, keys) = Encoder(dropout=0.0).double(), (column.double() for column in pairs())
    spoiled = queries.clone()
    spoiled[20] = float("nan")
    coupled = Coupled(shared, info_nce(0.1))
    kept = [*range(16), *range(32, 64)]
    reference, _, loss = at_once(model, coupled, cut((queries[kept], keys[kept]), [48]))
    run, _, result = accumulated(model, coupled, (spoiled, keys), drop_nonfinite=True)
    assert error(run, reference) <= 1e-13
    assert (result.dropped, result.units) == ((1,), 48)
    assert float(result.loss) == pytest.approx(float(loss))


def test_a_gradient_that_is_not_finite_drops_its_micro_batch_too():
    class Kink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + (x[:, :4] * 0 * self.inner.weight.sum()).sqrt()

    model, (queries, keys) = Kink(), (column.double().abs() for column in pairs(12))
    with torch.no_grad():
        model.inner.weight.abs_()
    queries = torch.cat([queries, queries])

    def encode(model: nn.Module, pair: Any) -> tuple[Tensor, Tensor]:
        return model.inner(pair[0]) if pair[0][0, 0] != queries[4, 0] else model(pair[0]), model.inner(pair[1])

    result = Accumulator(model, Coupled(encode, info_nce()), micro_batch=4, drop_nonfinite=True).backward(
        (queries[:12], keys)
    )
    assert result.dropped == (1,)
    assert gradient(model.parameters()).isfinite().all()


def test_a_batch_with_nothing_finite_is_not_applied_and_raise_names_the_micro_batch():
    model, (queries, keys) = Encoder(), pairs()
    queries[:] = float("inf")
    settings = {"micro_batch": 16, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    dropping = Update(model, objective=Coupled(shared, info_nce()), on_nonfinite="drop", **settings)
    before = copy.deepcopy(model.state_dict())
    result = dropping((queries, keys))
    assert (result.applied, result.dropped) == (False, (0, 1, 2, 3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    raising = Update(model, objective=Coupled(shared, info_nce()), **settings)
    queries, keys = pairs()
    queries[40] = float("nan")
    with pytest.raises(NonFiniteError, match="first in micro-batch 2 of 4"):
        raising((queries, keys))


def test_a_batch_of_no_units_leaves_zero_gradients():
    model = Encoder()
    result = Accumulator(model, Coupled(shared, info_nce(), lambda batch: 0), micro_batch=16).backward(pairs())
    assert not gradient(model.parameters()).any()
    assert (float(result.loss), result.units) == (0.0, 0)


def test_the_events_tell_both_passes():
    seen: list[stages.Event] = []
    accumulated(
        Encoder(), Coupled(lambda model, x: model(x), lambda x: x.var()), torch.randn(6, 12), observer=seen.append
    )
    assert [event.stage for event in seen] == ["load", "forward", "loss", "backward", "accumulate"]
    seen.clear()
    model = Encoder()
    Accumulator(
        model, Coupled(lambda model, x: model(x), lambda x: x.var()), micro_batch=2, observer=seen.append
    ).backward(torch.randn(6, 12))
    first, one = ["load", "forward"], ["backward", "accumulate"]
    assert [event.stage for event in seen] == [*first * 3, "loss", *one, *first, *one, *first, *one]
    assert [event.micro_batch for event in seen] == [0, 0, 1, 1, 2, 2, None, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1]


def test_only_one_graph_is_alive_at_a_time():
    import weakref

    graphs: list[weakref.ref[Tensor]] = []

    def encode(model: nn.Module, part: Tensor) -> Tensor:
        assert all(graph() is None for graph in graphs), "another micro-batch's graph is still alive"
        hidden = model(part)
        if hidden.requires_grad:
            graphs.append(weakref.ref(hidden))
        return hidden.tanh()

    Accumulator(nn.Linear(3, 2), Coupled(encode, lambda x: x.var()), micro_batch=2).backward(torch.randn(8, 3))
    assert len(graphs) == 4, "one graph each: the last micro-batch's first pass is its only one"


def test_a_representation_that_is_a_slice_does_not_keep_what_it_was_cut_from():
    from benchmarks.meter import peak_bytes_of_all_threads

    model, x = nn.Linear(4, 4), torch.randn(64, 200, 4)

    def peak(encode: Any) -> int:
        model.zero_grad()
        accumulator = Accumulator(model, Coupled(encode, lambda y: y.var()), micro_batch=2)
        return peak_bytes_of_all_threads(lambda: accumulator.backward(x), [x])

    first_of_all, first_alone = peak(lambda model, x: model(x)[:, 0]), peak(lambda model, x: model(x)[:, 0].clone())
    assert first_of_all <= 1.05 * first_alone


@pytest.mark.parametrize(
    ("coupled", "message"),
    [
        (lambda: Coupled(shared, None), r"both must be functions.*info_nce"),
        (lambda: info_nce(0), "temperature=0: expected a number above 0"),
        (lambda: Coupled(lambda m, p: None, info_nce()), "encode returned NoneType without a tensor"),
        (lambda: Coupled(lambda m, p: m(p[0]).detach(), lambda x: x.var()), "do not depend on any parameter"),
        (lambda: Coupled(lambda m, p: m(p[0]), lambda x: x), r"shape \(64, 8\); expected one number"),
        (lambda: Coupled(lambda m, p: m(p[0]), info_nce()), r"takes \(queries, keys\).*at least two"),
    ],
)
def test_what_cannot_be_coupled_is_refused_with_the_fix(coupled, message):
    with pytest.raises(LossError, match=message):
        Accumulator(Encoder(), coupled(), micro_batch=16).backward(pairs())


def test_representations_that_cannot_be_joined_are_named():
    ragged = Coupled(lambda model, part: {"tokens": model(part[0]).new_zeros(16, len(part[1]), 2)}, lambda x: x.var())
    with pytest.raises(BatchError, match=r"batch\['tokens'\] has shapes \(16, 5, 2\), \(16, 3, 2\).*padding"):
        parts = MicroBatches([(torch.zeros(16, 12), "a" * 5), (torch.zeros(16, 12), "b" * 3)])
        coupled = Coupled(lambda m, p: {**ragged.encode(m, p), "x": m(p[0])}, ragged.loss, lambda batch: 16)
        Accumulator(Encoder(), coupled, micro_batch=16).backward(parts)


def test_info_nce_is_the_cross_entropy_of_cosines_with_every_negative_for_every_row():
    torch.manual_seed(0)
    queries, keys, negatives = torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 2, 4)
    total = 0.0
    for row in range(5):
        candidates = [*keys, *negatives.reshape(-1, 4)]
        logits = torch.stack([F.cosine_similarity(queries[row], other, dim=0) / 0.1 for other in candidates])
        total -= logits.log_softmax(0)[row]
    assert float(info_nce(0.1)((queries, keys, negatives))) == pytest.approx(float(total / 5), rel=1e-5)
    symmetric = (info_nce(0.07)((queries, keys)) + info_nce(0.07)((keys, queries))) / 2
    assert float(clip_loss()({"image": queries, "text": keys}).detach()) == pytest.approx(float(symmetric), rel=1e-5)


def test_an_objective_of_the_whole_batch_can_be_had():
    model, batch, coupled = Encoder(dropout=0.0), pairs(), Coupled(shared, info_nce())
    assert isinstance(coupled.whole(), Objective)
    with torch.no_grad():
        assert torch.equal(coupled.whole().loss(model, batch), info_nce()(shared(model, batch)))
