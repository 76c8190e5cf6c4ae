"""Objectives of one's own: units, sums, Terms, observed, Coupled, penalties that are right."""
import collections, dataclasses
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import S, TokensAndRow, sound, ce, coup, lm, mlp, next_token, obj, padded, pairs, reg, tokens, xy
from anybatch import Rows, Terms, Tokens, clip_loss, info_nce, observed


@sound("tokens_shifted")
def _():
    return obj(lm(), next_token, {"labels": tokens()[0]}, units=lambda b: (b["labels"][:, 1:] != -100).sum())


@sound("tokens_by_integer_lengths")
def _():
    y, n = tokens()
    return obj(lm(), next_token, {"labels": y, "lengths": n}, units=lambda b: b["lengths"].sum() - len(b["lengths"]))


@sound("tokens_units_by_ints_in_a_list")
def _():
    y, n = tokens()
    return obj(lm(), next_token, {"labels": y, "lengths": [int(i) - 1 for i in n]}, units=lambda b: sum(b["lengths"]))


@sound("masked_mean")
def _():
    batch = {"x": torch.randn(11, 5), "y": torch.randn(11), "mask": (torch.arange(11) % 3 > 0).float()}
    return obj(mlp(5, 8, 1), lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2 * b["mask"]).sum() / b["mask"].sum(), batch, units=lambda b: b["mask"].sum())


@sound("sample_weights")
def _():
    batch = (torch.randn(11, 5), torch.randn(11), torch.rand(11) * 5)
    return obj(mlp(5, 8, 1), lambda m, b: ((m(b[0])[:, 0] - b[1]) ** 2 * b[2]).sum() / b[2].sum(), batch, units=lambda b: b[2].sum())


@sound("mean_per_row_then_over_rows")
def _():
    def loss(m, b):
        y = b["labels"]
        each = F.cross_entropy(m(y.clamp(min=0)[:, :-1]).transpose(1, 2), y[:, 1:], reduction="none")
        k = (y[:, 1:] != -100)
        return ((each * k).sum(1) / k.sum(1)).mean()
    return obj(lm(), loss, {"labels": tokens()[0]})


@sound("own_sum")
def _():
    return obj(mlp(), lambda m, b: (m(b[0]) - b[1]).square().sum() / 100, reg(), reduction="sum")


@sound("own_sum_bf16_like_constant_divisor")
def _():
    return obj(lm(), lambda m, b: F.cross_entropy(m(b["labels"].clamp(min=0)).flatten(0, 1), b["labels"].flatten(), reduction="sum") / 4096, {"labels": tokens()[0]}, reduction="sum")


@sound("l2_penalty_in_a_mean")
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * sum(p.square().sum() for p in m.parameters()), xy(), )


@sound("focal_per_row")
def _():
    def loss(m, b):
        l = F.cross_entropy(m(b[0]), b[1], reduction="none")
        return ((1 - (-l).exp()) ** 2 * l).mean()
    return obj(mlp(), loss, xy())


@sound("dice_per_row")
def _():
    def loss(m, b):
        p = m(b[0]).sigmoid()
        return (1 - (2 * (p * b[1]).sum(1) + 1) / ((p + b[1]).sum(1) + 1)).mean()
    return obj(mlp(), loss, (torch.randn(10, 5), torch.rand(10, 3).round()))


@sound("rmse_per_row")
def _():
    return obj(mlp(), lambda m, b: (m(b[0]) - b[1]).square().mean(1).sqrt().mean(), reg())


@sound("gradient_penalty_per_row")
def _():
    def loss(m, x):
        x = x.clone().requires_grad_()
        out = m(x)
        g, = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + 10 * (g.norm(dim=1) - 1).square().mean()
    return obj(mlp(5, 8, 1), loss, torch.randn(9, 5))


@sound("negatives_within_each_row")
def _():
    def loss(m, b):
        q, k = m(b[0]), m(b[1].flatten(0, 1)).view(len(b[0]), 4, 3)
        return F.cross_entropy((q[:, None] * k).sum(-1), torch.zeros(len(q), dtype=torch.long))
    return obj(mlp(), loss, (torch.randn(10, 5), torch.randn(10, 4, 5)))


@sound("terms_penalty_once")
def _():
    def loss(m, b):
        return {"fit": F.cross_entropy(m(b[0]), b[1]), "small": sum(p.square().sum() for p in m.parameters())}
    u, w = {"fit": lambda b: len(b[0]), "small": None}, {"small": 0.1}
    return S(mlp(), Terms(loss, units=u, weights=w), xy(), loss=loss)


@sound("terms_tokens_and_rows")
def _():
    u = {"t": lambda b: (b["labels"][:, 1:] != -100).sum(), "r": lambda b: len(b["c"])}
    loss = TokensAndRow.losses
    return S(TokensAndRow(), Terms(loss, units=u), {"labels": tokens()[0], "c": torch.randint(0, 3, (10,))}, loss=loss)


