"""Rows that look at each other, functions of means, ratios, statistics."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import S, broken, ce, coup, mlp, obj, padded, pairs, reg, xy
from anybatch import Tokens, huggingface
from benchmarks.proof_zoo.hfzoo import causal, make, plain, shifted, ids

C = "coupled|.*additive"


def out_case(name, kind, f, batch=None, n=11, accept=C, text="do(es)? not add up|not additive|function of (a|the) mean", model=mlp):
    """loss = f(outputs, targets): the fix Coupled(lambda m, b: (m(b[0]), b[1]), f) can be applied to the letter."""
    def build():
        enc, tail = (lambda m, b: (m(b[0]), b[1])), (lambda r: f(*r))
        return obj(model(), lambda m, b: f(m(b[0]), b[1]), (batch or (lambda: reg(n)))(), coupled=(enc, tail))
    broken(name, kind, accept, text, True)(build)


cov = lambda z: (z - z.mean(0)).T @ (z - z.mean(0)) / max(1, len(z) - 1)
std = lambda z: (z.var(0, unbiased=False) + 1e-6).sqrt()
binary = lambda: (torch.randn(12, 5), torch.rand(12, 3).round())
cls = lambda: xy(12)

out_case("rmse", "root of a mean", lambda o, y: (o - y).square().mean().sqrt())
out_case("rmse_plus_mae", "root of a mean, and a mean", lambda o, y: (o - y).square().mean().sqrt() + (o - y).abs().mean())
out_case("log_of_mean", "log of a mean", lambda o, y: (o - y).square().mean().log())
out_case("log1p_cosh_of_mean", "function of a mean", lambda o, y: torch.log1p((o - y).square().mean()))
out_case("perplexity", "exp of a mean", lambda o, y: F.cross_entropy(o, y).exp(), cls)
out_case("flooding", "absolute value of a mean (flooding)", lambda o, y: (F.cross_entropy(o, y) - 1.05).abs() + 1.05, lambda: xy(24))
out_case("dice_over_batch", "ratio of sums", lambda o, y: 1 - 2 * (o.sigmoid() * y).sum() / (o.sigmoid() + y).sum(), binary)
out_case("iou_over_batch", "ratio of sums", lambda o, y: 1 - (o.sigmoid() * y).sum() / (o.sigmoid() + y - o.sigmoid() * y).sum(), binary)
out_case("tversky", "ratio of sums", lambda o, y: 1 - (o.sigmoid() * y).sum() / ((o.sigmoid() * y).sum() + 0.3 * (o.sigmoid() * (1 - y)).sum() + 0.7 * ((1 - o.sigmoid()) * y).sum()), binary)
out_case("soft_f1_macro", "ratio of sums per class", lambda o, y: 1 - (2 * (o.sigmoid() * y).sum(0) / ((o.sigmoid() + y).sum(0) + 1e-6)).mean(), binary)
out_case("r_squared", "ratio with the variance of the targets", lambda o, y: (o - y).square().sum() / ((y - y.mean(0)).square().sum() + 1e-3))
out_case("pearson", "correlation over rows", lambda o, y: 1 - F.cosine_similarity((o - o.mean(0)).flatten(), (y - y.mean(0)).flatten(), dim=0))
out_case("concordance", "concordance correlation", lambda o, y: 1 - 2 * ((o - o.mean()) * (y - y.mean())).mean() / (o.var(unbiased=False) + y.var(unbiased=False) + (o.mean() - y.mean()) ** 2 + 1e-4))
out_case("entropy_of_mean", "entropy of the mean prediction", lambda o, y: F.cross_entropy(o, y) + (lambda p: (p * p.log()).sum())(o.softmax(1).mean(0)), cls)
out_case("mean_bias_squared", "square of a mean residual", lambda o, y: (o - y).square().mean() + (o - y).mean().square())
out_case("mean_match_of_moments", "match of moments", lambda o, y: (o.mean(0) - y.mean(0)).square().sum())
out_case("worst_row", "max over rows", lambda o, y: (o - y).square().mean(1).max(), text="do(es)? not add up|not additive|max")
out_case("logsumexp_of_rows", "logsumexp over rows", lambda o, y: (o - y).square().mean(1).logsumexp(0))
out_case("top_3_rows", "mean of the hardest rows", lambda o, y: (o - y).square().mean(1).sort(descending=True).values[: max(1, len(o) // 3)].mean(), n=12)
out_case("median_of_rows", "median over rows", lambda o, y: (o - y).square().mean(1).median())
out_case("std_of_losses", "variance penalty (V-REx)", lambda o, y: (lambda l: l.mean() + l.var(unbiased=False))((o - y).square().mean(1)))
out_case("hidden_by_detach", "loss / loss.detach()", lambda o, y: (lambda l: l / l.detach())((o - y).square().mean()))
out_case("listwise_softmax", "softmax over rows", lambda o, y: -(y[:, 0].softmax(0) * o[:, 0].log_softmax(0)).sum())
out_case("pairwise_ranking", "all pairs of rows", lambda o, y: F.softplus(-(o[:, None, 0] - o[None, :, 0]) * (y[:, None, 0] - y[None, :, 0]).sign()).mean())
out_case("cox_partial_likelihood", "risk sets over rows", lambda o, y: -(o[:, 0] - o[:, 0].logcumsumexp(0)).mean())
out_case("supcon", "supervised contrastive", lambda o, y: -((lambda z: z @ z.T)(F.normalize(o, dim=1)).div(0.5).log_softmax(1) * (y[:, None] == y)).sum(1).mean(), cls)
out_case("batch_hard_triplet", "hardest positive and negative of the batch", lambda o, y: (lambda d, s: F.softplus((d * s).max(1).values - (d + 9 * s).min(1).values).mean())(torch.cdist(o, o + 1e-3), (y[:, None] == y).to(o)), cls)
out_case("zca_whitening", "ZCA over rows", lambda o, y: (lambda c: ((o - o.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(c)).T - y).square().mean())(cov(o) + 0.1 * torch.eye(3).to(o)))
out_case("std_over_rows", "standardised outputs", lambda o, y: ((o - o.mean(0)) / std(o) - y).square().mean())
out_case("std_over_rows_penalty", "a penalty on the std over rows", lambda o, y: (o - y).square().mean() + F.relu(1 - std(o)).mean())
out_case("coral", "distance of covariances", lambda o, y: (cov(o) - cov(y)).square().sum())
out_case("mmd", "kernel distance of outputs and targets", lambda o, y: (lambda k: k(o, o).mean() + k(y, y).mean() - 2 * k(o, y).mean())(lambda a, b: (-(a[:, None] - b).square().sum(-1)).exp()))
out_case("logdet_of_gram", "log det over rows", lambda o, y: -torch.logdet(o.T @ o / len(o) + torch.eye(3).to(o)))
out_case("neighbours_in_time", "differences of neighbouring rows", lambda o, y: (o - y).square().mean() + (o[1:] - o[:-1]).square().sum() / len(o))
out_case("group_means", "mean over classes of class means", lambda o, y: torch.stack([F.cross_entropy(o[y == c], y[y == c]) for c in y.unique()]).mean(), cls, accept=C + "|units|unknown")
out_case("normalised_by_largest_weight", "weights over their largest", lambda o, y: ((o - y).square().mean(1) * (y.norm(dim=1) / y.norm(dim=1).max())).mean())


def pair_case(name, kind, f, text=""):
    def build():
        enc = lambda m, b: (m(b[0]), m(b[1]))
        return obj(mlp(), lambda m, b: f(enc(m, b)), pairs(), coupled=(enc, f))
    broken(name, kind, C, text, True)(build)


def barlow(r):
    a, b = [(z - z.mean(0)) / std(z) for z in r]
    c = a.T @ b / len(a)
    return (c - torch.eye(c.shape[0]).to(c)).square().sum()


def vicreg(r):
    return F.mse_loss(*r) + sum(F.relu(1 - std(z)).mean() + cov(z).triu(1).square().sum() for z in r)


def ntxent(r):
    z = F.normalize(torch.cat(r), dim=1)
    s = (z @ z.T / 0.5).masked_fill(torch.eye(len(z)).bool(), -1e9)
    n = len(r[0])
    return F.cross_entropy(s, torch.arange(2 * n).roll(n))


pair_case("info_nce_accumulated", "InfoNCE", lambda r: F.cross_entropy(r[0] @ r[1].T, torch.arange(len(r[0]))))
pair_case("clip_symmetric_accumulated", "CLIP", lambda r: sum(F.cross_entropy(s, torch.arange(len(s))) for s in (r[0] @ r[1].T, r[1] @ r[0].T)))
pair_case("ntxent", "NT-Xent", ntxent)
pair_case("barlow_twins", "Barlow Twins", barlow)
pair_case("vicreg_accumulated", "VICReg", vicreg)
pair_case("siglip_without_mean_over_pairs", "SigLIP over all pairs", lambda r: -F.logsigmoid((r[0] @ r[1].T) * (2 * torch.eye(len(r[0])).to(r[0]) - 1)).sum() / len(r[0]))


# ---- in the model, or before it
class Layer(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def layer_case(name, kind, f, x=lambda: torch.randn(11, 5), model=None, accept=C, text="", **kw):
    def build():
        m = model() if model else nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Layer(f), nn.Linear(6, 3))
        data = x()
        return obj(m, ce, (data, torch.randint(0, 3, (len(data),))), **kw)
    broken(name, kind, accept, text, False)(build)


layer_case("centres_by_batch_mean", "x - x.mean(0) in a layer", lambda h: h - h.mean(0))
layer_case("softmax_dim_0", "softmax over rows in a layer", lambda h: h.softmax(0))
layer_case("layer_norm_over_everything", "normalised over all rows", lambda h: F.layer_norm(h, h.shape))
layer_case("divides_by_batch_max", "scale by the batch's largest", lambda h: h / h.abs().max())
layer_case("cumsum_over_rows", "cumsum over rows", lambda h: h.cumsum(0))
layer_case("roll_over_rows", "the neighbour's features", lambda h: h + 0.5 * h.roll(1, 0))
layer_case("pair_norm", "PairNorm of graphs", lambda h: (h - h.mean(0)) / (h - h.mean(0)).square().sum(1).mean().sqrt())
layer_case("sinkhorn", "Sinkhorn over rows", lambda h: (lambda q: q / q.sum(0, keepdim=True) / q.sum(1, keepdim=True))(h.exp()))
layer_case("dynamic_quantisation_scale", "a scale from the whole batch", lambda h: h * h.detach().abs().amax())
layer_case("batch_norm_functional", "F.batch_norm outside a layer", lambda h: F.batch_norm(h, None, None, training=True), accept=C + "|batch_norm")
layer_case("attention_over_rows_mha", "batch_first=False on rows first", None, lambda: torch.randn(9, 5, 8), lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Flatten(), nn.Linear(40, 3)), text="batch_first")


class Rnn(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


for k, r in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)):
    layer_case(f"{k}_without_batch_first", "recurrent layer reads rows as time", None, lambda: torch.randn(10, 7, 4), lambda r=r: Rnn(r(4, 6)), text="batch_first")


def bn_case(name, layer, x=lambda: torch.randn(12, 5), accept="batch_norm", kind="BatchNorm of each micro-batch", **kw):
    def build():
        data = x()
        return obj(layer(), ce, (data, torch.randint(0, 3, (len(data),))), **kw)
    broken(name, kind, accept, "batch ?norm", True)(build)


mid = lambda bn: nn.Sequential(nn.Linear(5, 8), bn, nn.ReLU(), nn.Linear(8, 3))
bn_case("bn_train", lambda: mid(nn.BatchNorm1d(8)))
bn_case("bn_micro_asked", lambda: mid(nn.BatchNorm1d(8)), options={"batch_norm": "micro"})
bn_case("bn_cnn", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), lambda: torch.randn(10, 2, 5, 5))
bn_case("bn_no_affine_no_tracking", lambda: mid(nn.BatchNorm1d(8, affine=False, track_running_stats=False)))


@broken("bn_eval_without_tracking", "BatchNorm without running statistics takes the batch's in eval too", "batch_norm|" + C, "batch ?norm", False)
def _():
    return obj(mid(nn.BatchNorm1d(8, track_running_stats=False)).eval(), ce, xy(12))


@broken("bn_and_wrong_units", "BatchNorm and wrong units", "batch_norm|units", "", False)
def _():
    y = torch.randint(0, 3, (12,)); y[[1, 2, 3, 4, 9]] = -100
    return obj(mid(nn.BatchNorm1d(8)), ce, (torch.randn(12, 5), y))


def prep_case(name, kind, loss, batch=lambda: xy(12), accept=C, text="", model=mlp):
    broken(name, kind, accept, text, False)(lambda: obj(model(), loss, batch()))


prep_case("inputs_standardised_by_batch", "inputs standardised by the batch in the objective", lambda m, b: F.cross_entropy(m((b[0] - b[0].mean(0)) / std(b[0])), b[1]))
prep_case("inputs_min_max", "inputs scaled by the batch's extremes", lambda m, b: F.cross_entropy(m(b[0] / b[0].abs().max()), b[1]))
prep_case("targets_standardised", "targets (advantages) standardised by the batch", lambda m, b: (m(b[0]) * (b[1] - b[1].mean()) / (b[1].std(unbiased=False) + 1e-5)).mean(), lambda: reg(12))
prep_case("mixup_by_flip", "MixUp with the batch reversed", lambda m, b: F.cross_entropy(m(0.7 * b[0] + 0.3 * b[0].flip(0)), b[1]))
prep_case("negatives_by_roll", "negatives are the neighbours", lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[1]), m(b[1].roll(1, 0))), pairs)
prep_case("mixup_randperm", "MixUp by randperm", lambda m, b: F.cross_entropy(m(0.7 * b[0] + 0.3 * b[0][torch.randperm(len(b[0]))]), b[1]), accept=C + "|draws|randomness", text="permut|mixup")
prep_case("cutmix_randperm", "CutMix by randperm", lambda m, b: F.cross_entropy(m(torch.cat([b[0][:, :3], b[0][torch.randperm(len(b[0])), 3:]], 1)), b[1]), accept=C + "|draws|randomness", text="permut|mixup|order")
prep_case("branch_on_the_batch", "a branch on a statistic of the batch", lambda m, b: F.cross_entropy(m(b[0]) * (2 if b[0][:, 0].mean() > 0.1 else 1), b[1]), accept=C + "|unknown|touched", text="branch")


@broken("touched_head_by_batch", "which head takes part depends on all rows", "touched|" + C + "|unknown", "", False)
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.b(h) if x[:, 0].sum() > 0 else self.c(h)
    return obj(M(), ce, xy(12))


@broken("expert_capacity", "capacity of an expert counted over the micro-batch", C + "|touched|unknown", "", False)
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.e = nn.Linear(5, 2), nn.ModuleList(nn.Linear(5, 3) for _ in range(2))
        def forward(self, x):
            p, i = self.g(x).softmax(1).max(1)
            out = x.new_zeros(len(x), 3)
            for k in range(2):
                w = (i == k).nonzero()[:, 0][: 3]
                out = out.index_add(0, w, self.e[k](x[w]) * p[w, None])
            return out
    return obj(M(), ce, xy(14))


@broken("mixtral_router_balance", "Mixtral with its load-balancing loss", C + "|units|error|unknown", "balanc|router|adds something|auxiliary", False)
def _():
    return S(make("mixtral", output_router_logits=True, router_aux_loss_coef=1.0), huggingface(), causal(), loss=plain, units=shifted)


@broken("mixtral_router_balance_by_objective", "the same, by Objective", C + "|units|unknown", "balanc|router|auxiliary", False)
def _():
    return obj(make("mixtral", output_router_logits=True, router_aux_loss_coef=1.0), plain, causal(), units=shifted)


# ---- pairs torn apart
def dpo(m, x):
    a, b = m(x)[:, 0].chunk(2)
    return -F.logsigmoid(a - b).mean()


@broken("torn_stacked_pairs", "[chosen; rejected] cut by rows", C + "|.*pair.*|.*group.*|.*torn.*|error", "groups|stacked|belong together|torn", False)
def _():
    return obj(mlp(5, 8, 1), dpo, torch.randn(12, 5), micro_batch=4)


@broken("torn_interleaved_pairs", "interleaved views cut by 3 rows", C + "|.*pair.*|.*group.*|.*torn.*|error", "groups|belong together|torn", False)
def _():
    def loss(m, x):
        z = m(x)
        n = len(z) // 2
        return (z[0: 2 * n: 2] - z[1: 2 * n: 2]).square().sum(1).mean() if n else z.sum() * 0
    return obj(mlp(), loss, torch.randn(12, 5), micro_batch=3)


@broken("prototypes_cut_as_rows", "class prototypes as long as the batch are cut with it", C + "|error|unknown", "", False)
def _():
    return obj(mlp(5, 8, 4), lambda m, b: F.cross_entropy(m(b["x"]) @ b["prototypes"].T, b["y"] % len(b["prototypes"])), {"x": torch.randn(9, 5), "y": torch.randint(0, 9, (9,)), "prototypes": torch.randn(9, 4)})


# ---- Coupled, done wrong
@broken("coupled_encode_centres", "encode looks at other rows", C, "encode", False)
def _():
    return coup(mlp(), lambda m, b: m(b[0]) - m(b[0]).mean(0), lambda r: (r @ r.T).square().mean(), pairs())


@broken("coupled_encode_input_norm", "encode standardises its inputs by the micro-batch", C, "encode", False)
def _():
    return coup(mlp(), lambda m, b: m((b[0] - b[0].mean(0)) / std(b[0])), lambda r: (r @ r.T).square().mean(), pairs())


@broken("coupled_batch_norm_left_alone", "BatchNorm inside encode", "batch_norm|" + C, "batch ?norm", True)
def _():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return coup(net, lambda m, b: m(b), lambda r: (r @ r.T).square().mean(), torch.randn(12, 5))


@broken("coupled_encode_returns_mean", "encode returns a mean over its rows", C + "|error|units|mean", "encode|rows", False)
def _():
    return coup(mlp(), lambda m, b: m(b[0]).mean(0, keepdim=True), lambda r: (r.exp().mean(0)).square().sum(), pairs())


# ---- padding and Tokens
class Look(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.emb, self.head, self.f = nn.Embedding(20, 6), nn.Linear(6, 4), f

    def forward(self, ids):
        return self.head(self.f(self.emb(ids)))


def pad_case(name, kind, f):
    @broken(name, kind, "padding", "padding", True)
    def _():
        b = padded(); b["y"] = torch.randint(0, 4, (10,))
        return obj(Look(f), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["y"]), b, micro_batch=Tokens(24))


pad_case("padding_mean_pool", "a mean over padding, cut by Tokens", lambda h: h.mean(1))
pad_case("padding_last_position", "the last position, padding or not, cut by Tokens", lambda h: h[:, -1])
pad_case("padding_max_pool", "a maximum over padding, cut by Tokens", lambda h: h.amax(1))


@broken("padding_xlnet_tokens", "XLNet reads its summary off the padding; cut by Tokens", "padding", "padding", False)
def _():
    x, mask = ids()
    return S(make("xlnet", summary_type="last", dropout=0.0), huggingface(), {"input_ids": x, "attention_mask": mask, "labels": torch.randint(0, 3, (8,))}, loss=plain, units=lambda b: len(b["labels"]), micro_batch=Tokens(21))


@broken("padding_bert_without_mask", "the mask is not given to the model; cut by Tokens", "padding", "padding|mask", False)
def _():
    x, mask = ids()
    m = make("bert_cls", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return obj(m, lambda m, b: m(input_ids=b["input_ids"], labels=b["labels"]).loss, {"input_ids": x, "attention_mask": mask, "labels": torch.randint(0, 3, (8,))}, micro_batch=Tokens(21))


@broken("trimmed_features", "features declared per token are trimmed", "padding|error|inputs|.*trim.*|.*feature.*", "trim|per_token|keep|padding|shape", False)
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.f, self.head = nn.Embedding(20, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 4)
        def forward(self, ids, mask, extra):
            h = (self.emb(ids) * mask[..., None]).sum(1)
            return self.head(h * (1 + extra.sum(1, keepdim=True) * self.f))
    b = padded(); b["y"] = torch.randint(0, 4, (10,)); b["extra"] = torch.randn(10, 8)
    return obj(M(), lambda m, b: F.cross_entropy(m(b["input_ids"], b["attention_mask"], b["extra"]), b["y"]), b, micro_batch=Tokens(24, per_token=("extra",)))


@broken("coupled_by_tokens_looks_at_padding", "Coupled cut by Tokens, encode looks at padding", "padding|" + C, "padding", False)
def _():
    return coup(Look(lambda h: h.mean(1)), lambda m, b: m(b["input_ids"]), lambda r: (r @ r.T).square().mean(), padded(), micro_batch=Tokens(24))
