"""A target and its draft: loaded, compared, and ready for the loop."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import draft as sources
from specjax import fit, head_folder, head_ids
from specjax.checkpoint import Checkpoint, MissingCheckpoint, inspect_checkpoint, load_checkpoint
from specjax.errors import CheckpointError, SpecjaxError, UsageError
from specjax.layout import ONE, Layout, Whole, padded
from specjax.models import scan
from specjax.models.attention import refuse
from specjax.models.decoder import DecoderFn
from specjax.pair_names import MIXED, names_of
from specjax.placement import OnMesh
from specjax.sharding import MeshShape
from specjax.text import Tokenizer, load_tokenizer
from specjax.types import Drafter, ModelFn, Params

DEFAULT_DTYPE = "bfloat16"
DEFAULT_ATTENTION = "chunks"
SPECULATION_ON = "on"
EARLY_EXIT = "early-exit"


class DraftWarning(UserWarning):
    """The draft cannot be used and decoding goes on without it."""


class PairWarning(UserWarning):
    """Target and draft fit, but something works less well than it could."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        name: what the user called it.
        fn, params: the pure function and its parameters.
        tokenizer: None when its folder has none; then only ``prompt_ids`` are served.
        vocab_size: V, the vocabulary in use: the tokenizer's, or every row of the embedding without one.
        max_positions: the context length.
        eos_ids: ids that end a row.
        bos_id: the beginning-of-text id, or None.
        dtype: of the weights.
        num_logits: places of a program's logits, at least V: a mesh may want more, which are -inf.
        digest: of its weights as they were read, where a mesh has them otherwise; else None.
        whole: every shard of a mesh holds all of it.
    """

    name: str
    fn: ModelFn
    params: Params
    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    num_logits: int = 0
    digest: str | None = None
    whole: bool = False

    def __post_init__(self):
        object.__setattr__(self, "num_logits", self.num_logits or self.vocab_size)

    @property
    def program_fn(self) -> ModelFn:
        """The function as programs take it, with ``num_logits`` logits."""
        return padded(self.fn, self.vocab_size, self.num_logits)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft source with its parameters.

    Attributes:
        name: "none", "ngram", "early-exit:N", what the user called the model, or "mixed:" and that.
        drafter, params: the pure functions and their parameters.
        speculation: "on", or "off: reason".
        digest: as in ``Model``.
    """

    name: str
    drafter: Drafter
    params: Params
    speculation: str = SPECULATION_ON
    digest: str | None = None

    @property
    def kind(self) -> str:
        """Its name without where a model is from: "none", "ngram", "early-exit:N", "model" or "mixed"."""
        if self.name.startswith(MIXED):
            return MIXED.rstrip(":")
        return self.name if model_in(self.name) is None else "model"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target with a draft that fits it.

    Attributes:
        target, draft: the two.
        gamma: the pair's own draft length, or None.
        layout: the devices it is on.
        notes: what of it is not split although the mesh would split it.
    """

    target: Model
    draft: Draft
    gamma: int | None = None
    layout: Layout = ONE
    notes: tuple[str, ...] = ()


def no_draft(reason: str = "no draft") -> Draft:
    """Return the draft that never drafts: plain decoding."""
    return Draft("none", sources.no_drafter(), {}, f"off: {reason}")


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    pair: str | Path | None = None,
    dtype: str = DEFAULT_DTYPE,
    attention: str = DEFAULT_ATTENTION,
    scan_layers: bool = False,
    require_draft: bool = False,
    progress: bool = False,
    mesh: str | MeshShape | None = None,
) -> Pair:
    """Load a target and its draft.

    Args:
        target: where the target is: a folder in Hugging Face layout, a .gguf file, a known name, or a hub id.
        draft: the same, the folder of a head (``specjax.head_folder``), or "ngram", "early-exit:N", "mixed:WHERE"
            (n-gram, else that model or head), or "none". Default: the pair's, else "ngram".
        pair: the name of a pair in ``specjax.configs``, or a .toml file like those; excludes ``target``. With neither,
            the default pair.
        dtype: of the weights, "bfloat16" or "float32"; accumulation is float32 in both.
        attention: how attention is computed, a name of ``specjax.models.attention.ATTENTION``.
        scan_layers: run alike layers in a loop: compile time does not grow with depth, steps on a CPU are slower.
        require_draft: raise when the draft cannot be used, instead of warning and decoding without it.
        progress: show downloads and conversions on standard error.
        mesh: split both over all devices, as "data=4,model=2" says: rows over ``data``, layers and vocabulary over
            ``model``; ",draft=sharded" splits a draft model too, which is else whole on every shard. None: one device.

    Raises:
        UsageError: an unknown name, both target and pair, tokenizers that differ, an attention that the model or
            the backend cannot have, or a mesh that is not of so many devices.
        CheckpointError: the target cannot be read (or the draft, under ``require_draft``).

    Example:
        pair = specjax.load(target="smollm2-135m", draft="ngram", dtype="float32")
    """
    names = names_of(target, draft, pair)
    form: dict[str, Any] = {"dtype": dtype, "attention": attention, "scan_layers": scan_layers, "progress": progress}
    if mesh is None:
        model = load_model(names.target, **form)
        return Pair(model, _load_draft(names.draft, model, require_draft, form), names.gamma)
    there = OnMesh.of(mesh)
    model = load_model(names.target, **form, there=there)
    found = _load_draft(names.draft, model, require_draft, {**form, "there": there.for_draft()})
    return Pair(model, found, names.gamma, there.layout, tuple(dict.fromkeys(there.notes)))


def model_in(draft: str) -> str | None:
    """Return where the model of a draft is, or None for a draft without a model of its own.

    Raises:
        UsageError: early-exit without a number of layers, or mixed without a model.
    """
    if draft in ("ngram", "none") or _exit_layers(draft) is not None:
        return None
    where = draft.removeprefix(MIXED)
    if draft != where and (not where or model_in(where) is None):
        raise UsageError(f"Draft {draft!r} names no model; expected mixed:WHERE.")
    return where


def _exit_layers(draft: str) -> int | None:
    """Return N of "early-exit:N", or None for another draft."""
    name, _, layers = draft.partition(":")
    if name != EARLY_EXIT:
        return None
    if not (layers.isdecimal() and int(layers) > 0):
        raise UsageError(f"Draft {draft!r}: expected early-exit:N, N being the number of layers to draft with.")
    return int(layers)


def load_model(
    where: str | Path,
    *,
    dtype: str = DEFAULT_DTYPE,
    attention: str = DEFAULT_ATTENTION,
    scan_layers: bool = False,
    progress: bool = False,
    there: OnMesh | None = None,
) -> Model:
    """Load one model with its tokenizer; arguments as in ``load``, ``there`` being the mesh.

    Raises:
        UsageError: an unknown name or dtype, or an attention that cannot be had.
        CheckpointError: it cannot be read.
    """
    checkpoint = _read(where, dtype, progress, there)
    return model_of(checkpoint, load_tokenizer(checkpoint.folder), dtype, attention, scan_layers, there)


def _read(where: str | Path, dtype: str, progress: bool, there: OnMesh | None) -> Checkpoint:
    if there is None:
        return load_checkpoint(where, dtype=dtype, progress=progress)
    sharding = there.shardings(inspect_checkpoint(where, progress=progress).config)
    return load_checkpoint(where, dtype=dtype, progress=progress, sharding=sharding)


def model_of(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    dtype: str,
    attention: str = DEFAULT_ATTENTION,
    scan_layers: bool = False,
    there: OnMesh | None = None,
) -> Model:
    """Return a checkpoint as a Model.

    Raises:
        UsageError: the model, or this backend, cannot have that attention.
        CheckpointError: the tokenizer has ids that the model has no embedding for.
    """
    rows = checkpoint.config.vocab_size
    fit.refuse_too_many_ids(checkpoint.name, tokenizer, rows)
    if reason := refuse(attention, checkpoint.config, jax.default_backend()):
        raise UsageError(f"{checkpoint.name}: {reason}")
    # bfloat16 buffers are rewritten whole at each step by the CPU backend of jax < 0.11.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else dtype
    model = Model(
        name=checkpoint.name,
        fn=DecoderFn(checkpoint.config, dtype, cache_dtype, attention, scan_layers),
        params=checkpoint.params,
        tokenizer=tokenizer,
        vocab_size=rows if tokenizer is None else tokenizer.vocab_size,
        max_positions=checkpoint.config.max_positions,
        eos_ids=checkpoint.eos_ids,
        bos_id=checkpoint.bos_id,
        dtype=dtype,
    )
    if there is not None:
        model = dataclasses.replace(model, **there.spread(model.fn, model.params, model.vocab_size))
    if scan_layers:
        model = dataclasses.replace(model, params=scan.stack(checkpoint.config, model.params))
    return model


def _load_draft(name: str, target: Model, require: bool, form: dict[str, Any]) -> Draft:
    where, layers = model_in(name), _exit_layers(name)
    if layers is not None:
        return early_exit_of(target, layers)
    if name == "none":
        return no_draft()
    if where is None:
        return Draft("ngram", sources.ngram_drafter(), {})
    if head_folder.is_head(where):
        if "there" in form:
            raise UsageError(f"Draft {where} is a head, and heads do not run on a mesh yet: give another draft.")
        return _load_head(name, where, target, require)
    try:
        there = form.get("there")
        checkpoint = _read(where, form["dtype"], form["progress"], there)
        tokenizer = load_tokenizer(checkpoint.folder)
        model = model_of(checkpoint, tokenizer, form["dtype"], form["attention"], form["scan_layers"], there)
        ids = head_ids.read(checkpoint.folder, model.vocab_size)
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        missing = isinstance(error, MissingCheckpoint)
        return unusable(where, f"{'missing' if missing else 'cannot be loaded'}: {first_line(error)}", require)
    draft = draft_of(model, target, ids)
    if name.startswith(MIXED):
        return dataclasses.replace(draft, name=MIXED + draft.name, drafter=sources.mixed_drafter(draft.drafter))
    return draft


def _load_head(name: str, where: str, target: Model, require: bool) -> Draft:
    try:
        head = head_folder.load_head(where)
    except (CheckpointError, MemoryError) as error:
        return unusable(where, f"cannot be loaded: {first_line(error)}", require)
    if misfits := head_folder.compare(side_of(target), head).errors:
        raise UsageError(" ".join(misfits))
    drafter, params = head_folder.head_of(head, target)
    if not name.startswith(MIXED):
        return Draft(head.name, drafter, params)
    if drafter.on_target:
        raise UsageError(f"Draft {name!r}: an early exit cannot be mixed; expected mixed:WHERE with another draft.")
    return Draft(MIXED + head.name, sources.mixed_drafter(drafter), params)


def draft_of(model: Model, target: Model, ids: np.ndarray | None = None) -> Draft:
    """Return a model as the draft of a target; with ``ids`` its head scores those tokens alone.

    Raises:
        UsageError: the two do not fit: other tokenizers, or (where there is none to compare) other sizes.
    """
    found = fit.compare(side_of(target), side_of(model))
    if found.errors:
        raise UsageError(" ".join(found.errors))
    for message in found.warnings:
        warnings.warn(message, PairWarning, stacklevel=2)
    context = model.max_positions if model.max_positions < target.max_positions else None
    fn, params = model.fn, model.params
    if ids is not None:
        assert isinstance(fn, DecoderFn)
        ids = ids[ids < target.vocab_size]
        cut, cut_params = head_ids.trim(fn, params, ids)
        fn, params = sources.TrimmedFn(cut, target.vocab_size), {"model": cut_params, "ids": ids}
    fn = padded(Whole(fn) if model.whole else fn, target.vocab_size, target.num_logits)
    return Draft(model.name, sources.model_drafter(fn, target.num_logits, context), params, digest=model.digest)


def early_exit_of(target: Model, layers: int) -> Draft:
    """Return the first layers of a target as its draft.

    Raises:
        UsageError: it has not more layers than that, or they are stacked.
    """
    fn = target.fn
    if isinstance(fn, DecoderFn) and fn.scan_layers:
        raise UsageError(
            f"{EARLY_EXIT}:{layers} runs some layers by themselves, and scan_layers stacks them; leave one."
        )
    total = fn.config.num_layers if isinstance(fn, DecoderFn) else None
    if total is not None and layers >= total:
        raise UsageError(f"early-exit:{layers}: {target.name} has {total} layers; expected 1..{total - 1}.")
    drafter = sources.early_exit_drafter(target.program_fn, layers, target.num_logits)
    return Draft(f"{EARLY_EXIT}:{layers}", drafter, {})


def side_of(model: Model) -> fit.Side:
    """Return what is compared of a loaded model."""
    config = model.fn.config if isinstance(model.fn, DecoderFn) else None
    return fit.Side(
        name=model.name,
        tokenizer=model.tokenizer,
        rows=model.vocab_size if config is None else config.vocab_size,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        eos_ids=model.eos_ids,
        bos_id=model.bos_id,
        dtype=model.dtype,
        num_params=sum(int(leaf.size) for leaf in jax.tree.leaves(model.params)),
        config=config,
    )


def unusable(where: object, reason: str, require: bool) -> Draft:
    """Warn that the draft cannot be used and return no draft; raise under ``require``.

    Raises:
        CheckpointError: ``require`` is set.
    """
    if require:
        raise CheckpointError(f"Draft {where} {reason} A draft is required (--require-draft).")
    warnings.warn(f"Draft {where} {reason} Decoding goes on without a draft.", DraftWarning, stacklevel=2)
    return no_draft(f"draft {reason}")


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its type where it has none."""
    if isinstance(error, SpecjaxError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{lines[0] if lines else type(error).__name__}."