@sound("observed_tokens")
def _():
    return S(lm(), observed(next_token), {"labels": tokens()[0]}, loss=next_token, units=lambda b: (b["labels"][:, 1:] != -100).sum())


@sound("observed_class_weights")
def _():
    w = torch.tensor([0.2, 1.0, 20.0])
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=w)
    return S(mlp(), observed(loss), xy(13), loss=loss, units=lambda b: w[b[1]].sum())


@sound("distillation_teacher_in_closure")
def _():
    teacher = nn.Sequential(mlp(), nn.Dropout(0.5)).eval().requires_grad_(False)
    return obj(mlp(), lambda m, b: F.kl_div(m(b).log_softmax(1), teacher(b).softmax(1), reduction="batchmean"), torch.randn(10, 5))


@sound("head_in_closure")
def _():
    head = nn.Linear(3, 2)
    s = obj(mlp(), lambda m, b: F.cross_entropy(head(m(b[0])), b[1]), xy(10, 5, 2))
    s.watch = lambda: [None if p.grad is None else p.grad.clone() for p in head.parameters()] + [p.detach().clone() for p in head.parameters()]
    return s


@sound("loss_module_with_parameters")
def _():
    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 3))
        def forward(self, m, b):
            return (m(b[0]) - self.centres[b[1]]).square().sum(1).mean()
    l = L()
    s = obj(mlp(), l, xy(10))
    s.watch = lambda: [l.centres.grad is None, l.centres.detach().clone()]
    return s


@sound("callable_object_that_only_counts")
def _():
    class L:
        calls = 0
        history = []
        def __call__(self, m, b):
            self.calls += 1
            loss = F.cross_entropy(m(b[0]), b[1])
            self.history.append(float(loss.detach()))
            return loss
    return obj(mlp(), L(), xy(10))


@sound("bound_method_with_a_memo")
def _():
    class T:
        def __init__(self):
            self.memo = {}
        def loss(self, m, b):
            w = self.memo.setdefault("w", torch.tensor(2.0))
            return w * F.cross_entropy(m(b[0]), b[1])
    return obj(mlp(), T().loss, xy(10))


# ---- batches of many shapes
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor


@sound("batch_namedtuple")
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b.x), b.y), Pair(*xy(10)))


@sound("batch_dataclass")
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b.x), b.y), Data(*xy(10)))


@sound("batch_nested")
def _():
    x, y = xy(10)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b["in"]["x"][0] + b["in"]["x"][1]), b["out"][0]), {"in": {"x": (x, 0.1 * x)}, "out": [y]})


@sound("batch_with_strings_and_a_scale")
def _():
    x, y = xy(10)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b["x"]) * b["scale"], b["y"]), {"x": x, "y": y, "names": [f"row{i}" for i in range(10)], "scale": torch.tensor(2.0)})


@sound("batch_of_a_tensor_alone")
def _():
    return obj(mlp(5, 8, 5), lambda m, b: (m(b) - b).square().mean(), torch.randn(10, 5))


@sound("batch_raw_samples_collated")
def _():
    collate = torch.utils.data.default_collate
    return obj(mlp(), ce, [(torch.randn(5), i % 3) for i in range(10)], units=lambda b: len(b[1]) if torch.is_tensor(b[0]) else len(b), micro_batch=Rows(3, collate=collate))


# ---- coupled, done right
enc2 = lambda m, b: (m(b[0]), m(b[1]))


def case(name, encode, loss, batch=pairs, model=mlp, **kw):
    sound(name)(lambda: coup(model(), encode, loss, batch(), **kw))


def barlow(r):
    a, b = [(z - z.mean(0)) / z.std(0) for z in r]
    c = a.T @ b / len(a)
    return (c - torch.eye(c.shape[0]).to(c)).square().sum()


def vicreg(r):
    a, b = r
    v = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in r)
    cov = sum(((z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1)).triu(1).square().sum() for z in r)
    return F.mse_loss(a, b) + v + cov


case("coupled_info_nce", enc2, info_nce(0.2))
case("coupled_barlow", enc2, barlow)
case("coupled_vicreg", enc2, vicreg)
case("coupled_rmse", lambda m, b: (m(b[0]), b[1]), lambda r: (r[0] - r[1]).square().mean().sqrt(), reg)
case("coupled_dice", lambda m, b: (m(b[0]), b[1]), lambda r: 1 - 2 * (r[0].sigmoid() * r[1]).sum() / (r[0].sigmoid() + r[1]).sum(), lambda: (torch.randn(10, 5), torch.rand(10, 3).round()))
case("coupled_supcon_labels", lambda m, b: (F.normalize(m(b[0]), dim=1), b[1]), lambda r: -((r[0] @ r[0].T).log_softmax(1) * (r[1][:, None] == r[1])).sum(1).mean(), lambda: xy(12))
case("coupled_neighbours", lambda m, b: m(b), lambda r: (r[1:] - r[:-1]).square().sum(1).mean(), lambda: torch.randn(11, 5))


