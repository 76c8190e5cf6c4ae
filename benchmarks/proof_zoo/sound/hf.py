"""Hugging Face models by huggingface()."""
import torch
from benchmarks.proof_zoo.zoo import S, sound
from benchmarks.proof_zoo.hfzoo import causal, ids, lora, make, plain, shifted, unshifted
from anybatch import Tokens, huggingface


def case(name, model, batch, units, note="", **kw):
    sound("hf_" + name, note)(lambda: S(model(), huggingface(), batch(), loss=plain, units=units, **kw))


def cls():
    x, mask = ids()
    return {"input_ids": x, "attention_mask": mask, "labels": torch.randint(0, 3, (8,))}


def tok(c=3):
    x, mask = ids()
    return {"input_ids": x, "attention_mask": mask, "labels": torch.randint(0, c, x.shape).masked_fill(mask == 0, -100)}


def mlm():
    x, mask = ids()
    hide = (torch.rand(x.shape) < 0.4) & (mask == 1)
    hide[:, 1] = True
    return {"input_ids": x.masked_fill(hide, 1), "attention_mask": mask, "labels": x.masked_fill(~hide, -100)}


def s2s():
    x, mask = ids()
    y, ymask = ids(8, 5)
    return {"input_ids": x, "attention_mask": mask, "labels": y.masked_fill(ymask == 0, -100)}


rows = lambda b: len(b["input_ids"])
case("llama", lambda: make("llama"), causal, shifted)
case("llama_ckpt", lambda: make("llama", ckpt=True), causal, shifted)
case("llama_ckpt_dropout", lambda: make("llama", ckpt=True, attention_dropout=0.1), causal, shifted)
case("llama_eager_dropout", lambda: make("llama", attention_dropout=0.2, attn_implementation="eager"), causal, shifted)
case("llama_tokens", lambda: make("llama"), causal, shifted, micro_batch=Tokens(21))
case("llama_tokens_ckpt", lambda: make("llama", ckpt=True), causal, shifted, micro_batch=Tokens(21))
case("llama_lora", lambda: lora(make("llama"), "q_proj", "v_proj"), causal, shifted)
case("llama_lora_ckpt", lambda: lora(make("llama", ckpt=True), "q_proj", "v_proj"), causal, shifted)
case("llama_bf16", lambda: make("llama").bfloat16(), causal, shifted)
case("llama_tied", lambda: make("llama", tie_word_embeddings=True), causal, shifted)
case("qwen2", lambda: make("qwen2"), causal, shifted)
case("mixtral", lambda: make("mixtral"), causal, shifted)
case("mixtral_ckpt", lambda: make("mixtral", ckpt=True), causal, shifted)
case("gpt2", lambda: make("gpt2"), causal, shifted)
case("gpt2_ckpt", lambda: make("gpt2", ckpt=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), causal, shifted)
case("gpt2_autocast", lambda: make("gpt2"), causal, shifted, options={"autocast": torch.bfloat16})
case("neox", lambda: make("neox"), causal, shifted)
case("bert_cls", lambda: make("bert_cls"), cls, rows)
case("bert_cls_ckpt", lambda: make("bert_cls", ckpt=True), cls, rows)
case("bert_mlm", lambda: make("bert_mlm"), mlm, unshifted)
case("bert_tok_tokens", lambda: make("bert_tok"), tok, unshifted, micro_batch=Tokens(21))
case("distilbert", lambda: make("distilbert"), cls, rows)
case("t5", lambda: make("t5"), s2s, unshifted)
case("t5_ckpt", lambda: make("t5", ckpt=True, dropout_rate=0.0), s2s, unshifted)
case("t5_ckpt_dropout", lambda: make("t5", ckpt=True), s2s, unshifted)
case("bart", lambda: make("bart", dropout=0.0), s2s, unshifted)
case("xlnet_cls_rows", lambda: make("xlnet"), cls, rows, note="looks at padding; cut by rows it is exact")
case("vit", lambda: make("vit"), lambda: {"pixel_values": torch.randn(8, 1, 8, 8), "labels": torch.randint(0, 3, (8,))}, lambda b: len(b["labels"]))
case("bert_qa", lambda: make("bert_qa"), lambda: {**dict(zip(("input_ids", "attention_mask"), ids(ragged=False))), "start_positions": torch.randint(0, 7, (8,)), "end_positions": torch.randint(0, 7, (8,))}, rows)


@sound("hf_encoding_batch")
def _():
    from transformers import BatchEncoding
    return S(make("bert_cls"), huggingface(), BatchEncoding(cls()), loss=plain, units=rows)
