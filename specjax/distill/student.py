"""What is trained. A kind is one class and one line in ``KINDS``; the loop around it is the same for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import head_ids
from specjax.checkpoint import load_folder, save_folder
from specjax.checkpoint.files import read_json
from specjax.checkpoint.hf import CONFIG
from specjax.distill.config import StudentSpec
from specjax.errors import UsageError
from specjax.models.config import DecoderConfig, Family
from specjax.models.decoder import DecoderFn
from specjax.models.heads import KINDS as HEADS
from specjax.models.registry import family_for
from specjax.pair import Draft, Model, draft_of
from specjax.text import Tokenizer
from specjax.types import ModelOutput, Params

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Base:
    """What a student is made for.

    Attributes:
        target: the teacher; None without one.
        tokenizer, vocab_size, eos_ids, bos_id: of both.
        folder: with tokenizer files to copy.
    """

    target: Model | None
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    folder: Path


class Student(Protocol):
    """A student: pure functions of its parameters, and its way to a folder.

    Attributes:
        ids: int32 [M], ascending, the tokens that it scores; None: all.
        reads: what it reads of the teacher beside logits: None; "final", the stream after the final norm; or N, the
            stream after layer N.
        step_weights: of its own-feature steps in the loss.
    """

    ids: np.ndarray | None
    reads: str | int | None
    step_weights: tuple[float, ...]

    def init(self, key: jax.Array) -> Params:
        """Return parameters to start from, float32."""
        ...

    def masks(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Return for each own-feature step which positions count, float32 [B, T], of a batch's own mask."""
        ...

    def logits(
        self, params: Params, batch: Batch, teacher: ModelOutput | None, teacher_params: Params
    ) -> tuple[jax.Array, ...]:
        """Return for each own-feature step the logits [B, T, M]: at t of the token at t + 1, as the teacher's are."""
        ...

    def draft(self, params: Params, target: Model) -> Draft:
        """Return it as a draft of the target, always of one Drafter, so that nothing is compiled twice."""
        ...

    def save(self, folder: Path, params: Params, card: str) -> None:
        """Write a folder that ``--draft`` reads."""
        ...

    def describe(self) -> str:
        """Return what it is, in one line."""
        ...


def as_packed(batch: Batch) -> kv.Packed:
    """Return which token of a batch belongs to which text."""
    return kv.Packed(segment=batch["segment"], position=batch["position"])


class ModelStudent:
    """A standalone transformer.

    Args:
        hf_config: its ``config.json``, with the vocabulary.
        spec: what was asked.
        base: what it is made for.
        start: parameters to start from; None: fresh ones.
        dtype, remat: of the training step.
    """

    reads = None
    step_weights = (1.0,)

    def __init__(
        self, hf_config: dict[str, Any], spec: StudentSpec, base: Base, start: Params | None, *, dtype: str, remat: bool
    ):
        self.ids: np.ndarray | None = None
        self.hf_config, self._spec, self._base, self._start = hf_config, spec, base, start
        self.family, self.config = parse(hf_config)
        self._fn = DecoderFn(self.config, dtype, remat=remat)
        self._drafter: Any = None

    def init(self, key: jax.Array) -> Params:
        """See ``Student``."""
        params = DecoderFn(self.config).init_params(key) if self._start is None else self._start
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), dict(params))  # copies: steps take the buffers

    def masks(self, batch: Batch) -> tuple[jax.Array, ...]:
        """See ``Student``."""
        return (batch["mask"],)

    def logits(
        self, params: Params, batch: Batch, teacher: ModelOutput | None, teacher_params: Params
    ) -> tuple[jax.Array, ...]:
        """See ``Student``."""
        fn = self._fn
        if self.ids is not None:
            fn, params = head_ids.trim(fn, params, self.ids)
        out = fn(params, batch["tokens"], as_packed(batch))  # type: ignore[arg-type]
        assert out.logits is not None
        return (out.logits[..., : self._base.vocab_size],)

    def model(self, params: Params, dtype: str) -> Model:
        """Return it as a model for the engine."""
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype if leaf.ndim > 1 else jnp.float32), params)
        cache_dtype = "float32" if jax.default_backend() == "cpu" else dtype
        base = self._base
        return Model(
            "student", DecoderFn(self.config, dtype, cache_dtype), weights, base.tokenizer, base.vocab_size,
            self.config.max_positions, base.eos_ids, base.bos_id, dtype,
        )  # fmt: skip

    def draft(self, params: Params, target: Model) -> Draft:
        """See ``Student``."""
        made = draft_of(self.model(params, target.dtype), target, self.ids)
        self._drafter = self._drafter or made.drafter
        return dataclasses.replace(made, drafter=self._drafter)

    def save(self, folder: Path, params: Params, card: str) -> None:
        """See ``Student``."""
        files = {"README.md": card}
        if self.ids is not None:
            files[head_ids.FILE] = head_ids.text(self.ids)
        save_folder(
            folder, self.hf_config, params, self.family, self.config,
            dtype=self._spec.dtype, tokenizer_from=self._base.folder, files=files,
        )  # fmt: skip

    def describe(self) -> str:
        """See ``Student``."""
        c = self.config
        count = sum(int(np.prod(leaf.shape)) for leaf in self.family.leaves(c))
        return (
            f"{self.family.name}, {count:,} parameters: width {c.width}, {c.num_layers} layers, MLP {c.mlp_width}, "
            f"{c.num_heads} heads ({c.num_kv_heads} key-value), vocabulary {c.vocab_size}, context {c.max_positions}"
        )


