"""Random draws that cannot be replayed: 'could not be judged', or named as randomness / draws. Exact or another cause is wrong."""
import random
import numpy
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import Hidden, unjudged, ce, mlp, xy, obj

D = "draws|randomness|.*draw.*|.*random.*"


def case(name, kind, f):
    unjudged(name, kind, D, "")(lambda: obj(Hidden(lambda m, x: m.b(f(torch.tanh(m.a(x))))), ce, xy(11)))


unjudged("rrelu", "RReLU in training", D)(lambda: obj(nn.Sequential(nn.Linear(5, 6), nn.RReLU(), nn.Linear(6, 3)), ce, xy(11)))
case("numpy_noise", "noise from NumPy's global generator", lambda h: h + torch.from_numpy(numpy.random.randn(*h.shape)).to(h))
case("python_random_scale", "one scale from Python's random", lambda h: h * random.random())
case("python_random_per_row", "a scale per row from Python's random", lambda h: h * torch.tensor([random.random() for _ in range(len(h))]).to(h)[:, None])
case("own_python_random", "a random.Random of its own", lambda h, r=random.Random(3): h * r.random())
case("own_numpy_generator", "a numpy Generator of its own", lambda h, r=numpy.random.default_rng(3): h + torch.from_numpy(r.standard_normal(tuple(h.shape))).to(h))
case("system_entropy", "random.SystemRandom", lambda h, r=random.SystemRandom(): h * (1 + r.random()))


class PackedDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.5), nn.Linear(6, 3)

    def forward(self, x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(p)[1][0][-1])


@unjudged("packed_dropout", "dropout on a packed sequence", D)
def _():
    batch = {"x": torch.randn(10, 7, 4), "lengths": torch.randint(1, 8, (10,)), "y": torch.randint(0, 3, (10,))}
    return obj(PackedDrop(), lambda m, b: F.cross_entropy(m(b["x"], b["lengths"].cpu()), b["y"]), batch)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)) for _ in range(3))

    def forward(self, x):
        p, i = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 3)
        for k, e in enumerate(self.experts):
            w = (i == k).nonzero()[:, 0]
            if len(w):
                out = out.index_add(0, w, e(x[w]) * p[w, None])
        return out


unjudged("routed_experts_with_dropout", "dropout behind a router: rows by expert", D)(lambda: obj(Routed(), ce, xy(12)))


@unjudged("held_generator_of_the_objective", "a torch.Generator held by the objective, noise per row", D, note="rows could be replayed; the generator must be left where it was", exact_ok=True)
def _():
    g = torch.Generator().manual_seed(5)
    s = obj(mlp(), lambda m, b: ce(m, (b[0] + torch.randn(b[0].shape, generator=g).to(b[0]), b[1])), xy(11))
    s.watch = lambda: g.get_state()
    return s


@unjudged("held_generator_of_the_model", "a torch.Generator held by the model", D, exact_ok=True)
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.g = nn.Linear(5, 6), nn.Linear(6, 3), torch.Generator().manual_seed(5)
        def forward(self, x):
            return self.b(torch.tanh(self.a(x)) * torch.rand(len(x), 6, generator=self.g).to(x))
    m = M()
    s = obj(m, ce, xy(11))
    s.watch = lambda: m.g.get_state()
    return s


@unjudged("units_one_2_rows", "mean of means at two rows: no uneven cut exists; a note must say so", "units", "saysnote")
def _():
    return obj(mlp(), ce, xy(2), units=lambda b: 1, micro_batch=1)
