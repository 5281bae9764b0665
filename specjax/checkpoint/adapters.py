"""Parameter trees of other JAX projects, mapped by name and shape to ours and back: pure functions of NumPy arrays.

    params = from_gemma(tree, family, config)         # google-deepmind/gemma (linen)
    params = from_maxtext(tree, family, config)       # MaxText, layers apart or scanned

Letters: V vocabulary, L layers, N query heads, G key-value heads, H head size, D width, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.checkpoint.hf import put
from specjax.errors import CheckpointError

if TYPE_CHECKING:
    from specjax.models.config import DecoderConfig, Family

Path = tuple[str, ...]
_GEMMA_NORMS = {
    "attention_norm": "pre_attention_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "mlp_post_norm": "post_ffw_norm",
}
_MAXTEXT_NORMS = {"attention_norm": "pre_self_attention_layer_norm", "mlp_norm": "post_self_attention_layer_norm"}
_MAXTEXT_GEMMA_NORMS = {
    "attention_norm": "pre_self_attention_norm",
    "attention_post_norm": "post_self_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "mlp_post_norm": "post_ffw_norm",
}
_SCAN_AXIS = 1  # MaxText stacks layers on the second axis


class _Entry(NamedTuple):
    """One array of theirs and the parameters of ours that it holds.

    Attributes:
        theirs: its path.
        shape: its shape.
        ours: the paths of the parameters.
        split: the array to those parameters.
        join: those parameters to the array.
    """

    theirs: Path
    shape: tuple[int, ...]
    ours: tuple[Path, ...]
    split: Callable[[np.ndarray], list[np.ndarray]]
    join: Callable[[list[np.ndarray]], np.ndarray]


def _same(theirs: Path, shape: tuple[int, ...], ours: Path) -> _Entry:
    return _Entry(theirs, shape, (ours,), lambda array: [array], lambda parts: parts[0])


def _turned(theirs: Path, shape: tuple[int, int], ours: Path) -> _Entry:
    """Theirs is [in, out], ours [out, in]."""
    return _Entry(theirs, shape, (ours,), lambda array: [array.T], lambda parts: parts[0].T)


def _heads_in(array: np.ndarray) -> np.ndarray:
    """[heads, D, H] to [heads * H, D]."""
    return array.swapaxes(1, 2).reshape(-1, array.shape[1])


def _heads_out(kernel: np.ndarray, heads: int) -> np.ndarray:
    """[heads * H, D] to [heads, D, H]."""
    return kernel.reshape(heads, -1, kernel.shape[1]).swapaxes(1, 2)


# --- google-deepmind/gemma ---------------------------------------------------------------------------------------


def from_gemma(tree: Mapping[str, Any], family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Map a parameter tree of google-deepmind/gemma to ours.

    Args:
        tree: nested, or flat with "/" in its keys, with or without "transformer" on top, as its checkpoints have it:
            ``layer_0/attn/q_einsum/w`` [N, D, H], ``kv_einsum/w`` [2, G, D, H] (``qkv_einsum/w`` [3, N, D, H] where
            G = N), ``attn_vec_einsum/w`` [N, H, D], ``mlp/gating_einsum/w`` [2, F, D] (or [2, D, F]),
            ``mlp/linear/w`` [F, D].
        family, config: Gemma 2 or 3.

    Raises:
        CheckpointError: arrays that are missing, unknown or of another shape, by name.
    """
    flat = dict(_flat(tree))
    if all(path[0] == "transformer" for path in flat):
        flat = {path[1:]: array for path, array in flat.items()}
    gating = next((np.shape(array) for path, array in flat.items() if "gating_einsum" in path), ())
    turned = gating == (2, config.width, config.mlp_width) and config.width != config.mlp_width
    flat = {path if path[-1] in ("scale", "w", "input_embedding") else (*path, "w"): a for path, a in flat.items()}
    return _to_ours(flat, list(_gemma(config, turned)), family, config)


