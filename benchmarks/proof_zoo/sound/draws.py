"""Draws that belong to rows: the law lets every row draw the same again."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import S, sound, ce, mlp, obj
from anybatch import supervised


class Noise(nn.Module):
    """`draw(h)` adds something drawn for each row."""
    def __init__(self, draw, i=5, h=7):
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(i, h), nn.Linear(h, 3), draw

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(self.draw(h) if self.training else h)


def case(name, model, x=lambda: torch.randn(11, 5), note=""):
    @sound(name, note)
    def _():
        m, data = model(), x()
        return S(m, supervised(nn.CrossEntropyLoss()), (data, torch.randint(0, 3, (len(data),))), loss=ce)


case("dropout", lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
case("dropout_functional", lambda: Noise(lambda h: F.dropout(h, 0.4)))
case("dropout_2d", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(36, 3)), lambda: torch.randn(10, 2, 5, 5))
case("dropout_alpha", lambda: nn.Sequential(nn.Linear(5, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 3)))
case("dropout_inplace", lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 3)))
case("noise_randn_like", lambda: Noise(lambda h: h + torch.randn_like(h)))
case("noise_randn_shape", lambda: Noise(lambda h: h + torch.randn(h.shape, dtype=h.dtype)))
case("noise_normal_in_place", lambda: Noise(lambda h: h + torch.empty_like(h).normal_(0, 0.5)))
case("noise_bernoulli_tensor", lambda: Noise(lambda h: h * torch.bernoulli(torch.full_like(h, 0.7))))
case("stochastic_depth_per_row", lambda: Noise(lambda h: h * (torch.rand(len(h), 1) < 0.7).to(h)))
case("gumbel_softmax", lambda: Noise(lambda h: F.gumbel_softmax(h, tau=0.7)))
case("multinomial_per_row", lambda: Noise(lambda h: h + F.one_hot(torch.multinomial(h.detach().softmax(1), 1)[:, 0], 7).to(h)))
case("two_dropouts_of_one_shape", lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
case("random_crop_per_row", lambda: Noise(lambda h: torch.stack([r.roll(int(s)) for r, s in zip(h, torch.randint(0, 7, (len(h),)))])))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mu, s = self.e(x).chunk(2, 1)
        return self.d(torch.distributions.Normal(mu, s.exp()).rsample()), mu, s


@sound("vae_rsample")
def _():
    def loss(m, x):
        out, mu, s = m(x)
        return (out - x).square().sum(1).mean() + 0.5 * (mu ** 2 + (2 * s).exp() - 2 * s).sum(1).mean()
    return obj(Vae(), loss, torch.randn(10, 6))


@sound("diffusion_time_and_noise_per_row")
def _():
    def loss(m, x):
        t, e = torch.rand(len(x), 1, dtype=x.dtype), torch.randn_like(x)
        return (m(torch.cat([(1 - t) * x + t * e, t], 1)) - e).square().mean()
    return obj(mlp(7, 8, 6), loss, torch.randn(10, 6))


@sound("masked_language_model_masks_in_the_objective")
def _():
    def loss(m, x):
        hide = torch.rand(x.shape) < 0.3
        each = F.cross_entropy(m(x.masked_fill(hide, 0)).transpose(1, 2), x, reduction="none")
        return (each * hide).sum() / x.numel()
    return obj(nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)), loss, torch.randint(1, 12, (10, 6)))
