"""The Llama family against logits and greedy tokens of transformers, on four small checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DATA, all_logits, greedy, program, prompts, reference, run, tiny

from specjax.checkpoint import load_folder

FIXTURES = ["llama-gqa-tied", "llama-8-heads", "llama3-rope-untied", "llama-bf16-sharded"]
CAPACITY = 128
TOLERANCE = 2e-4  # logits reach 26; the observed difference is 1e-4 at most


def feed(model, tokens, sizes, batch: int = 1):
    """Feed one prompt in blocks of these sizes; return all its logits [T, V] (of row 0)."""
    cache = model.fn.init_cache(batch, CAPACITY)
    logits, at = [], 0
    for size in sizes:
        block = np.broadcast_to(tokens[at : at + size], (batch, size))
        part, cache = all_logits(model.fn)(model.params, block, cache)
        logits.append(np.asarray(part[0]))
        at += size
    assert at == len(tokens)
    assert cache.length.tolist() == [len(tokens)] * batch
    return np.concatenate(logits)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_and_greedy_tokens_are_the_references(name):
    """All four prompts, each followed by its 48 greedy tokens, in one padded batch."""
    model, expected = tiny(name), reference(name)
    tokens = np.zeros((4, 138), np.int32)
    for i, row in enumerate(tokens):
        ids = np.concatenate([expected[f"prompt_{i}"], expected[f"greedy_{i}"]])
        row[: len(ids)] = ids
    logits = np.asarray(all_logits(model.fn)(model.params, tokens, model.fn.init_cache(4, 138))[0])
    for i in range(4):
        length = len(expected[f"prompt_{i}"])
        np.testing.assert_allclose(logits[i, :length], expected[f"logits_{i}"], atol=TOLERANCE, rtol=0)
        following = logits[i, length - 1 : length + 47]
        assert following.argmax(-1).tolist() == expected[f"greedy_{i}"].tolist()
        top = np.sort(following, axis=-1)
        np.testing.assert_allclose(top[:, -1] - top[:, -2], expected[f"margin_{i}"], atol=2 * TOLERANCE)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "llama3-rope-untied"])
@pytest.mark.parametrize(
    "sizes", [[1] * 40, [7, 1, 16, 1, 1, 7, 7], [16, 16, 7, 1]], ids=["one by one", "ragged", "big"]
)
def test_blocks_of_any_size_give_the_same_logits(name, sizes):
    """Cases 10 and 75: a cached step equals the full forward pass."""
    model, expected = tiny(name), reference(name)
    found = feed(model, expected["prompt_2"], sizes)
    np.testing.assert_allclose(found, expected["logits_2"], atol=TOLERANCE, rtol=0)


def test_rows_of_different_lengths_share_a_step():
    """A batch whose rows stand at 0, 7 and 40 tokens: each row's logits are those of its own context."""
    model, expected = tiny(), reference()
    caches = [model.fn.init_cache(1, CAPACITY)]
    caches += [all_logits(model.fn)(model.params, expected[f"prompt_{i}"][None], caches[0])[1] for i in (1, 2)]
    together = type(caches[0])(
        k=tuple(jnp.concatenate([c.k[i] for c in caches]) for i in range(3)),
        v=tuple(jnp.concatenate([c.v[i] for c in caches]) for i in range(3)),
        length=jnp.concatenate([c.length for c in caches]),
    )
    new = np.asarray([[5, 17, 3]] * 3)
    logits, cache = all_logits(model.fn)(model.params, new, together)
    assert cache.length.tolist() == [3, 10, 43]
    for row, alone in enumerate(caches):
        np.testing.assert_allclose(logits[row], all_logits(model.fn)(model.params, new[:1], alone)[0][0], atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXTURES)
def test_plain_decoding_gives_the_references_tokens(name):
    """Through the engine; tests/test_generate.py does the same with one fixture and every draft."""
    model = tiny(name)
    results = run(program(model.fn), model, None, prompts(name), 48)
    assert [result.ids.tolist() for result in results] == greedy(name)


def test_index_and_none_ask_for_less_of_the_same():
    model, expected = tiny(), reference()
    prompt = expected["prompt_1"][None]
    whole, cache = all_logits(model.fn)(model.params, prompt, model.fn.init_cache(1, CAPACITY))
    ask = jax.jit(model.fn.__call__, static_argnames="logits")
    one = jax.jit(model.fn.__call__)(model.params, prompt, model.fn.init_cache(1, CAPACITY), logits=np.asarray([4]))
    none = ask(model.params, prompt, model.fn.init_cache(1, CAPACITY), logits="none")
    assert one.logits is not None
    assert one.logits.shape == (1, 320)
    np.testing.assert_allclose(one.logits[0], whole[0, 4], atol=5e-5)
    assert none.logits is None
    np.testing.assert_allclose(none.cache.k[2], cache.k[2], atol=5e-5)


def test_a_sharded_bfloat16_folder_loads_in_both_dtypes():
    """Its weights are bfloat16 values: float32 holds them exactly, and both see the same numbers."""
    wide, narrow = (load_folder(DATA / "llama-bf16-sharded", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wide.params["embedding"].dtype == jnp.float32
    assert narrow.params["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide.params["embedding"], narrow.params["embedding"].astype(jnp.float32))
    kernel = ("layers_1", "mlp", "down", "kernel")
    a, b = wide.params, narrow.params
    for key in kernel:
        a, b = a[key], b[key]
    np.testing.assert_array_equal(a, b.astype(jnp.float32))


def test_bfloat16_weights_stay_near_the_reference():
    """The error is that of rounded activations, 0.3% each: at most 5% of the largest logit after three layers."""
    model, expected = tiny("llama-gqa-tied", "bfloat16"), reference()
    found = feed(model, expected["prompt_2"], [40])
    scale = np.abs(expected["logits_2"]).max()
    assert found.dtype == np.float32
    assert 1e-4 * scale < np.abs(found - expected["logits_2"]).max() < 0.05 * scale