def to_gemma(params: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Map our parameters to a tree of google-deepmind/gemma, nested, without "transformer" on top."""
    return _to_theirs(params, list(_gemma(config, False)))


def _gemma(c: DecoderConfig, turned: bool) -> Iterator[_Entry]:
    """List the arrays of a Gemma tree.

    Args:
        c: the decoder.
        turned: the MLP's first projection is [2, D, F], as the first Gemmas have it.
    """
    n, g, h, d, f = c.num_heads, c.num_kv_heads, c.head_dim, c.width, c.mlp_width
    yield _same(("embedder", "input_embedding"), (c.vocab_size, d), ("embedding",))
    yield _same(("final_norm", "scale"), (d,), ("final_norm", "scale"))
    for i in range(c.num_layers):
        here, there = f"layers_{i}", f"layer_{i}"
        for ours, theirs in _GEMMA_NORMS.items():
            yield _same((there, theirs, "scale"), (d,), (here, ours, "scale"))
        if c.qk_norm:
            for ours, theirs in (("q_norm", "_query_norm"), ("k_norm", "_key_norm")):
                yield _same((there, "attn", theirs, "scale"), (h,), (here, "attention", ours, "scale"))
        q, k, v = ((here, "attention", name, "kernel") for name in "qkv")
        attn = (there, "attn")
        if n == g:
            yield _stacked_heads((*attn, "qkv_einsum", "w"), (3, n, d, h), (q, k, v))
        else:
            yield _Entry(
                (*attn, "q_einsum", "w"), (n, d, h), (q,), lambda a: [_heads_in(a)], lambda p: _heads_out(p[0], n)
            )
            yield _stacked_heads((*attn, "kv_einsum", "w"), (2, g, d, h), (k, v))
        yield _Entry(
            (*attn, "attn_vec_einsum", "w"),
            (n, h, d),
            ((here, "attention", "out", "kernel"),),
            lambda a: [a.reshape(-1, a.shape[-1]).T],
            lambda p: p[0].T.reshape(n, h, d),
        )
        yield _Entry(
            (there, "mlp", "gating_einsum", "w"),
            (2, d, f) if turned else (2, f, d),
            ((here, "mlp", "gate", "kernel"), (here, "mlp", "up", "kernel")),
            lambda a: [part.T if turned else part for part in a],
            lambda p: np.stack(p),
        )
        yield _turned((there, "mlp", "linear", "w"), (f, d), (here, "mlp", "down", "kernel"))


def _stacked_heads(theirs: Path, shape: tuple[int, ...], ours: tuple[Path, ...]) -> _Entry:
    heads = shape[1]
    return _Entry(
        theirs,
        shape,
        ours,
        lambda array: [_heads_in(part) for part in array],
        lambda parts: np.stack([_heads_out(part, heads) for part in parts]),
    )


# --- MaxText -----------------------------------------------------------------------------------------------------


def from_maxtext(
    tree: Mapping[str, Any],
    family: Family,
    config: DecoderConfig,
    *,
    interleaved: bool | None = None,
    scaled_queries: bool | None = None,
) -> dict[str, Any]:
    """Map a parameter tree of MaxText to ours.

    Llama, Mistral, Qwen 3 and Gemma 3, dense, are known; layers are apart (``decoder/layers_0/...``) or scanned
    (``decoder/layers/self_attention/query/kernel`` [D, L, N, H]). A Gemma's embedding is stored multiplied by
    sqrt(D), its norms with the 1 added.

    Args:
        tree: nested, or flat with "/" in its keys, with or without "params" on top.
        family, config: of the model.
        interleaved: the heads of queries and keys alternate between the two halves that turn together; default: for
            Llama, as MaxText's own converter writes 3.1.
        scaled_queries: the query kernel holds the factor H ** -0.5; default: for Llama and Mistral, likewise.

    Raises:
        CheckpointError: a family that is not known, or arrays that are missing, unknown or of another shape.
    """
    flat = dict(_flat(tree))
    while flat and all(path[0] == "params" for path in flat):
        flat = {path[1:]: array for path, array in flat.items()}
    entries = list(_maxtext(family, config, interleaved, scaled_queries))
    if any(path[:2] == ("decoder", "layers") for path in flat):
        flat = _apart(flat, config.num_layers)
    return _to_ours(flat, entries, family, config)


def to_maxtext(
    params: Mapping[str, Any],
    family: Family,
    config: DecoderConfig,
    *,
    scanned: bool = True,
    interleaved: bool | None = None,
    scaled_queries: bool | None = None,
) -> dict[str, Any]:
    """Map our parameters to a nested tree of MaxText, without "params" on top; see ``from_maxtext``."""
    tree = _to_theirs(params, list(_maxtext(family, config, interleaved, scaled_queries)))
    if not scanned:
        return tree
    layers = [dict(_flat(tree["decoder"].pop(f"layers_{i}"))) for i in range(config.num_layers)]
    for path in layers[0]:
        stacked = np.stack([layer[path] for layer in layers], axis=_SCAN_AXIS)
        put(tree, ("decoder", "layers", *path), stacked)
    return tree


def _apart(flat: dict[Path, Any], layers: int) -> dict[Path, Any]:
    """Take scanned layers apart.

    Raises:
        CheckpointError: an array has another number of layers.
    """
    found: dict[Path, Any] = {}
    for path, array in flat.items():
        if path[:2] != ("decoder", "layers"):
            found[path] = array
            continue
        array = np.asarray(array)
        if array.ndim < 2 or array.shape[_SCAN_AXIS] != layers:
            raise CheckpointError(
                f"{'/'.join(path)} has shape {list(array.shape)}; expected {layers} layers on axis 1."
            )
        for i in range(layers):
            found["decoder", f"layers_{i}", *path[2:]] = np.take(array, i, axis=_SCAN_AXIS)
    return found


def _maxtext(
    family: Family, c: DecoderConfig, interleaved: bool | None, scaled_queries: bool | None
) -> Iterator[_Entry]:
    if family.name not in ("llama", "mistral", "qwen3", "gemma3"):
        raise CheckpointError(f"MaxText's tree of {family.name} is not known; known: llama, mistral, qwen3, gemma3.")
    if c.qkv_bias or c.out_bias or c.mlp_bias:
        raise CheckpointError("MaxText's tree of a model with biases is not known.")
    gemma = family.name == "gemma3"
    interleaved = family.name == "llama" if interleaved is None else interleaved
    scaled_queries = family.name in ("llama", "mistral") if scaled_queries is None else scaled_queries
    factor = np.float32(c.head_dim**0.5 if scaled_queries else 1.0)
    embedded = np.float32(ml_dtypes.bfloat16(c.width**0.5)) if gemma else np.float32(1)
    offset = np.float32(1 if gemma else 0)
    n, g, h, d, f = c.num_heads, c.num_kv_heads, c.head_dim, c.width, c.mlp_width

    def norm(theirs: Path, size: int, ours: Path) -> _Entry:
        return _Entry(theirs, (size,), (ours,), lambda a: [_shift(a, -offset)], lambda p: _shift(p[0], offset))

    yield _Entry(
        ("token_embedder", "embedding"),
        (c.vocab_size, d),
        (("embedding",),),
        lambda a: [_times(a, 1 / embedded) if gemma else a],
        lambda p: _times(p[0], embedded),
    )
    yield norm(("decoder", "decoder_norm", "scale"), d, ("final_norm", "scale"))
    if not c.tied:
        yield _turned(("decoder", "logits_dense", "kernel"), (d, c.vocab_size), ("head",))
    for i in range(c.num_layers):
        here, there = f"layers_{i}", ("decoder", f"layers_{i}")
        for ours, theirs in (_MAXTEXT_GEMMA_NORMS if gemma else _MAXTEXT_NORMS).items():
            yield norm((*there, theirs, "scale"), d, (here, ours, "scale"))
        attention = (*there, "self_attention")
        if c.qk_norm:
            for ours, theirs in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
                yield norm((*attention, theirs, "scale"), h, (here, "attention", ours, "scale"))
        for ours, theirs, heads in (("q", "query", n), ("k", "key", g), ("v", "value", g)):
            path = (*attention, theirs, "kernel")
            turns, scale = interleaved and ours != "v", factor if ours == "q" else np.float32(1)
            yield _projection(path, (d, heads, h), (here, "attention", ours, "kernel"), turns, scale)
        yield _Entry(
            (*attention, "out", "kernel"),
            (n, h, d),
            ((here, "attention", "out", "kernel"),),
            lambda a: [a.reshape(-1, a.shape[-1]).T],
            lambda p: p[0].T.reshape(n, h, d),
        )
        for ours, theirs, shape in (("gate", "wi_0", (d, f)), ("up", "wi_1", (d, f)), ("down", "wo", (f, d))):
            yield _turned((*there, "mlp", theirs, "kernel"), shape, (here, "mlp", ours, "kernel"))


def _projection(theirs: Path, shape: tuple[int, int, int], ours: Path, turns: bool, scale: np.float32) -> _Entry:
    """[D, heads, H] and [heads * H, D]; ``turns``: theirs alternates between the two halves of a head."""

    def split(array: np.ndarray) -> list[np.ndarray]:
        if turns:
            array = np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        return [_times(array.reshape(array.shape[0], -1).T, scale)]

    def join(parts: list[np.ndarray]) -> np.ndarray:
        array = _times(parts[0], 1 / scale).T.reshape(shape)
        if not turns:
            return array
        half = shape[-1] // 2
        return np.stack([array[..., :half], array[..., half:]], axis=-1).reshape(shape)

    return _Entry(theirs, shape, (ours,), split, join)


def _times(array: np.ndarray, factor: np.float32) -> np.ndarray:
    return array if factor == 1 else (array.astype(np.float32) * factor).astype(array.dtype)


def _shift(array: np.ndarray, offset: np.float32) -> np.ndarray:
    return array if offset == 0 else (array.astype(np.float32) + offset).astype(array.dtype)


# --- both --------------------------------------------------------------------------------------------------------


def _flat(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        path = (*above, *str(key).split("/"))
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        else:
            yield path, value


def _to_ours(flat: dict[Path, Any], entries: list[_Entry], family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Split every array.

    Raises:
        CheckpointError: what does not fit, by name.
    """
    wanted = {entry.theirs for entry in entries}
    missing = [f"{'/'.join(entry.theirs)} {list(entry.shape)}" for entry in entries if entry.theirs not in flat]
    unknown = ["/".join(path) for path in flat if path not in wanted]
    wrong = [
        f"{'/'.join(entry.theirs)} {list(np.shape(flat[entry.theirs]))} instead of {list(entry.shape)}"
        for entry in entries
        if entry.theirs in flat and np.shape(flat[entry.theirs]) != entry.shape
    ]
    faults = (("lacks", missing), ("has unknown arrays", unknown), ("has arrays of another shape", wrong))
    said = [f"{what}: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}" for what, names in faults if names]
    if said:
        raise CheckpointError(f"The tree {'; '.join(said)}. The config is of another model than this one.")
    params: dict[str, Any] = {}
    for entry in entries:
        for path, part in zip(entry.ours, entry.split(np.asarray(flat[entry.theirs])), strict=True):
            put(params, path, np.ascontiguousarray(part))
    found = {path for entry in entries for path in entry.ours}
    if left := [leaf for leaf in family.leaves(config) if leaf.path not in found]:
        names = ", ".join("/".join(leaf.path) for leaf in left[:5])
        raise CheckpointError(f"Family {family.name} has parameters that such a tree has no place for: {names}.")
    return params


def _to_theirs(params: Mapping[str, Any], entries: list[_Entry]) -> dict[str, Any]:
    ours = dict(_flat(params))
    tree: dict[str, Any] = {}
    for entry in entries:
        put(tree, entry.theirs, np.ascontiguousarray(entry.join([np.asarray(ours[path]) for path in entry.ours])))
    return tree
