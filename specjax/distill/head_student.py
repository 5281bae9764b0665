"""Heads over the target's features as students: recurrent MLP, EAGLE's layer, Medusa's heads, a trained early exit.

The teacher's forced pass over a text gives the features; at own-feature step s a head sees the true ones up to s + 1
positions before and its own after them, as at its (s+1)-th draft (EAGLE-3, 2503.01840, calls it training-time test).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from specjax import head_folder
from specjax.distill.config import StudentSpec
from specjax.distill.student import Base, Batch
from specjax.errors import UsageError
from specjax.head_folder import Head, Made
from specjax.models import heads
from specjax.models.config import DecoderConfig
from specjax.models.decoder import DecoderFn
from specjax.models.heads import HeadConfig
from specjax.pair import Draft, Model
from specjax.types import ModelOutput, Params

RECURRENT_STEPS, DECAY, MEDUSA_HEADS = 2, 0.8, 4
# What a recipe may say of a head; the rest follows from the target.
SIZES = {
    "mlp": ("mlp_width",),
    "eagle": ("mlp_width", "num_heads", "num_kv_heads", "head_dim", "rope_theta"),
    "medusa": ("positions",),
    "early_exit": ("layers", "adapter"),
}
OUTPUT = ("prompt_ids", "trained_output")


class HeadStudent:
    """A head of any kind of ``specjax.models.heads.KINDS``.

    Args:
        spec: what was asked.
        base: what it is made for.
        dtype: of the products in training, "float32" or "bfloat16"; parameters are float32.

    Raises:
        UsageError: no teacher that a head can read, or sizes that do not fit it.
    """

    def __init__(self, spec: StudentSpec, base: Base, *, dtype: str):
        if base.target is None or not isinstance(base.target.fn, DecoderFn):
            raise UsageError(f"student.kind {spec.kind!r} needs a teacher that is a decoder of ours.")
        if spec.layers or spec.init:
            raise UsageError(f"student.{'layers' if spec.layers else 'init'} is of models; a head starts from scratch.")
        self.ids: np.ndarray | None = None
        self._spec, self._base, self._target, self._dtype = spec, base, base.target, dtype
        self._decoder = base.target.fn.config
        self._config = config_of(spec, self._decoder, base.target)
        self.reads: str | int | None = self._config.layers if spec.kind == "early_exit" else "final"
        self.step_weights = weights_of(spec, self._config)
        self._drafter: Any = None

    @property
    def config(self) -> HeadConfig:
        """The head's sizes, its list of ids among them."""
        return dataclasses.replace(self._config, num_ids=0 if self.ids is None else len(self.ids))

    def init(self, key: jax.Array) -> Params:
        """See ``Student``; trained output rows start as the target's."""
        return heads.init(self.config, key, output=self._rows(self._target.params))

    def masks(self, batch: Batch) -> tuple[jax.Array, ...]:
        """See ``Student``: step s begins at the (s+1)-th token of a text."""
        steps = len(self.step_weights)
        return tuple(heads.valid(steps, batch["mask"], batch["position"]) * batch["mask"])

    def logits(
        self, params: Params, batch: Batch, teacher: ModelOutput | None, teacher_params: Params
    ) -> tuple[jax.Array, ...]:
        """See ``Student``."""
        assert teacher is not None
        assert teacher.features is not None
        found = heads.outputs(
            self.config, params, teacher.features, batch["tokens"], teacher_params["embedding"],
            len(self.step_weights), batch["position"], self._dtype,
        )  # fmt: skip
        rows, cap = self._rows(teacher_params), self._decoder.logit_cap
        return tuple(heads.logits_of(params, step, rows, cap, self._dtype) for step in found)

    def draft(self, params: Params, target: Model) -> Draft:
        """See ``Student``."""
        head = Head("student", self.config, self._made, self.ids, params, self._dtype)
        drafter, held = head_folder.head_of(head, target)
        self._drafter = self._drafter or drafter
        return Draft("student", self._drafter, held)

    def save(self, folder: Path, params: Params, card: str) -> None:
        """See ``Student``."""
        head_folder.save_head(
            folder, self.config, params, target=self._made, card=card, ids=self.ids, dtype=self._spec.dtype
        )

    def describe(self) -> str:
        """See ``Student``."""
        c = self.config
        count = sum(int(np.prod(shape)) for shape in c.shapes().values())
        sizes = ", ".join(f"{name} {getattr(c, name)}" for name in ("width", *SIZES[c.kind]))
        scored = f"{c.num_rows} ids scored" + (f" and up to {c.prompt_ids} of a row's prompt" if c.num_ids else "")
        weights = " and ".join(f"{weight:g}" for weight in self.step_weights)
        scored += ", by rows of its own" if c.trained_output else ", by the target's rows"
        return f"{c.kind} head, {count:,} parameters: {sizes}, {scored}; own-feature steps weighed {weights}"

    @property
    def _made(self) -> Made:
        return Made(self._target.name, self._base.tokenizer.fingerprint)

    def _rows(self, teacher_params: Params) -> jax.Array:
        """Return the target's output rows of what is scored, float32: the products' dtype is the step's."""
        rows = teacher_params["embedding" if self._decoder.tied else "head"]
        return (rows[: self._base.vocab_size] if self.ids is None else rows[self.ids]).astype(jnp.float32)


