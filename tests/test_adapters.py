"""Models from elsewhere: an NNX model decodes speculatively; trees of Gemma's and MaxText's code, there and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t
import toys

from specjax import cache as kv
from specjax.checkpoint import adapters, load_folder
from specjax.draft import model_drafter, ngram_drafter, no_drafter
from specjax.errors import CheckpointError
from specjax.models import attention
from specjax.models.decoder import DecoderFn
from specjax.types import Cache, ModelFn, ModelOutput
from specjax.verify import RULES

V, D, N, H = 23, 16, 2, 8


class Layer(nnx.Module):
    """One layer of attention over the cache, and one MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(V, D, rngs=rngs)
        self.q, self.k, self.v, self.out = (nnx.Linear(D, D, use_bias=False, rngs=rngs) for _ in range(4))
        self.up, self.down, self.head = (nnx.Linear(*size, rngs=rngs) for size in ((D, 32), (32, D), (D, V)))

    def __call__(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        x = self.embedding(tokens)
        turn = jnp.sin(0.7 * (cache.length[:, None] + jnp.arange(tokens.shape[1])))
        x = x * (1 + turn[..., None])
        heads = [y(x).reshape(*tokens.shape, N, H).swapaxes(1, 2) for y in (self.q, self.k, self.v)]
        k, v = kv.write(cache.k[0], heads[1], cache.length), kv.write(cache.v[0], heads[2], cache.length)
        mixed = attention.chunks(heads[0], k, v, cache.length, H**-0.5)
        x = x + self.out(mixed.swapaxes(1, 2).reshape(*tokens.shape, D))
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.head(x), Cache((k,), (v,), cache.length + tokens.shape[1])


@dataclasses.dataclass(frozen=True)
class NnxFn:
    """An NNX model as a ModelFn: split once, its state the parameters, merged inside; plain ``jax.jit`` compiles it."""

    graph: nnx.GraphDef

    def init_cache(self, batch: int, capacity: int) -> Cache:
        return kv.init(batch, capacity, 1, N, H, jnp.float32)

    def __call__(self, params, tokens, cache, *, logits="all", features=False) -> ModelOutput:
        scores, cache = nnx.merge(self.graph, params)(tokens, cache)
        if isinstance(logits, str):
            return ModelOutput(scores if logits == "all" else None, cache)
        return ModelOutput(jnp.take_along_axis(scores, logits[:, None, None], axis=1)[:, 0], cache)


def split(seed: int) -> tuple[NnxFn, Any]:
    """Return a model as a function and its parameters."""
    graph, params = nnx.split(Layer(nnx.Rngs(seed)))
    return NnxFn(graph), params


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3]]


def test_an_nnx_model_is_a_model_fn():
    fn, params = split(0)
    other, _ = split(1)
    assert isinstance(fn, ModelFn)
    assert hash(fn) == hash(other)
    assert fn == other
    whole = fn(params, jnp.asarray([PROMPTS[0]]), fn.init_cache(1, 8)).logits
    cache, steps = fn.init_cache(1, 8), []
    for token in PROMPTS[0]:
        out = fn(params, jnp.asarray([[token]]), cache)
        cache, steps = out.cache, [*steps, out.logits]
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("draft", ["model", "itself", "ngram"])
def test_an_nnx_model_decodes_speculatively(draft: str):
    (fn, params), (draft_fn, draft_params) = split(0), split(0 if draft == "itself" else 1)

    def run(drafter, gamma: int) -> toys.Run:
        both = {"target": params, "draft": draft_params}
        return toys.run_batch(
            fn, drafter, both, PROMPTS, rule=RULES["greedy"], gamma=gamma, max_new=24, vocab=V, temperature=0.0
        )

    plain = run(no_drafter(), 0)
    drafted = run(ngram_drafter() if draft == "ngram" else model_drafter(draft_fn, V), 4)
    assert drafted.outputs == plain.outputs
    assert all(len(set(output)) > 2 for output in plain.outputs)
    if draft == "itself":
        assert drafted.acceptance == 1.0


