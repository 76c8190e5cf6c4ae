"""Tiny models of Hugging Face, and batches for them."""
import torch
from torch import nn


def ids(n=8, t=7, v=40, ragged=True):
    lengths = torch.randint(2, t + 1, (n,)) if ragged else torch.full((n,), t)
    lengths[1] = t
    mask = (torch.arange(t) < lengths[:, None]).long()
    x = torch.randint(3, v, (n, t)) * mask
    return x, mask


def causal(n=8, t=7, v=40):
    x, mask = ids(n, t, v)
    return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, -100)}


def make(name, ckpt=False, **kw):
    import transformers as tf
    small = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    m = None
    if name == "llama":
        m = tf.LlamaForCausalLM(tf.LlamaConfig(**small, num_key_value_heads=1, max_position_embeddings=32, **kw))
    if name == "qwen2":
        m = tf.Qwen2ForCausalLM(tf.Qwen2Config(**small, num_key_value_heads=1, max_position_embeddings=32, **kw))
    if name == "mixtral":
        m = tf.MixtralForCausalLM(tf.MixtralConfig(**small, num_key_value_heads=1, max_position_embeddings=32, num_local_experts=3, num_experts_per_tok=2, **kw))
    if name == "gpt2":
        m = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2, **kw))
    if name == "neox":
        m = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**small, max_position_embeddings=32, **kw))
    if name == "bert_cls":
        m = tf.BertForSequenceClassification(tf.BertConfig(**small, max_position_embeddings=32, num_labels=3, **kw))
    if name == "bert_mlm":
        m = tf.BertForMaskedLM(tf.BertConfig(**small, max_position_embeddings=32, **kw))
    if name == "bert_tok":
        m = tf.BertForTokenClassification(tf.BertConfig(**small, max_position_embeddings=32, num_labels=3, **kw))
    if name == "bert_qa":
        m = tf.BertForQuestionAnswering(tf.BertConfig(**small, max_position_embeddings=32, **kw))
    if name == "distilbert":
        m = tf.DistilBertForSequenceClassification(tf.DistilBertConfig(vocab_size=40, dim=16, hidden_dim=24, n_layers=2, n_heads=2, max_position_embeddings=32, num_labels=3, **kw))
    if name == "t5":
        m = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **kw))
    if name == "bart":
        m = tf.BartForConditionalGeneration(tf.BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, **kw))
    if name == "xlnet":
        m = tf.XLNetForSequenceClassification(tf.XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3, **kw))
    if name == "xlnet_lm":
        m = tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=24, **kw))
    if name == "vit":
        m = tf.ViTForImageClassification(tf.ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3, **kw))
    m.train()
    if ckpt:
        m.gradient_checkpointing_enable()
        if hasattr(m.config, "use_cache"):
            m.config.use_cache = False
    return m


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(2, base.in_features) * 0.1), nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def lora(m, *names):
    m.requires_grad_(False)
    for parent in list(m.modules()):
        for k, c in list(parent.named_children()):
            if k in names and isinstance(c, nn.Linear):
                setattr(parent, k, LoraLinear(c))
    return m


def plain(m, b):
    return m(**b).loss


shifted = lambda b: (b["labels"][:, 1:] != -100).sum()
unshifted = lambda b: (b["labels"] != -100).sum()