def config_of(spec: StudentSpec, decoder: DecoderConfig, target: Model) -> HeadConfig:
    """Return the sizes of a head: what the recipe says, else the target's own.

    Raises:
        UsageError: a key that its kind does not have, or a value that cannot be.
    """
    kind = spec.kind
    known = (*SIZES[kind], *OUTPUT)
    if unknown := [name for name in spec.config if name not in known]:
        raise UsageError(f"student.config has {unknown[0]!r}; a head of kind {kind} has {', '.join(known)}.")
    sizes: dict[str, Any] = {
        "mlp_width": decoder.mlp_width, "num_heads": decoder.num_heads, "num_kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim, "rope_theta": decoder.rope.rope_theta if decoder.rope else 10000.0,
        "positions": MEDUSA_HEADS,
    }  # fmt: skip
    # as the target multiplies: by a factor of its own dtype
    scale = float(jnp.asarray(decoder.width**0.5, target.dtype)) if decoder.scaled_embedding else 1.0
    values: Mapping[str, Any] = {
        **{name: sizes[name] for name in SIZES[kind] if name in sizes}, **spec.config, "kind": kind,
        "width": decoder.width, "vocab_size": target.vocab_size, "embedding_scale": scale,
        "norm_eps": decoder.norm_eps,
    }  # fmt: skip
    try:
        config = msgspec.convert(values, HeadConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"student.config: {error}.") from error
    if problem := config.problem():
        raise UsageError(f"student.config: {problem}")
    if kind == "early_exit" and config.layers >= decoder.num_layers:
        raise UsageError(f"student.config.layers is {config.layers}; the teacher has {decoder.num_layers} layers.")
    return config


def weights_of(spec: StudentSpec, config: HeadConfig) -> tuple[float, ...]:
    """Return the weight of each own-feature step.

    Raises:
        UsageError: more steps than the head has, or another number of weights than of steps.
    """
    most = {"medusa": config.positions, "early_exit": 1}.get(config.kind)
    steps = spec.steps or len(spec.step_weights) or most or RECURRENT_STEPS
    if steps < 1 or steps > (most or steps):
        raise UsageError(f"student.steps is {steps}; a head of kind {config.kind} has 1..{most or 'any'}.")
    weights = tuple(spec.step_weights) or tuple(DECAY**step for step in range(steps))
    if len(weights) != steps or min(weights) < 0 or weights[0] == 0:
        raise UsageError(
            f"student.step_weights are {list(weights)}; expected {steps}, one for each step, none below 0 and the "
            "first above it."
        )
    return weights