def gemma_tree(params: dict, config, *, turned: bool = False) -> dict[str, np.ndarray]:
    """Write a tree of google-deepmind/gemma entry by entry, flat as its checkpoints are."""
    n, g, h, d, f = config.num_heads, config.num_kv_heads, config.head_dim, config.width, config.mlp_width
    tree = {
        "transformer/embedder/input_embedding": params["embedding"],
        "transformer/final_norm/scale": params["final_norm"]["scale"],
    }
    for i in range(config.num_layers):
        ours, top = params[f"layers_{i}"], f"transformer/layer_{i}"
        attention = {name: ours["attention"][name]["kernel"] for name in ("q", "k", "v", "out")}
        q, kv_, out = np.zeros((n, d, h)), np.zeros((2, g, d, h)), np.zeros((n, h, d))
        for a in range(d):
            for b in range(h):
                for head in range(n):
                    q[head, a, b] = attention["q"][head * h + b, a]
                    out[head, b, a] = attention["out"][a, head * h + b]
                for head in range(g):
                    kv_[0, head, a, b] = attention["k"][head * h + b, a]
                    kv_[1, head, a, b] = attention["v"][head * h + b, a]
        if n == g:
            tree[f"{top}/attn/qkv_einsum/w"] = np.concatenate([q[None], kv_])
        else:
            tree |= {f"{top}/attn/q_einsum/w": q, f"{top}/attn/kv_einsum/w": kv_}
        tree[f"{top}/attn/attn_vec_einsum/w"] = out
        gate, up = ours["mlp"]["gate"]["kernel"], ours["mlp"]["up"]["kernel"]
        tree[f"{top}/mlp/gating_einsum/w"] = np.stack([gate.T, up.T] if turned else [gate, up])
        tree[f"{top}/mlp/linear/w"] = np.array(
            [[ours["mlp"]["down"]["kernel"][b, a] for b in range(d)] for a in range(f)]
        )
        names = {"attention_norm": "pre_attention_norm", "attention_post_norm": "post_attention_norm",
                 "mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm"}  # fmt: skip
        tree |= {f"{top}/{theirs}/scale": ours[name]["scale"] for name, theirs in names.items()}
        if config.qk_norm:
            for name, theirs in (("q_norm", "_query_norm"), ("k_norm", "_key_norm")):
                tree[f"{top}/attn/{theirs}/scale"] = ours["attention"][name]["scale"]
    return {name: np.asarray(array, np.float32) for name, array in tree.items()}


def random_params(family, config, seed: int = 0) -> dict:
    """Return parameters of a family."""
    rng, params = np.random.default_rng(seed), {}
    for leaf in family.leaves(config):
        adapters.put(params, leaf.path, rng.normal(size=leaf.shape).astype(np.float32))
    return params


