"""A draft head's folder: what the training writes and ``--draft`` reads.

``config.json`` (the head's sizes and the target it was made for), ``model.safetensors`` (its own parameters; the
target's embedding and output rows are not among them), ``head_ids.json`` where its output scores a list of ids, and a
card, ``README.md``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from specjax import draft as sources
from specjax import fit, head_ids
from specjax.checkpoint.files import read_json, staged, write_json
from specjax.checkpoint.tensors import DTYPES, SINGLE, TensorStore, write_as_stored
from specjax.errors import CheckpointError, UsageError
from specjax.models.config import DecoderConfig
from specjax.models.decoder import DecoderFn
from specjax.models.heads import NORMS, HeadConfig, HeadFn
from specjax.types import Drafter, Params

if TYPE_CHECKING:
    from specjax.pair import Model

CONFIG, MARK, VERSION, CARD = "config.json", "specjax_head", 1, "README.md"


@dataclasses.dataclass(frozen=True)
class Made:
    """The target that a head was made for.

    Attributes:
        name: what it was called.
        tokenizer: its tokenizer's ``fingerprint``, or None.
    """

    name: str
    tokenizer: str | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as its folder holds it.

    Attributes:
        name: where it was read from.
        config: its sizes.
        target: what it was made for.
        ids: int32 [M], ascending: what its output scores; None: all ids.
        params: its own parameters, NumPy; matrices as stored. Empty where only the config was read.
        dtype: of the matrices as stored.
    """

    name: str
    config: HeadConfig
    target: Made
    ids: np.ndarray | None
    params: Params
    dtype: str

    @property
    def num_params(self) -> int:
        """How many parameters it stores."""
        return sum(int(np.prod(shape)) for shape in self.config.shapes().values())


def is_head(where: str | Path) -> bool:
    """Say whether a place is the folder of a head."""
    path = Path(where).expanduser() / CONFIG
    try:
        return path.is_file() and MARK in json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False


def save_head(
    folder: Path,
    config: HeadConfig,
    params: Params,
    *,
    target: Made,
    card: str,
    ids: Sequence[int] | np.ndarray | None = None,
    dtype: str = "bfloat16",
) -> None:
    """Write a head's folder, whole or not at all.

    Args:
        folder: must not exist.
        config: its sizes; ``num_ids`` is the length of ``ids``.
        params: as ``specjax.models.heads.init`` gives them; an ``output``'s rows in the order of ``ids``.
        target: what it was made for.
        card: the text of README.md.
        ids: ascending, what its output scores; None: all ids.
        dtype: to store matrices in; norms are float32.

    Raises:
        CheckpointError: the folder exists or cannot be written.
        ValueError: sizes, parameters or ids that do not go together.
    """
    listed = None if ids is None else [int(i) for i in ids]
    if problem := config.problem():
        raise ValueError(problem)
    if len(listed or ()) != config.num_ids or (listed is not None and sorted(set(listed)) != listed):
        raise ValueError(f"got {len(listed or ())} ids; expected {config.num_ids}, ascending, each once.")
    shapes = config.shapes()
    if {name: tuple(value.shape) for name, value in params.items()} != shapes:
        raise ValueError(f"parameters are {sorted(params)}; expected {shapes}.")
    kinds = {name: (DTYPES["float32" if name in NORMS else dtype], shape) for name, shape in shapes.items()}
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if name != "kind"}
    made = {name: value for name, value in dataclasses.asdict(target).items() if value is not None}
    with staged(folder) as part:
        write_json(part / CONFIG, {MARK: VERSION, "kind": config.kind, "sizes": sizes, "target": made, "dtype": dtype})
        write_as_stored(part / SINGLE, kinds, ((name, np.asarray(params[name])) for name in shapes))
        if listed is not None:
            (part / head_ids.FILE).write_text(json.dumps({"ids": listed}) + "\n")
        (part / CARD).write_text(card, encoding="utf-8")


def load_head(folder: str | Path, *, weights: bool = True) -> Head:
    """Read a head's folder.

    Args:
        folder: where it is.
        weights: read the parameters, too.

    Raises:
        CheckpointError: something in it is missing, or not what its config says.
    """
    path = Path(folder).expanduser()
    config, target, dtype = _read_config(path / CONFIG)
    ids = head_ids.read(path, config.vocab_size)
    if (0 if ids is None else len(ids)) != config.num_ids:
        got = "no list of ids" if ids is None else f"a list of {len(ids)} ids"
        raise CheckpointError(f"{path} has {got}; its config.json says {config.num_ids}.")
    store, params = TensorStore(path), {}
    for name, shape in config.shapes().items():
        store.check(name, shape)
        if weights:
            params[name] = store.read(name)
    return Head(str(folder), config, target, ids, params, dtype)


