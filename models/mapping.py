"""Where checkpoints in Hugging Face layout keep the parameters that families share."""

from __future__ import annotations

from specjax.models.config import DecoderConfig, Leaf


def leaf(path: tuple[str, ...], tensor: str, *shape: int) -> Leaf:
    """Return a leaf that is one tensor as it stands."""
    return Leaf(path, shape, (tensor,), (shape,))


def ends(c: DecoderConfig) -> list[Leaf]:
    """Return embedding, final norm and output head."""
    found = [
        leaf(("embedding",), "model.embed_tokens.weight", c.vocab_size, c.width),
        leaf(("final_norm", "scale"), "model.norm.weight", c.width),
    ]
    if not c.tied:
        found.append(leaf(("head",), "lm_head.weight", c.vocab_size, c.width))
    return found


def norms(c: DecoderConfig, layer: int, **tensors: str) -> list[Leaf]:
    """Return a layer's norms: our name = the tensor's."""
    there = f"model.layers.{layer}"
    return [
        leaf((f"layers_{layer}", name, "scale"), f"{there}.{tensor}.weight", c.width)
        for name, tensor in tensors.items()
    ]


def linear(path: tuple[str, ...], tensor: str, rows: int, columns: int, bias: bool) -> list[Leaf]:
    """Return a projection and, where it has one, its bias."""
    found = [leaf((*path, "kernel"), f"{tensor}.weight", rows, columns)]
    return [*found, leaf((*path, "bias"), f"{tensor}.bias", rows)] if bias else found


def attention(c: DecoderConfig, layer: int) -> list[Leaf]:
    """Return the four projections of a layer's attention and its norms of queries and keys."""
    here, there = (f"layers_{layer}", "attention"), f"model.layers.{layer}.self_attn"
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = linear((*here, "q"), f"{there}.q_proj", query, c.width, c.qkv_bias)
    found += linear((*here, "k"), f"{there}.k_proj", key_value, c.width, c.qkv_bias)
    found += linear((*here, "v"), f"{there}.v_proj", key_value, c.width, c.qkv_bias)
    found += linear((*here, "out"), f"{there}.o_proj", c.width, query, c.out_bias)
    if c.qk_norm:
        sizes = (query, key_value) if c.qk_norm == "whole" else (c.head_dim, c.head_dim)
        for name, size in zip("qk", sizes, strict=True):
            found.append(leaf((*here, f"{name}_norm", "scale"), f"{there}.{name}_norm.weight", size))
    return found


def mlp(c: DecoderConfig, layer: int) -> list[Leaf]:
    """Return a layer's gated MLP."""
    here, there = (f"layers_{layer}", "mlp"), f"model.layers.{layer}.mlp"
    found = linear((*here, "gate"), f"{there}.gate_proj", c.mlp_width, c.width, c.mlp_bias)
    found += linear((*here, "up"), f"{there}.up_proj", c.mlp_width, c.width, c.mlp_bias)
    return found + linear((*here, "down"), f"{there}.down_proj", c.width, c.mlp_width, c.mlp_bias)


def parts(
    tensor: str, sizes: dict[tuple[str, ...], int], columns: int | None = None, *, transposed: bool = False
) -> list[Leaf]:
    """Return the leaves that one tensor holds below one another (side by side, where it is stored [in, out]).

    Args:
        tensor: its name.
        sizes: the rows of each leaf, by path.
        columns: None: the tensor is a vector.
        transposed: it is stored [in, out].
    """
    rows = sum(sizes.values())
    whole = (rows,) if columns is None else (columns, rows) if transposed else (rows, columns)
    found, first = [], 0
    for path, size in sizes.items():
        shape = (size,) if columns is None else (size, columns)
        found.append(
            Leaf(path, shape, (tensor,), (whole,), transposed, (first, first + size) if len(sizes) > 1 else None)
        )
        first += size
    return found


def experts(c: DecoderConfig, layer: int, block: str, gate: str, up: str, down: str) -> list[Leaf]:
    """Return a layer's experts and their router.

    Args:
        c: the decoder.
        layer: which layer.
        block: what the checkpoint calls the mixture.
        gate, up, down: what it calls an expert's projections.
    """
    e = c.kind(layer).experts
    assert e is not None
    here, there = (f"layers_{layer}", "mlp"), f"model.layers.{layer}.{block}"
    found = linear((*here, "router"), f"{there}.gate", e.count, c.width, False)
    wide, narrow = (e.width, c.width), (c.width, e.width)
    for name, tensor, shape in (("gate", gate, wide), ("up", up, wide), ("down", down, narrow)):
        sources = tuple(f"{there}.experts.{i}.{tensor}.weight" for i in range(e.count))
        found.append(Leaf((*here, name), (e.count * shape[0], shape[1]), sources, (shape,) * e.count))
    return found


def llama_like(c: DecoderConfig) -> list[Leaf]:
    """Return every parameter of a decoder that is laid out as Llama: norms before, one MLP a layer."""
    found = ends(c)
    for i in range(c.num_layers):
        found += norms(c, i, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        found += attention(c, i) + mlp(c, i)
    return found
