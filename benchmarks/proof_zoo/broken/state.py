"""State that a pass changes, draws that belong to no row, inputs written to, hooks that are not linear."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import Hidden, broken, ce, mlp, xy, reg, obj, coup

ST = "state"


def st(name, kind, accept=ST, text=""):
    return broken(name, kind, accept, text, False)


@st("state_callable_object", "a counter of a callable object")
def _():
    class L:
        def __init__(self):
            self.k = 0
        def __call__(self, m, b):
            self.k += 1
            return ce(m, b) * self.k
    l = L()
    return obj(mlp(), l, xy(10), watch=lambda: l.k)


@st("state_bound_method", "a counter of a bound method's object")
def _():
    class T:
        def __init__(self):
            self.k = 0
        def loss(self, m, b):
            self.k += 1
            return ce(m, b) / self.k
    t = T()
    return obj(mlp(), t.loss, xy(10), watch=lambda: t.k)


@st("state_default_argument", "a list in a default argument")
def _():
    def loss(m, b, seen=[]):
        seen.append(1)
        return ce(m, b) * len(seen)
    seen = []
    loss.__defaults__ = (seen,)
    return obj(mlp(), loss, xy(10), watch=lambda: len(seen))


@st("state_function_attribute", "an attribute of the function")
def _():
    def loss(m, b):
        loss.k = getattr(loss, "k", 0) + 1
        return ce(m, b) * loss.k
    return obj(mlp(), loss, xy(10), watch=lambda: getattr(loss, "k", 0))


@st("state_closure_list", "a list in the closure: moving average of losses as a baseline")
def _():
    base = [0.0]
    def loss(m, b):
        l = F.cross_entropy(m(b[0]), b[1], reduction="none")
        out = (l * (1 - base[0])).mean()
        base[0] = 0.9 * base[0] + 0.1 * float(l.mean().detach())
        return out
    return obj(mlp(), loss, xy(10), watch=lambda: list(base))


@st("state_nonlocal", "a nonlocal number")
def _():
    k = 0
    def loss(m, b):
        nonlocal k
        k += 1
        return ce(m, b) * (1 + 0.1 * k)
    return obj(mlp(), loss, xy(10), watch=lambda: k)


@st("state_buffer_of_a_loss_module", "DINO's centre in a buffer of the loss")
def _():
    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))
        def forward(self, m, b):
            o = m(b[0])
            l = -((m(b[1]).detach() - self.centre.to(o)).softmax(1) * o.log_softmax(1)).sum(1).mean()
            self.centre = 0.5 * self.centre.to(o) + 0.5 * o.detach().mean(0)
            return l
    l = L()
    return obj(mlp(), l, (torch.randn(10, 5), torch.randn(10, 5)), watch=lambda: l.centre.clone())


class Count(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.net = mlp()
        if buffer:
            self.register_buffer("k", torch.zeros(()))
        else:
            self.k = 0

    def forward(self, x):
        self.k += 1
        return self.net(x) * (1 + 0.3 * self.k)


st("state_buffer_warm_up", "a warm-up counter in a buffer")(lambda: obj(Count(True), ce, xy(10)))
st("state_attribute_warm_up", "a warm-up counter in an attribute")(lambda: obj(Count(False), ce, xy(10)))


@st("state_ema_normaliser", "activations divided by a moving average")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
            self.register_buffer("scale", torch.ones(6))
        def forward(self, x):
            h = torch.tanh(self.a(x))
            self.scale.mul_(0.5).add_(0.5 * h.detach().abs().mean(0).to(self.scale))
            return self.b(h / (self.scale.to(h) + 0.1))
    return obj(M(), ce, xy(10))


@st("state_moco_queue", "a queue of keys from earlier passes", ST + "|coupled")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.register_buffer("queue", torch.randn(8, 3))
        def forward(self, x):
            return self.net(x)
    def loss(m, b):
        q, k = m(b[0]), m(b[1]).detach()
        l = F.cross_entropy(torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.to(q).T], 1), torch.zeros(len(q), dtype=torch.long))
        m.queue = torch.cat([k.to(m.queue), m.queue])[:8].clone()
        return l
    return obj(M(), loss, (torch.randn(10, 5), torch.randn(10, 5)))


@st("state_recurrent_memory", "hidden state kept from call to call")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.h = nn.GRUCell(5, 6), nn.Linear(6, 3), None
        def forward(self, x):
            h0 = torch.zeros(1, 6).to(x) if self.h is None else self.h.to(x)
            h = self.cell(x, h0.expand(len(x), 6))
            self.h = h.detach().mean(0, keepdim=True)
            return self.head(h)
    return obj(M(), ce, xy(10))


@st("state_alternating_heads", "every other call takes another head", ST + "|touched")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.heads, self.k = nn.Linear(5, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(2)), 0
        def forward(self, x):
            self.k += 1
            return self.heads[self.k % 2](torch.tanh(self.a(x)))
    return obj(M(), ce, xy(10))


@st("state_weights_written", "a forward that renormalises its weights")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def forward(self, x):
            with torch.no_grad():
                self.net[0].weight.mul_(0.9)
            return self.net(x)
    return obj(M(), ce, xy(10))


@st("state_lazy_whitening_from_first_rows", "ActNorm: initialised from the first rows it sees", ST + "|coupled")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.mean = nn.Linear(5, 6), nn.Linear(6, 3), None
        def forward(self, x):
            h = torch.tanh(self.a(x))
            if self.mean is None:
                self.mean = h.detach().mean(0)
            return self.b(h - self.mean.to(h))
    return obj(M(), ce, xy(10))


COUNT = {"k": 0}


@st("state_global_dict", "a global dict", ST + "|unknown")
def _():
    COUNT["k"] = 0
    def loss(m, b):
        COUNT["k"] += 1
        return ce(m, b) * COUNT["k"]
    return obj(mlp(), loss, xy(10), watch=lambda: COUNT["k"])


@st("state_iterator", "an iterator that hands out temperatures", ST + "|unknown")
def _():
    import itertools
    temps = itertools.count(1)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]) / next(temps), b[1]), xy(10))


# ---- inputs
@st("inputs_shared_scale_written", "a scale beside the rows is written by every pass", "inputs|state")
def _():
    def loss(m, b):
        b["scale"].mul_(2)
        return F.cross_entropy(m(b["x"]) * b["scale"], b["y"])
    x, y = xy(10)
    return obj(mlp(), loss, {"x": x, "y": y, "scale": torch.tensor(0.5)})


@st("inputs_normalised_in_place_by_batch", "x.sub_(x.mean(0))", "inputs|coupled")
def _():
    def loss(m, b):
        b[0].sub_(b[0].mean(0))
        return ce(m, b)
    return obj(mlp(), loss, xy(10))


# ---- draws
D = "draws|randomness|.*draw.*|.*random.*"


@st("one_mixup_lambda", "one lambda for all rows", D)
def _():
    def loss(m, b):
        lam = torch.rand(()).to(b[0])
        return F.cross_entropy(m(lam * b[0] + (1 - lam) * b[2]), b[1])
    return obj(mlp(), loss, (*xy(10), torch.randn(10, 5)))


@st("one_crop_for_all", "one crop offset for all rows", D)
def _():
    def loss(m, b):
        k = int(torch.randint(0, 4, ()))
        return F.cross_entropy(m(b[0][:, k:k + 5]), b[1])
    return obj(mlp(), loss, (torch.randn(10, 9), torch.randint(0, 3, (10,))))


@st("one_noise_vector_for_all", "one noise vector broadcast over rows", D)
def _():
    def forward(m, x):
        h = m.a(x)
        return m.b(torch.tanh(h + torch.randn(6).to(h)))
    return obj(Hidden(forward), ce, xy(10))


@st("layer_drop", "LayerDrop: a layer is skipped for all rows", D + "|touched")
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(5, 5) for _ in range(6)), nn.Linear(5, 3)
        def forward(self, x):
            for l in self.layers:
                if torch.rand(()) > 0.5:
                    x = x + torch.tanh(l(x))
            return self.head(x)
    return obj(M(), ce, xy(10))


@st("weight_noise", "noise on the weights, drawn per forward", D)
def _():
    def forward(m, x):
        w = m.a.weight * (1 + 0.5 * torch.randn_like(m.a.weight))
        return m.b(torch.tanh(F.linear(x, w, m.a.bias)))
    return obj(Hidden(forward), ce, xy(10))


@st("drop_connect", "DropConnect: one mask of weights per forward", D)
def _():
    def forward(m, x):
        return m.b(torch.tanh(F.linear(x, F.dropout(m.a.weight, 0.5), m.a.bias)))
    return obj(Hidden(forward), ce, xy(11))


@st("variational_dropout_shared_mask", "one dropout mask shared by all rows", D)
def _():
    def forward(m, x):
        h = m.a(x)
        return m.b(h * F.dropout(torch.ones(1, 6).to(h), 0.5))
    return obj(Hidden(forward), ce, xy(11))


@st("manual_seed_in_forward", "torch.manual_seed inside forward: every micro-batch draws the first rows' mask", D, "seed")
def _():
    def forward(m, x):
        torch.manual_seed(7)
        return m.b(F.dropout(torch.tanh(m.a(x)), 0.5))
    return obj(Hidden(forward), ce, xy(11))


@st("generator_made_in_forward", "a generator made anew in every forward", D, "seed|generator")
def _():
    def forward(m, x):
        g = torch.Generator().manual_seed(7)
        return m.b(torch.tanh(m.a(x)) * torch.rand(len(x), 6, generator=g).to(x))
    return obj(Hidden(forward), ce, xy(11))


@st("generator_made_in_objective", "a generator made anew in every call of the loss", D, "seed|generator")
def _():
    def loss(m, b):
        g = torch.Generator().manual_seed(3)
        return ce(m, (b[0] + torch.randn(b[0].shape, generator=g).to(b[0]), b[1]))
    return obj(mlp(), loss, xy(11))


@st("negatives_drawn_from_the_batch", "negatives drawn by randint over the rows", D + "|coupled|.*additive|error")
def _():
    def loss(m, b):
        z = m(b[0])
        j = torch.randint(0, len(z), (len(z),))
        return F.softplus((z * z[j]).sum(1)).mean()
    return obj(mlp(), loss, xy(12))


@st("coupled_state", "Coupled: the encoder counts its calls", ST + "|error")
def _():
    return coup(Count(False), lambda m, b: m(b[0]), lambda r: (r @ r.T).square().mean(), xy(12))


# ---- hooks and backward that are not linear
NL = "coupled|unknown|.*additive|.*hook.*|.*linear.*|.*backward.*"


@st("hook_clips_each_backward", "a parameter hook clips the gradient of each backward", NL, "hook|clip")
def _():
    m = mlp()
    m[0].weight.register_hook(lambda g: g / g.norm().clamp(min=1e-3))
    return obj(m, ce, xy(12))


@st("hook_clamps_values", "a parameter hook clamps values", NL, "hook|clamp")
def _():
    m = mlp()
    for p in m.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return obj(m, ce, xy(12))


@st("hook_on_module_normalises", "a backward hook normalises by the batch", NL, "hook|backward")
def _():
    m = mlp()
    m[1].register_full_backward_hook(lambda mod, gi, go: tuple(g / g.norm() for g in gi))
    return obj(m, ce, xy(12))


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-6)


@st("autograd_function_normalises", "a backward of one's own divides by the norm over rows", NL, "backward")
def _():
    def forward(m, x):
        return m.b(Norm.apply(torch.tanh(m.a(x))))
    return obj(Hidden(forward), ce, xy(12))


@st("gradient_penalty_over_batch", "the norm of the gradient over all rows", NL)
def _():
    def loss(m, x):
        x = x.clone().requires_grad_()
        g, = torch.autograd.grad(m(x).mean(), x, create_graph=True)
        return m(x).square().mean() + g.norm()
    return obj(mlp(5, 8, 1), loss, torch.randn(10, 5))


@st("nonfinite_loss_of_a_short_micro_batch", "std of one row is nan", "nonfinite|coupled|.*additive")
def _():
    return obj(mlp(), lambda m, b: (m(b[0]) - b[1]).square().mean() + m(b[0]).std(0).mean(), reg(10))


@st("error_of_a_short_micro_batch", "a loss that cannot run on one row", "error|coupled|.*additive|batch_norm")
def _():
    return obj(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), ce, xy(7), micro_batch=1)
