"""Architectures, layers, hooks, modes."""
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from benchmarks.proof_zoo.zoo import Hidden, S, sound, ce, mlp, xy, obj
from anybatch import supervised

def case(name, f, note=""):
    sound(name, note)(f)


def net(model, x, c=3, **kw):
    return S(model, supervised(nn.CrossEntropyLoss()), (x, torch.randint(0, c, (len(x),))), loss=ce, **kw)


class Last(nn.Module):
    """A recurrent layer, its last (or summed) output, a head."""
    def __init__(self, rnn, width, flip=False):
        super().__init__()
        self.rnn, self.head, self.flip = rnn, nn.Linear(width, 3), flip

    def forward(self, x):
        if self.flip:
            return self.head(self.rnn(x.transpose(0, 1))[0][-1])
        return self.head(self.rnn(x)[0][:, -1])


case("cnn", lambda: net(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), torch.randn(10, 2, 6, 6)))
case("cnn_groupnorm", lambda: net(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)), torch.randn(10, 2, 6, 6)))
case("cnn_instancenorm", lambda: net(nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(64, 3)), torch.randn(10, 2, 6, 6)))
case("cnn_instancenorm_tracking", lambda: net(nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(64, 3)), torch.randn(10, 2, 6, 6)))
case("rnn_batch_first", lambda: net(Last(nn.RNN(4, 6, batch_first=True), 6), torch.randn(10, 7, 4)))
case("lstm_batch_first_bidirectional_2", lambda: net(Last(nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), 12), torch.randn(10, 7, 4)))
case("gru_batch_first", lambda: net(Last(nn.GRU(4, 6, batch_first=True), 6), torch.randn(10, 7, 4)))
case("lstm_time_first_inside", lambda: net(Last(nn.LSTM(4, 6), 6, flip=True), torch.randn(10, 7, 4)))
case("gru_time_first_inside_square", lambda: net(Last(nn.GRU(4, 6), 6, flip=True), torch.randn(8, 8, 4)), "as many steps as rows")
case("lstm_dropout_between_layers", lambda: net(Last(nn.LSTM(4, 6, 2, batch_first=True, dropout=0.4), 6), torch.randn(10, 7, 4)))
case("lstm_proj", lambda: net(Last(nn.LSTM(4, 6, proj_size=3, batch_first=True), 3), torch.randn(10, 7, 4)))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


case("grucell_loop", lambda: net(Cell(), torch.randn(9, 5, 4)))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(p)[1][-1])


@sound("packed_gru_without_dropout")
def _():
    batch = {"x": torch.randn(10, 7, 4), "lengths": torch.randint(1, 8, (10,)), "y": torch.randint(0, 3, (10,))}
    return obj(Packed(), lambda m, b: F.cross_entropy(m(b["x"], b["lengths"].cpu()), b["y"]), batch)


case("transformer_encoder", lambda: net(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(40, 3)), torch.randn(9, 5, 8)))
case("transformer_encoder_dropout", lambda: net(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), nn.Flatten(), nn.Linear(40, 3)), torch.randn(9, 5, 8)))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8, padding_idx=0)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, mask):
        h = self.enc(self.emb(ids), src_key_padding_mask=mask == 0)
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@sound("transformer_key_padding_mask")
def _():
    mask = (torch.arange(9) < torch.randint(2, 10, (10,))[:, None]).long()
    batch = {"input_ids": torch.randint(1, 20, (10, 9)) * mask, "attention_mask": mask, "y": torch.randint(0, 3, (10,))}
    return obj(Masked(), lambda m, b: F.cross_entropy(m(b["input_ids"], b["attention_mask"]), b["y"]), batch)


case("embedding_sparse", lambda: net(nn.Sequential(nn.Embedding(30, 6, sparse=True), nn.Flatten(), nn.Linear(24, 3)), torch.randint(0, 30, (11, 4))))
case("embedding_bag_sparse_mean", lambda: net(nn.Sequential(nn.EmbeddingBag(30, 6, mode="mean", sparse=True), nn.Linear(6, 3)), torch.randint(0, 30, (11, 4))))
case("embedding_padding_idx", lambda: net(nn.Sequential(nn.Embedding(30, 6, padding_idx=0), nn.Flatten(), nn.Linear(24, 3)), torch.randint(0, 4, (11, 4))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid, self.out = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mid(self.emb(x))).mean(1))


case("tied_weights", lambda: net(Tied(), torch.randint(0, 12, (10, 4)), 12))


@sound("frozen_layers")
def _():
    m = mlp()
    m[0].requires_grad_(False)
    return net(m, torch.randn(10, 5))


@sound("only_a_bias_is_trained")
def _():
    m = mlp()
    m.requires_grad_(False)
    m[2].bias.requires_grad_(True)
    return net(m, torch.randn(10, 5))


@sound("unused_parameter")
def _():
    m = mlp()
    m[1].unused = nn.Linear(4, 4)
    return net(m, torch.randn(10, 5))


case("weight_norm", lambda: net(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3)), torch.randn(10, 5)))


@sound("spectral_norm_eval")
def _():
    m = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))
    m[0].eval()
    return net(m, torch.randn(10, 5))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 3)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


case("lora_zero_b", lambda: net(Lora(), torch.randn(10, 5)), "the gradient of a is exactly zero")


class Check(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.r = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2)), nn.Linear(8, 3), reentrant

    def forward(self, x):
        if self.r:
            x = x.clone().requires_grad_()
        return self.b(checkpoint(self.a, x, use_reentrant=self.r))


