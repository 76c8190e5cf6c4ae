"""The wrong count: of units, of divisions, of sums."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import S, TokensAndRow, broken, ce, lm, mlp, next_token, obj, reg, tokens, xy
from anybatch import Terms, huggingface, supervised
from benchmarks.proof_zoo.hfzoo import causal, ids, make, plain

UNITS = "units"
WEIGHT = (0.2, 1.0, 20.0)


def u(name, kind, accept=UNITS, text="", literal=True, note=""):
    return broken(name, kind, accept, text, literal, note)


for n in (3, 4, 5, 6, 8, 10, 12, 18, 24, 30, 36, 48):
    for by in ({12: (3, 4, 5), 24: (8,), 48: (12,), 36: (6,)}.get(n, (2,))):
        u(f"units_one_{n}_rows_by_{by}", "mean of means", literal=True)(lambda n=n, by=by: obj(mlp(), ce, xy(n), units=lambda b: 1, micro_batch=by))


@u("tokens_counted_as_rows", "tokens, default units")
def _():
    return obj(lm(), next_token, {"labels": tokens()[0]})


@u("tokens_off_by_one", "labels counted before the shift")
def _():
    return obj(lm(), next_token, {"labels": tokens(t=14, low=8)[0]}, units=lambda b: (b["labels"] != -100).sum())


@u("tokens_off_by_one_bf16", "labels counted before the shift, bf16", literal=True)
def _():
    return obj(lm().bfloat16(), next_token, {"labels": tokens(t=30, low=8)[0]}, units=lambda b: (b["labels"] != -100).sum())


@u("tokens_padded_width", "padded tokens counted: constant per row")
def _():
    return obj(lm(), next_token, {"labels": tokens()[0]}, units=lambda b: b["labels"].numel())


@u("tokens_ignore_0", "ignore_index=0 in the loss, default units")
def _():
    y = tokens()[0].clamp(min=0)
    return obj(lm(), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten(), ignore_index=0), {"x": torch.randint(0, 12, y.shape), "y": y})


@u("tokens_ignore_7_odd_value", "another ignore value")
def _():
    x, y = torch.randn(12, 6, 5), torch.randint(0, 3, (12, 6))
    y[::2, :3] = 77
    return obj(nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten(), ignore_index=77), {"x": x, "y": y}, right_units=lambda b: (b["y"] != 77).sum())


@u("lengths_sum_of_integers", "divides by the sum of an integer tensor")
def _():
    def loss(m, b):
        e = (m(b["x"])[..., 0] - b["y"]).square()
        keep = torch.arange(7) < b["n"][:, None]
        return (e * keep).sum() / b["n"].sum()
    return obj(mlp(5, 6, 1), loss, {"x": torch.randn(10, 7, 5), "y": torch.randn(10, 7), "n": torch.randint(1, 8, (10,))})


@u("class_weights_default_units", "class weights")
def _():
    weight = torch.tensor(WEIGHT)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight), xy(14), names={"weight": weight, "targets": lambda batch: batch[1]})


@u("class_weights_ignore", "class weights and ignore_index")
def _():
    weight = torch.tensor(WEIGHT)
    x, y = xy(16)
    y[::3] = -100
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight), (x, y), names={"weight": weight, "targets": lambda batch: batch[1]})


@u("class_weights_ignore_2_by_name", "class weights and ignore_index=2")
def _():
    weight = torch.tensor(WEIGHT)
    x, y = xy(16)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=weight, ignore_index=2), {"x": x, "y": y}, names={"weight": weight, "targets": lambda batch: batch["y"]})


@u("class_weights_smoothing", "class weights and label smoothing")
def _():
    weight = torch.tensor(WEIGHT)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight, label_smoothing=0.1), xy(14), names={"weight": weight, "targets": lambda batch: batch[1]})


@u("class_weights_in_a_module_supervised_with_rows", "class weights, units= given as rows")
def _():
    weight = torch.tensor(WEIGHT)
    c = nn.CrossEntropyLoss(weight=weight)
    return S(mlp(), supervised(c, units=lambda b: len(b[1])), xy(14), loss=lambda m, b: c(m(b[0]), b[1]), names={"weight": weight, "targets": lambda batch: batch[1]})


@u("nll_class_weights", "class weights of nll_loss")
def _():
    weight = torch.tensor([5.0, 1.0, 0.1])
    return obj(mlp(), lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], weight=weight), xy(13), names={"weight": weight, "targets": lambda batch: batch[1]})


@u("class_weights_by_hand", "weights gathered by hand, divided by their sum")
def _():
    weight = torch.tensor([5.0, 1.0, 0.1])
    def loss(m, b):
        w = weight[b["target"]]
        return (F.cross_entropy(m(b["x"]), b["target"], reduction="none") * w).sum() / w.sum()
    x, y = xy(13)
    return obj(mlp(), loss, {"x": x, "target": y}, names={"weight": weight, "targets": lambda batch: batch["target"]})


@u("sample_weights_ignored", "sample weights")
def _():
    return obj(mlp(5, 8, 1), lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2 * b["w"]).sum() / b["w"].sum(), {"x": torch.randn(11, 5), "y": torch.randn(11), "w": torch.rand(11) * 5})


@u("mask_ignored", "masked mean")
def _():
    return obj(mlp(5, 8, 1), lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2)[b["mask"]].mean(), {"x": torch.randn(12, 5), "y": torch.randn(12), "mask": torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0]).bool()})


@u("mask_inverted_units", "units count what is masked out")
def _():
    return obj(mlp(5, 8, 1), lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2 * (1 - b["hidden"])).sum() / (1 - b["hidden"]).sum(), {"x": torch.randn(12, 5), "y": torch.randn(12), "hidden": torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0]).float()}, units=lambda b: b["hidden"].sum())


@u("pixels_ignore_255", "segmentation, ignored pixels")
def _():
    y = torch.randint(0, 3, (8, 4, 4))
    y[0, :3] = 255; y[5, 1:] = 255; y[2, 2:] = 255
    return obj(nn.Conv2d(2, 3, 3, padding=1), lambda m, b: F.cross_entropy(m(b[0]), b[1], ignore_index=255), (torch.randn(8, 2, 4, 4), y), right_units=lambda b: (b[1] != 255).sum())


@u("positives_only", "divides by the number of positives")
def _():
    def loss(m, b):
        pos = b[1] > 0
        return (m(b[0])[:, 0] - b[1])[pos].square().sum() / pos.sum()
    tail = lambda r: (r[0] - r[1])[r[1] > 0].square().sum() / (r[1] > 0).sum()
    return obj(mlp(5, 8, 1), loss, (torch.randn(14, 5), torch.randn(14)), coupled=(lambda m, b: (m(b[0])[:, 0], b[1]), tail))


@u("answers_only_prompts_counted", "units count the prompt too")
def _():
    y, n = tokens(t=10, low=5)
    p = torch.arange(10) < torch.randint(0, 4, (10,))[:, None]
    def loss(m, b):
        lab = b["ids"].masked_fill(b["prompt"], -100)
        return F.cross_entropy(m(b["ids"].clamp(min=0)[:, :-1]).flatten(0, 1), lab[:, 1:].flatten())
    return obj(lm(), loss, {"ids": y, "prompt": p}, units=lambda b: (b["ids"][:, 1:] != -100).sum(), right_units=lambda b: (b["ids"].masked_fill(b["prompt"], -100)[:, 1:] != -100).sum())


@u("confident_only_units_known_in_forward", "units known only in forward", accept="units|coupled|.*additive", text="observed|known only|forward")
def _():
    def loss(m, x):
        p = m(x)
        keep = p.detach().softmax(1).max(1).values > 0.42
        return F.cross_entropy(p[keep], p[keep].argmax(1).detach()) if keep.any() else p.sum() * 0
    return obj(mlp(), loss, torch.randn(24, 5) * 2, coupled=(lambda m, x: m(x), lambda p: loss(lambda x: x, p)))


@u("sum_called_mean", "sum, promised a mean", accept="sum")
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), xy(11))


@u("sum_called_mean_mse", "sum, promised a mean", accept="sum")
def _():
    return obj(mlp(), lambda m, b: (m(b["x"]) - b["y"]).square().sum() * 0.5, dict(zip("xy", reg(10))))


@u("sum_over_a_constant", "sum over a fixed batch size, promised a mean", accept="sum")
def _():
    return obj(mlp(), lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / 64, reg(10))


@u("mean_called_sum", "mean, promised a sum", accept="mean")
def _():
    return obj(mlp(), ce, xy(11), reduction="sum")


@u("token_mean_called_sum", "token mean, promised a sum", accept="mean|units")
def _():
    return obj(lm(), next_token, {"labels": tokens()[0]}, reduction="sum")


@u("class_weighted_sum_called_mean", "weighted sum, promised a mean", accept="sum")
def _():
    weight = torch.tensor(WEIGHT)
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight, reduction="sum"), xy(14))


@u("divided_twice", "sum / n / n", accept="unknown|.*additive|coupled|.*divi.*", text="twice|once too often|(add up|sum) to 1|not additive", literal=False)
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1]) / len(b[1]), xy(11))


@u("divided_by_root_of_rows", "sum / sqrt(n)", accept="unknown|.*additive|coupled|.*divi.*", text="sqrt|root|(add up|sum) to 1|not additive", literal=False)
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / len(b[1]) ** 0.5, xy(11))


@u("divided_by_rows_less_one", "sum / (n - 1)", accept="unknown|.*additive|coupled|.*divi.*", text="- 1|minus one|less one|(add up|sum) to 1|not additive", literal=False)
def _():
    return obj(mlp(), lambda m, b: (m(b[0]) - b[1]).square().sum() / max(1, len(b[0]) - 1), reg(12))


@u("penalty_in_a_sum", "a penalty counted once per micro-batch", accept="coupled|unknown|.*penalt.*|.*additive", text="penalt|counted once|terms\\(", literal=False)
def _():
    return obj(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") + 5 * sum(p.square().sum() for p in m.parameters()), xy(11), reduction="sum")


@u("hf_llama_units_rows", "huggingface units= rows", accept="units|error", text="units")
def _():
    return S(make("llama"), huggingface(units=lambda b: len(b["labels"])), causal(), loss=plain, units=lambda b: len(b["labels"]))


@u("hf_gpt2_unshifted_by_objective", "model(**batch).loss, labels counted unshifted", accept="units")
def _():
    return obj(make("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), plain, causal(), units=lambda b: (b["labels"] != -100).sum())


@u("hf_llama_ckpt_rows_by_objective", "model(**batch).loss with checkpointing, default units", accept="units")
def _():
    return obj(make("llama", ckpt=True), plain, causal())


@u("hf_t5_shifted_by_objective", "labels of T5 counted as if shifted", accept="units")
def _():
    x, mask = ids(); y, ym = ids(8, 5)
    return obj(make("t5", dropout_rate=0.0), plain, {"input_ids": x, "attention_mask": mask, "labels": y.masked_fill(ym == 0, -100)}, units=lambda b: (b["labels"][:, 1:] != -100).sum())


@u("hf_mixtral_rows_by_objective", "default units on tokens", accept="units")
def _():
    return obj(make("mixtral"), plain, causal())


@u("terms_wrong_units_of_one", "Terms: tokens counted as rows in one term", accept="units|.*term.*|unknown", text="term", literal=False)
def _():
    n = {"t": lambda b: len(b["c"]), "r": lambda b: len(b["c"])}
    loss = TokensAndRow.losses
    return S(TokensAndRow(), Terms(loss, units=n), {"labels": tokens()[0], "c": torch.randint(0, 3, (10,))}, loss=loss)


@u("terms_mean_as_penalty", "Terms: a mean over masked rows given units=None", accept="units|.*term.*|unknown", text="term|penalt", literal=False)
def _():
    def loss(m, b):
        return {"fit": F.cross_entropy(m(b[0]), b[1]), "aux": (m(b[0]) * b[2][:, None]).square().sum() / b[2].sum()}
    n = {"fit": lambda b: len(b[0]), "aux": None}
    return S(mlp(), Terms(loss, units=n), (*xy(11), torch.rand(11) + 0.01), loss=loss)


@u("two_means_of_other_units", "two means in one loss: tokens and rows", accept="units|unknown|.*term.*|.*additive|coupled", text="terms", literal=False)
def _():
    batch = {"labels": tokens()[0], "c": torch.randint(0, 3, (10,))}
    return obj(TokensAndRow(), lambda m, b: sum(m.losses(b).values()), batch)


@u("closure_head_alone_is_wrong", "a head held by the closure has another mean", accept="units|unknown|.*term.*|coupled|.*additive", text="terms", literal=False, note="the model's own gradient is exact; only the head's is not")
def _():
    head = nn.Linear(3, 3)
    def loss(m, b):
        h = m(b["x"])
        fit = (h - b["t"]).square().mean()
        probe = F.cross_entropy(head(h.detach()), b["y"])
        return fit + probe
    y = torch.randint(0, 3, (12,)); y[[0, 1, 2, 3, 7]] = -100
    s = obj(mlp(), loss, {"x": torch.randn(12, 5), "t": torch.randn(12, 3), "y": y})
    s.watch = lambda: [p.grad is None for p in head.parameters()]
    return s


@u("near_minimum_tokens_as_rows", "wrong units where the gradient nearly cancels")
def _():
    x, y = torch.randn(14, 4).double(), torch.randn(14, 1).double()
    w = torch.rand(14, 1).double() * 4
    m = nn.Linear(4, 1, bias=False)
    m.weight.data = torch.linalg.lstsq(w.sqrt() * x, w.sqrt() * y).solution.T.to(m.weight.dtype)
    return obj(m, lambda m, b: ((m(b["x"]) - b["y"]).square() * b["w"]).sum() / b["w"].sum(), {"x": x.float(), "y": y.float(), "w": w.float()})