def _read_config(path: Path) -> tuple[HeadConfig, Made, str]:
    found = read_json(path)
    if found.get(MARK) != VERSION:
        raise CheckpointError(f"{path}: {MARK} is {found.get(MARK)!r}; this version of specjax reads {VERSION}.")
    try:
        config = HeadConfig(kind=found["kind"], **found["sizes"])
        target, dtype = Made(**found["target"]), found["dtype"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not the config of a head: {error}.") from error
    wrong = [f.name for f in dataclasses.fields(config) if type(getattr(config, f.name)).__name__ not in _types(f)]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} is {getattr(config, wrong[0])!r}; expected {_types_of(wrong[0])}.")
    if problem := config.problem():
        raise CheckpointError(f"{path}: {problem}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    return config, target, dtype


def _types(field: dataclasses.Field) -> tuple[str, ...]:
    return {"Kind": ("str",), "float": ("float", "int")}.get(str(field.type), (str(field.type),))


def _types_of(name: str) -> str:
    return " or ".join(_types(next(f for f in dataclasses.fields(HeadConfig) if f.name == name)))


def compare(target: fit.Side, head: Head) -> fit.Findings:
    """Compare a target and a head: what ``specjax check`` shows, and what every loading asks."""
    return fit.Findings(tuple(_findings(target, head)))


def _findings(target: fit.Side, head: Head) -> Iterator[fit.Finding]:
    config, made = head.config, head.target
    yield fit.Finding("draft", target.name, f"head, {config.kind}", message=f"made for {made.name}")
    ours, theirs = None if target.tokenizer is None else target.tokenizer.fingerprint, made.tokenizer
    values = (ours or "-")[:12], (theirs or "-")[:12]
    if ours and theirs and ours != theirs:
        yield fit.Finding(
            "tokenizer", *values, "error",
            f"Head {head.name} was made for the tokenizer of {made.name} ({values[1]}), target {target.name} has "
            f"another ({values[0]}): a draft must share its target's tokenizer.",
        )  # fmt: skip
    else:
        yield fit.Finding("tokenizer", *values, "ok" if ours and theirs else "note",
                          "the same" if ours and theirs else "none to compare: only the sizes are")  # fmt: skip
    ids = f"{target.vocab_size} of {target.rows}", f"{config.vocab_size}, {config.num_rows} scored"
    if target.vocab_size != config.vocab_size:
        yield fit.Finding(
            "ids in use", *ids, "error",
            f"Head {head.name} was made for {config.vocab_size} ids, target {target.name} uses {target.vocab_size}: a "
            "draft must share its target's vocabulary.",
        )  # fmt: skip
    else:
        yield fit.Finding("ids in use", *ids)
    if target.config is not None:
        yield from _sizes(target, target.config, head)
    yield fit.Finding("weights", target.dtype, head.dtype, "note", "each is loaded in the dtype asked for")


def _sizes(target: fit.Side, config: DecoderConfig, head: Head) -> Iterator[fit.Finding]:
    """Compare the width of the features, and where an early exit stands."""
    widths = str(config.width), str(head.config.width)
    if config.width != head.config.width:
        yield fit.Finding(
            "width", *widths, "error",
            f"Head {head.name} reads features of width {widths[1]}, target {target.name} has {widths[0]}: use it with "
            f"the target it was made for, {head.target.name}.",
        )  # fmt: skip
    else:
        yield fit.Finding("width", *widths)
    if head.config.kind == "early_exit":
        values = f"{config.num_layers} layers", f"exit after {head.config.layers}"
        if head.config.layers >= config.num_layers:
            yield fit.Finding(
                "layers", *values, "error",
                f"Head {head.name} exits after {head.config.layers} layers, target {target.name} has "
                f"{config.num_layers}: expected fewer.",
            )  # fmt: skip
        else:
            yield fit.Finding("layers", *values)
    yield fit.Finding(
        "size", f"{target.num_params} parameters", f"{head.num_params} parameters",
        message=f"the head is {head.num_params / max(target.num_params, 1):.1%} of the target",
    )  # fmt: skip


def head_of(head: Head, target: Model) -> tuple[Drafter, Params]:
    """Return a head as a draft source of a target that it fits, and its parameters.

    Raises:
        UsageError: the target is no decoder of ours, or its layers are stacked and the head exits among them.
    """
    fn, config = target.fn, head.config
    if not isinstance(fn, DecoderFn):
        raise UsageError(f"Head {head.name} needs the embedding of a decoder of ours; target {target.name} is another.")
    embedding = target.params["embedding"]
    output = embedding if fn.config.tied else target.params["head"]
    own = {
        name: jnp.asarray(value, jnp.float32 if name in NORMS else target.dtype) for name, value in head.params.items()
    }
    rows = own["output"] if config.trained_output else output if head.ids is None else output[head.ids]
    params = {
        "head": own,
        "embedding": embedding,
        "output": output,
        "rows": rows,
        "ids": None if head.ids is None else jnp.asarray(head.ids),
    }
    head_fn = HeadFn(config, fn.cache_dtype, fn.config.logit_cap)
    if config.kind == "early_exit":
        if fn.scan_layers:
            raise UsageError(
                f"Head {head.name} runs some layers by themselves, and scan_layers stacks them; leave one."
            )
        return sources.early_exit_drafter(fn, config.layers, target.vocab_size, trained_exit=head_fn.exit), params
    prompt_ids = config.prompt_ids if config.num_ids else 0
    return sources.head_drafter(head_fn, target.vocab_size, prompt_ids=prompt_ids), params