def same(got, wanted, **tolerance) -> None:
    """Check that two trees hold the same arrays under the same names."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    check = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    jax.tree.map(lambda a, b: check(np.asarray(a), np.asarray(b), **tolerance), got, wanted)


@pytest.mark.parametrize("name", ["gemma3-dual-rope", "gemma2-softcap"])
def test_gemma_trees(name: str):
    c = load_folder(t.DATA / name)
    tree = gemma_tree(jax.tree.map(np.asarray, c.params), c.config)
    same(adapters.from_gemma(tree, c.family, c.config), c.params)
    back = adapters.to_gemma(c.params, c.config)
    flat = {"transformer/" + "/".join(path): array for path, array in adapters._flat(back)}
    assert flat.keys() == tree.keys()
    for key, array in tree.items():
        np.testing.assert_array_equal(flat[key], array)
    same(adapters.from_gemma(back, c.family, c.config), c.params)


def test_gemma_trees_of_other_forms():
    c = load_folder(t.DATA / "gemma2-softcap")
    config = dataclasses.replace(c.config, num_kv_heads=c.config.num_heads)
    params = random_params(c.family, config)
    for turned in (False, True):
        tree = gemma_tree(params, config, turned=turned)
        same(adapters.from_gemma(tree, c.family, config), params)
    # Newer versions hold the MLP's arrays without a "w".
    nested: dict[str, Any] = {}
    for key, array in tree.items():
        path = tuple(key.split("/"))[1:]
        adapters.put(nested, path[:-1] if "mlp" in path else path, array)
    same(adapters.from_gemma(nested, c.family, config), params)


def maxtext_tree(params: dict, config, *, llama: bool, scanned: bool) -> dict[str, Any]:
    """Write a tree of MaxText from its converter's formulas, flat: reshape, interleave, scale, stack on axis 1."""
    h, d = config.head_dim, config.width
    add = 0.0 if llama else 1.0
    scale = np.float32(1 / np.sqrt(h)) if llama else np.float32(1)
    embed = 1.0 if llama else np.float32(np.sqrt(d).astype(jnp.bfloat16))
    names = ({"attention_norm": "pre_self_attention_layer_norm", "mlp_norm": "post_self_attention_layer_norm"} if llama
             else {"attention_norm": "pre_self_attention_norm", "attention_post_norm": "post_self_attention_norm",
                   "mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm"})  # fmt: skip

    def alternate(x):
        return np.stack([x[..., : h // 2], x[..., h // 2 :]], axis=-1).reshape(x.shape) if llama else x

    rows = []
    for i in range(config.num_layers):
        ours = params[f"layers_{i}"]
        kernels = {name: np.asarray(ours["attention"][name]["kernel"]).T for name in ("q", "k", "v")}
        row = {f"{theirs}/scale": np.asarray(ours[name]["scale"]) + add for name, theirs in names.items()}
        row["self_attention/query/kernel"] = alternate(kernels["q"].reshape(d, -1, h)) * scale
        row["self_attention/key/kernel"] = alternate(kernels["k"].reshape(d, -1, h))
        row["self_attention/value/kernel"] = kernels["v"].reshape(d, -1, h)
        row["self_attention/out/kernel"] = np.asarray(ours["attention"]["out"]["kernel"]).T.reshape(-1, h, d)
        for name, theirs in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            row[f"mlp/{theirs}/kernel"] = np.asarray(ours["mlp"][name]["kernel"]).T
        if config.qk_norm:
            for name, theirs in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
                row[f"self_attention/{theirs}/scale"] = np.asarray(ours["attention"][name]["scale"]) + add
        rows.append(row)
    tree = {
        "params/token_embedder/embedding": np.asarray(params["embedding"]) * embed,
        "params/decoder/decoder_norm/scale": np.asarray(params["final_norm"]["scale"]) + add,
    }
    if not config.tied:
        tree["params/decoder/logits_dense/kernel"] = np.asarray(params["head"]).T
    if scanned:
        tree |= {f"params/decoder/layers/{key}": np.stack([row[key] for row in rows], axis=1) for key in rows[0]}
    else:
        tree |= {f"params/decoder/layers_{i}/{key}": row[key] for i, row in enumerate(rows) for key in row}
    return tree


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name", ["llama3-rope-untied", "gemma3-dual-rope", "llama-8-heads"])
def test_maxtext_trees(name: str, scanned: bool):
    c = load_folder(t.DATA / name)
    tree = maxtext_tree(c.params, c.config, llama=c.family.name == "llama", scanned=scanned)
    if scanned:
        shape = (c.config.width, c.config.num_layers, c.config.num_heads, c.config.head_dim)
        assert tree["params/decoder/layers/self_attention/query/kernel"].shape == shape
    got = adapters.from_maxtext(tree, c.family, c.config)
    same(got, c.params, atol=1e-6, rtol=1e-6)
    back = adapters.to_maxtext(c.params, c.family, c.config, scanned=scanned)
    flat = {"params/" + "/".join(path): array for path, array in adapters._flat(back)}
    assert flat.keys() == tree.keys()
    for key, array in tree.items():
        np.testing.assert_allclose(flat[key], array, atol=1e-6, rtol=1e-6)
    fn = DecoderFn(c.config)
    tokens = jnp.asarray([t.prompts()[1]])
    logits = [np.asarray(fn(params, tokens, fn.init_cache(1, 16)).logits) for params in (got, c.params)]
    np.testing.assert_allclose(*logits, atol=2e-4 * np.abs(logits[1]).max())


def test_maxtext_options():
    c = load_folder(t.DATA / "llama-8-heads")
    options = {"interleaved": False, "scaled_queries": False}
    plain = adapters.to_maxtext(c.params, c.family, c.config, **options)
    same(adapters.from_maxtext({"params": plain}, c.family, c.config, **options), c.params)
    qwen = load_folder(t.DATA / "qwen3-qknorm")
    tree = adapters.to_maxtext(qwen.params, qwen.family, qwen.config)
    assert tree["decoder"]["layers"]["self_attention"]["query_norm"]["scale"].shape == (32, 3)
    same(adapters.from_maxtext(tree, qwen.family, qwen.config), qwen.params)


def test_what_does_not_fit_is_named():
    c = load_folder(t.DATA / "gemma3-dual-rope")
    tree = adapters.to_gemma(c.params, c.config)
    tree["embedder"]["input_embedding"] = tree["embedder"]["input_embedding"][:10]
    tree["vision"] = {"w": np.ones(2)}
    del tree["layer_0"]["attn"]["q_einsum"]
    with pytest.raises(CheckpointError) as caught:
        adapters.from_gemma(tree, c.family, c.config)
    message = str(caught.value)
    assert "lacks: layer_0/attn/q_einsum/w [4, 64, 32]" in message
    assert "vision/w" in message
    assert "[10, 64] instead of [320, 64]" in message
    assert "\n" not in message
    scanned = adapters.to_maxtext(c.params, c.family, c.config)
    with pytest.raises(CheckpointError, match="expected 5 layers on axis 1"):
        adapters.from_maxtext(scanned, c.family, dataclasses.replace(c.config, num_layers=5, kinds=c.config.kinds[:5]))
    mixtral = load_folder(t.DATA / "qwen2-bias")
    with pytest.raises(CheckpointError, match="qwen2 is not known; known: llama"):
        adapters.to_maxtext(mixtral.params, mixtral.family, mixtral.config)