case("checkpoint_dropout", lambda: net(Check(False), torch.randn(10, 5)))
case("checkpoint_reentrant_dropout", lambda: net(Check(True), torch.randn(10, 5)))


class SdpaCk(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def att(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)

    def forward(self, x):
        return self.head(checkpoint(self.att, x, use_reentrant=False).mean(1))


case("checkpoint_sdpa", lambda: net(SdpaCk(), torch.randn(9, 5, 8)))


class Moe(nn.Module):
    """Top-1 routing by loops over experts: some see no row of a micro-batch."""
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.head = nn.Linear(5, 4), nn.ModuleList(nn.Linear(5, 6) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x):
        p, i = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 6)
        for k, e in enumerate(self.experts):
            w = (i == k).nonzero()[:, 0]
            if len(w):
                out = out.index_add(0, w, e(x[w]) * p[w, None])
        return self.head(out)


case("moe_top1_loop", lambda: net(Moe(), torch.randn(12, 5)), "an expert without rows has no gradient in that micro-batch")


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.3 * g


case("gradient_reversal", lambda: net(Hidden(lambda m, x: m.b(Reverse.apply(torch.relu(m.a(x))))), torch.randn(10, 5)))


@sound("hook_scales_gradient")
def _():
    m = mlp()
    m[0].weight.register_hook(lambda g: 3.0 * g)
    return net(m, torch.randn(10, 5))


@sound("hook_masks_gradient")
def _():
    m = mlp()
    keep = (torch.arange(8) % 2).to(torch.get_default_dtype())
    m[0].weight.register_hook(lambda g: g * keep.to(g)[:, None])
    return net(m, torch.randn(10, 5))


@sound("hook_backward_of_a_module")
def _():
    m = mlp()
    m[0].register_full_backward_hook(lambda mod, gi, go: tuple(None if g is None else 2 * g for g in gi))
    return net(m, torch.randn(10, 5))


@sound("hook_forward_doubles")
def _():
    m = mlp()
    m[1].register_forward_hook(lambda mod, i, o: o * 2)
    return net(m, torch.randn(10, 5))


def bn():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@sound("bn_in_eval_inside_training_model")
def _():
    m = bn()
    m[1].running_mean.normal_()
    m[1].eval()
    return net(m, torch.randn(10, 5))


@sound("model_in_eval_with_bn_and_dropout")
def _():
    m = nn.Sequential(bn(), nn.Dropout(0.5)).eval()
    return net(m, torch.randn(10, 5))


@sound("dropout_in_eval_inside_training_model")
def _():
    m = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    m[1].eval()
    return net(m, torch.randn(10, 5))


case("bn_exact", lambda: net(bn(), torch.randn(12, 5), options={"batch_norm": "exact"}))
case("bn_exact_cnn_two_layers", lambda: net(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(16, 3)), torch.randn(10, 2, 6, 6), options={"batch_norm": "exact"}))
case("bn_frozen", lambda: net(bn(), torch.randn(12, 5), options={"batch_norm": "frozen"}))
case("deep_20_layers", lambda: net(nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.GELU()) for _ in range(20)], nn.Linear(5, 3)), torch.randn(10, 5)))


class Fft(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(5)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.w, n=8, dim=1))


case("fft_filter", lambda: net(Fft(), torch.randn(10, 8)))


class Counter(nn.Module):
    """Counts its calls, and uses the count for nothing."""
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.seen = []

    def forward(self, x):
        out = self.net(x)
        self.calls += 1
        self.mean.lerp_(out.detach().mean(0).to(self.mean), 0.1)
        self.seen.append(len(x))
        return out


case("idle_state_counts_and_averages", lambda: net(Counter(), torch.randn(10, 5)), "state that no loss depends on")


class Cache(nn.Module):
    """Positions are made once and kept: the first caller decides only how long they are."""
    def __init__(self):
        super().__init__()
        self.emb, self.head, self.pos = nn.Embedding(10, 6), nn.Linear(6, 3), None

    def forward(self, x):
        if self.pos is None or len(self.pos) < x.shape[1]:
            self.pos = torch.arange(x.shape[1])[:, None] / 10
        return self.head((self.emb(x) * self.pos[: x.shape[1]].to(self.emb.weight)).sum(1))


case("cached_positions", lambda: net(Cache(), torch.randint(0, 10, (10, 5))))
case("complex_parameters_of_a_bilinear", lambda: net(nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Softplus(), nn.Linear(4, 3)), torch.randn(10, 5)))
case("more_rows_33", lambda: net(mlp(), torch.randn(33, 5), micro_batch=8))
case("softmax_over_features_named_like_rows", lambda: net(nn.Sequential(nn.Linear(5, 10), nn.Softmax(dim=1), nn.Linear(10, 3)), torch.randn(10, 5)), "as many features as rows")


@sound("spectral_norm_in_training", "the library advances the power iteration once per batch")
def _():
    return net(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3)), torch.randn(10, 5))


@sound("inputs_scaled_in_place_once_per_row", "every row is written once, whatever the cut; the batch must be left as it was")
def _():
    def loss(m, b):
        b[0].mul_(2)
        return ce(m, b)
    return obj(mlp(), loss, xy(10))


@sound("generator_moved_but_unused")
def _():
    g = torch.Generator().manual_seed(5)
    def loss(m, b):
        torch.rand(3, generator=g)
        return ce(m, b)
    s = obj(mlp(), loss, xy(11))
    s.watch = lambda: g.get_state()
    return s