@sound("coupled_clip_learned_temperature")
def _():
    torch.manual_seed(3)
    l = clip_loss()
    l.to(torch.get_default_dtype())
    return coup(mlp(), enc2, l, pairs())


@sound("coupled_with_dropout")
def _():
    return coup(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 4)), enc2, info_nce(0.3), pairs())


@sound("coupled_batch_norm_exact")
def _():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return coup(net, lambda m, b: m(b), lambda r: (r @ r.T).square().mean(), torch.randn(12, 5), options={"batch_norm": "exact"})


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(20, 6), nn.Linear(6, 4)

    def forward(self, ids, mask):
        return self.head((self.emb(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@sound("coupled_by_tokens")
def _():
    def encode(m, b):
        return m(b["input_ids"], b["attention_mask"])
    return coup(Pool(), encode, lambda r: r.var(0).sum() + r.mean(0).square().sum(), padded(), micro_batch=Tokens(24))


@sound("tokens_split_masked_pool")
def _():
    b = padded(); b["y"] = torch.randint(0, 4, (10,))
    return obj(Pool(), lambda m, b: F.cross_entropy(m(b["input_ids"], b["attention_mask"]), b["y"]), b, micro_batch=Tokens(24))


class LookPad(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(20, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.head(self.emb(ids).mean(1))


@sound("looks_at_padding_but_cut_by_rows", note="the split that trains does not trim")
def _():
    b = padded(); b["y"] = torch.randint(0, 4, (10,))
    return obj(LookPad(), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["y"]), b)


# ---- near a minimum, small and large
@sound("at_the_minimum_of_least_squares")
def _():
    x, y = torch.randn(12, 4).double(), torch.randn(12, 1).double()
    m = nn.Linear(4, 1, bias=False)
    m.weight.data = torch.linalg.lstsq(x, y).solution.T.to(m.weight.dtype)
    return obj(m, lambda m, b: (m(b[0]) - b[1]).square().mean(), (x.float(), y.float()))


@sound("gradients_that_cancel_by_symmetry")
def _():
    x = torch.randn(6, 4)
    x, y = torch.cat([x, x]), torch.cat([torch.ones(6, 1), -torch.ones(6, 1)])
    m = nn.Linear(4, 1)
    nn.init.zeros_(m.weight), nn.init.zeros_(m.bias)
    return obj(m, lambda m, b: (m(b[0]) - b[1]).square().mean(), (x, y))


@sound("zero_gradient_targets_met")
def _():
    m = mlp()
    x = torch.randn(10, 5)
    with torch.no_grad():
        y = m(x)
    return obj(m, lambda m, b: (m(b[0]) - b[1]).square().mean(), (x, y))


@sound("huge_and_tiny_rows")
def _():
    x, y = reg(10)
    return obj(nn.Linear(5, 3), lambda m, b: (m(b[0]) - b[1]).square().mean(), (x * torch.logspace(-3, 3, 10)[:, None], y))


@sound("tiny_loss")
def _():
    return obj(mlp(), lambda m, b: 1e-8 * F.cross_entropy(m(b[0]), b[1]), xy(10))


@sound("saturated_zero_gradient_but_for_one_row")
def _():
    x, y = torch.full((10, 5), 50.0), torch.zeros(10, 3)
    x[7] = 0.01
    return obj(nn.Sequential(nn.Linear(5, 3), nn.ReLU6()), lambda m, b: (m(b[0]) - b[1]).square().mean(), (x, y))


@sound("bf16_mlp")
def _():
    return obj(mlp().bfloat16(), lambda m, b: F.cross_entropy(m(b[0].to(m[0].weight.dtype)).to(b[0].dtype), b[1]), xy(24), micro_batch=5)


@sound("autocast_bf16")
def _():
    return obj(mlp(), ce, xy(24), micro_batch=5, options={"autocast": torch.bfloat16})


@sound("float64_model")
def _():
    return obj(mlp().double(), lambda m, b: F.cross_entropy(m(b[0].double()), b[1]), xy(10))


@sound("casts_to_fp32_inside")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        def forward(self, x):
            h = self.a(x)
            h = (h.float() if h.dtype != torch.float64 else h)
            return self.b((h / h.square().mean(1, keepdim=True).sqrt()).to(x.dtype))
    return obj(M(), ce, xy(10))


for n in (4, 12, 24, 48):
    sound(f"units_2_per_row_{n}")(lambda n=n: obj(mlp(), ce, xy(n), units=lambda b: 2.0 * len(b[0])))