def parse(hf_config: Mapping[str, Any]) -> tuple[Family, DecoderConfig]:
    """Return family and config of a ``config.json``.

    Raises:
        UsageError: a key is missing, unknown, or not honoured.
    """
    try:
        family = family_for(str(hf_config.get("model_type")))
        return family, family.parse(hf_config)
    except (KeyError, ValueError, TypeError) as error:
        missing = f"lacks the key {error.args[0]!r}." if isinstance(error, KeyError) else error
        raise UsageError(f"student.config: {missing}") from error


def make_model(spec: StudentSpec, base: Base, *, dtype: str, remat: bool) -> ModelStudent:
    """Return a standalone transformer: from scratch, from a folder, or from layers of the target.

    Raises:
        UsageError: not exactly one of them, or one that cannot be had.
    """
    if spec.steps or spec.step_weights:
        raise UsageError("student.steps and student.step_weights are of heads; a model has none.")
    given = [name for name in ("config", "layers", "init") if getattr(spec, name)]
    if len(given) != 1:
        raise UsageError(
            f"student: got {' and '.join(given) or 'none'} of config, layers and init; expected one, to say what a "
            "model starts from."
        )
    start: Params | None = None
    if spec.layers:
        hf_config, start = from_layers(base, spec.layers)
    elif spec.init:
        checkpoint = load_folder(Path(spec.init).expanduser())
        hf_config, start = dict(checkpoint.hf_config), checkpoint.params
    else:
        hf_config = {"vocab_size": base.vocab_size, "bos_token_id": base.bos_id,
                     "eos_token_id": list(base.eos_ids) if len(base.eos_ids) > 1 else next(iter(base.eos_ids), None),
                     **spec.config}  # fmt: skip
        hf_config.setdefault("model_type", "llama")
        if hf_config["model_type"] == "llama":
            hf_config.setdefault("architectures", ["LlamaForCausalLM"])
    student = ModelStudent(hf_config, spec, base, start, dtype=dtype, remat=remat)
    if student.config.vocab_size < base.vocab_size:
        raise UsageError(
            f"The student has {student.config.vocab_size} rows of the vocabulary, the target uses {base.vocab_size} "
            "ids: a draft must have them all."
        )
    return student


def from_layers(base: Base, layers: list[int]) -> tuple[dict[str, Any], Params]:
    """Return the config and parameters of some layers of the target with its embedding, final norm and head.

    Raises:
        UsageError: there is no target, it has no such layer, or its layers differ in a way its config does not list.
    """
    target = base.target
    if target is None or not isinstance(target.fn, DecoderFn):
        raise UsageError("student.layers needs a teacher that is a decoder of ours.")
    config, hf_config = target.fn.config, read_json(base.folder / CONFIG)
    if wrong := [i for i in layers if not 0 <= i < config.num_layers]:
        raise UsageError(f"student.layers has {wrong[0]}; the teacher has layers 0..{config.num_layers - 1}.")
    if config.kinds and len(set(config.kinds)) > 1:
        if "layer_types" not in hf_config:
            raise UsageError("student.layers: the teacher's layers differ and its config does not list their types.")
        hf_config["layer_types"] = [hf_config["layer_types"][i] for i in layers]
    hf_config["num_hidden_layers"] = len(layers)
    params = {name: value for name, value in target.params.items() if not name.startswith("layers_")}
    params |= {f"layers_{new}": target.params[f"layers_{old}"] for new, old in enumerate(layers)}
    return hf_config, params


def make_head(spec: StudentSpec, base: Base, *, dtype: str, remat: bool) -> Student:
    """Return a head; see ``specjax.distill.head_student``.

    Raises:
        UsageError: ``remat`` is asked for, or what that one refuses.
    """
    from specjax.distill.head_student import HeadStudent

    if remat:
        raise UsageError("train.remat is of models: a head is one layer deep.")
    return HeadStudent(spec, base, dtype=dtype)


KINDS: dict[str, Callable[..., Any]] = {"model": make_model, **dict.fromkeys(HEADS, make_head)}


def make_student(spec: StudentSpec, base: Base, *, dtype: str, remat: bool) -> Student:
    """Return the student that a recipe asks for.

    Raises:
        UsageError: an unknown kind, or what that kind refuses.
    """
    if spec.kind not in KINDS:
        raise UsageError(f"student.kind is {spec.kind!r}; known: {', '.join(KINDS)}.")
    return KINDS[spec.kind](spec, base, dtype=dtype, remat=remat)
