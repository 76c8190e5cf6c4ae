"""Every criterion of torch, by supervised(...): units known."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import S, sound, mlp, xy, reg
from anybatch import supervised


def sup(model, criterion, batch, units=None, reduction="mean", **kw):
    def loss(model, batch):
        out = model(batch[0])
        return criterion(*(out if isinstance(out, tuple) else (out,)), *batch[1:])
    return S(model, supervised(criterion), batch, loss=loss, units=units, reduction=reduction, **kw)


def case(name, f):
    sound(name)(f)


case("ce", lambda: sup(mlp(), nn.CrossEntropyLoss(), xy()))
case("ce_7_by_2", lambda: sup(mlp(), nn.CrossEntropyLoss(), xy(7), micro_batch=2))
case("ce_two_rows", lambda: sup(mlp(), nn.CrossEntropyLoss(), xy(2), micro_batch=1))
case("mse", lambda: sup(mlp(), nn.MSELoss(), reg()))
case("l1", lambda: sup(mlp(), nn.L1Loss(), reg()))
case("smooth_l1_beta", lambda: sup(mlp(), nn.SmoothL1Loss(beta=0.3), reg(10)))
case("huber_sum", lambda: sup(mlp(), nn.HuberLoss(reduction="sum"), reg(10), reduction="sum"))
case("bce_logits_pos_weight", lambda: sup(mlp(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 9.0, 0.1])), (torch.randn(11, 5), torch.rand(11, 3).round())))
case("bce_sigmoid", lambda: sup(nn.Sequential(mlp(), nn.Sigmoid()), nn.BCELoss(), (torch.randn(9, 5), torch.rand(9, 3))))
case("kl_batchmean", lambda: sup(nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), (torch.randn(11, 5), torch.rand(11, 3).softmax(1))))
case("kl_mean_log_target", lambda: sup(nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.KLDivLoss(reduction="mean", log_target=True), (torch.randn(11, 5), torch.rand(11, 3).log_softmax(1))))


def _nll():
    w = torch.tensor([0.1, 3.0, 8.0])
    x, y = xy(13)
    y[[1, 4, 5]] = 0
    return sup(nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.NLLLoss(weight=w, ignore_index=0), (x, y), units=lambda b: w[b[1]][b[1] != 0].sum())


case("nll_weight_ignore", _nll)
case("poisson", lambda: sup(mlp(5, 8, 1), nn.PoissonNLLLoss(), (torch.randn(10, 5), torch.randint(0, 5, (10, 1)).to(torch.get_default_dtype()))))


class TwoOut(nn.Module):
    def __init__(self, soft=False):
        super().__init__()
        self.a, self.b, self.soft = mlp(), mlp(), soft

    def forward(self, x):
        return self.a(x), self.b(x)


class Gauss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(5, 8, 2)

    def forward(self, x):
        return self.net(x)


def _gauss():
    class C(nn.Module):
        def forward(self, out, y):
            return F.gaussian_nll_loss(out[:, :1], y, F.softplus(out[:, 1:]))
    c = C()
    return S(Gauss(), supervised(c, units=lambda b: len(b[1])), (torch.randn(10, 5), torch.randn(10, 1)), loss=lambda m, b: c(m(b[0]), b[1]))


case("gaussian_nll_custom_criterion", _gauss)
case("multi_margin", lambda: sup(mlp(), nn.MultiMarginLoss(), xy()))


def _mmw():
    w = torch.tensor([0.1, 3.0, 8.0])
    return sup(mlp(), nn.MultiMarginLoss(weight=w), xy())


case("multi_margin_weight", _mmw)
case("multilabel_soft_margin", lambda: sup(mlp(), nn.MultiLabelSoftMarginLoss(), (torch.randn(11, 5), torch.rand(11, 3).round())))
case("soft_margin", lambda: sup(mlp(), nn.SoftMarginLoss(), (torch.randn(11, 5), torch.rand(11, 3).round() * 2 - 1)))
case("cosine_embedding", lambda: sup(TwoOut(), nn.CosineEmbeddingLoss(margin=0.2), (torch.randn(11, 5), torch.rand(11).round() * 2 - 1)))
case("margin_ranking", lambda: sup(TwoOut(), nn.MarginRankingLoss(0.3), (torch.randn(11, 5), torch.rand(11, 1).round() * 2 - 1)))


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = mlp()

    def forward(self, a, p, n):
        return self.a(a), self.a(p), self.a(n)


def _triplet():
    c = nn.TripletMarginLoss(margin=0.5)
    return S(Three(), supervised(c), ((torch.randn(10, 5), torch.randn(10, 5), torch.randn(10, 5)),), loss=lambda m, b: c(*m(*b[0])))


case("triplet", _triplet)


def weighted(ignore=None, smooth=0.0, reduction="mean", n=14, shape=(), w=(0.2, 1.0, 20.0)):
    w = torch.tensor(w)
    ig = -100 if ignore is None else ignore
    c = nn.CrossEntropyLoss(weight=w, ignore_index=ig, label_smoothing=smooth, reduction=reduction)
    x, y = xy(n)
    if ignore is not None:
        y[::3] = ignore
    return sup(mlp(), c, (x, y), units=lambda b: w[b[1][b[1] != ig]].sum(), reduction=reduction)


case("ce_weight", lambda: weighted())
case("ce_weight_ignore", lambda: weighted(-100))
case("ce_weight_ignore_0", lambda: weighted(0))
case("ce_weight_smooth", lambda: weighted(smooth=0.1))
case("ce_weight_ignore_smooth", lambda: weighted(1, 0.2))
case("ce_weight_sum", lambda: weighted(reduction="sum"))
case("ce_weight_zero_class", lambda: weighted(w=(0.0, 1.0, 5.0)))


def _probs():
    return sup(mlp(), nn.CrossEntropyLoss(label_smoothing=0.1), (torch.randn(11, 5), torch.randn(11, 3).softmax(1)))


case("ce_probabilities_smooth", _probs)
case("ce_probabilities_weight", lambda: sup(mlp(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 20.0])), (torch.randn(11, 5), torch.randn(11, 3).softmax(1))))


def _seg():
    y = torch.randint(0, 3, (7, 4, 4))
    y[0, :3] = 255
    y[4] = 255
    y[2, 2:] = 255
    return sup(nn.Conv2d(2, 3, 3, padding=1), nn.CrossEntropyLoss(ignore_index=255), (torch.randn(7, 2, 4, 4), y), units=lambda b: (b[1] != 255).sum(), micro_batch=2)


case("segmentation_ignore_255_a_row_without_target", _seg)


class Ctc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(5, 8, 6)

    def forward(self, x):
        return self.net(x).log_softmax(-1).transpose(0, 1)


def _ctc():
    c = nn.CTCLoss()
    batch = (torch.randn(9, 12, 5), torch.randint(1, 6, (9, 4)), torch.full((9,), 12), torch.randint(1, 5, (9,)))
    return S(Ctc(), supervised(c), batch, loss=lambda m, b: c(m(b[0]), *b[1:]))


case("ctc_mean", _ctc)


def _seq_ce():
    y = torch.randint(0, 6, (9, 12))
    y[torch.arange(12) >= torch.randint(2, 13, (9,))[:, None]] = -100
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(5, 8, 6)
        def forward(self, x):
            return self.net(x).transpose(1, 2)
    return sup(M(), nn.CrossEntropyLoss(), (torch.randn(9, 12, 5), y), units=lambda b: (b[1] != -100).sum())


case("ce_tokens_ignored", _seq_ce)
