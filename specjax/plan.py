"""What a pair needs on each device of a mesh, from shapes alone: no weights are read and nothing is compiled.

Weights, caches and records are counted exactly, by the rules that lay them out. Temporaries are what the largest of the
programs holds besides: estimated from the shapes that XLA cannot do without (``_decode``, ``_insert``).
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
from pathlib import Path

from specjax import cache as kv
from specjax.draft.model import CATCH_UP
from specjax.errors import UsageError
from specjax.generate import capacity_for
from specjax.models.config import DecoderConfig, Leaf
from specjax.models.decoder import DecoderFn
from specjax.placement import Placement, placement
from specjax.prefill import PIECE, bucket
from specjax.sharding import MeshShape

BYTES = {"float32": 4, "bfloat16": 2}
_RECORD = 4 + 1 + 1 + 1  # tokens, place, accepted, drafted: bytes for each position of a row
_LOGPROBS = 4 + 4
_VIEWS = 2  # copies of the records that the host reads, of the chunk that runs and the one before
_FORMS = 3  # of the logits that are alive at once: as they come, as weights and as probabilities


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be run.

    Attributes:
        batch: rows at once.
        cache_length: the most tokens of prompt and output together.
        gamma: K, drafted tokens per round.
        dtype, cache_dtype: of weights and caches.
        sampled: rows sample: the draft's distributions are kept for the rule.
        logprobs: log-probabilities are kept.
        cpu: the devices are CPUs, where XLA widens a bfloat16 embedding to float32 as a whole.
    """

    batch: int = 8
    cache_length: int = 4096
    gamma: int = 4
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    sampled: bool = True
    logprobs: bool = False
    cpu: bool = False


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model's shapes.

    Attributes:
        name: what the user called it.
        config: the decoder.
        leaves: its parameters.
    """

    name: str
    config: DecoderConfig
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on each device; every device needs the same.

    Attributes:
        target, draft: weights.
        target_cache, draft_cache: keys and values.
        records: tokens and what is kept of each.
        temporaries: of the largest program.
    """

    target: int
    draft: int
    target_cache: int
    draft_cache: int
    records: int
    temporaries: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(dataclasses.astuple(self))


def read_shapes(where: str | Path) -> Shapes:
    """Read a model's shapes.

    Args:
        where: a ``config.json`` (or any .json like it), a name in ``configs/plan``, or WHERE as everywhere; only its
            config is read.

    Raises:
        UsageError, CheckpointError: it cannot be read.
    """
    from specjax.checkpoint import inspect_checkpoint
    from specjax.models.registry import family_for

    path = Path(where)
    if str(where) in plan_names():
        text = (importlib.resources.files("specjax.configs") / "plan" / f"{where}.json").read_text()
    elif path.suffix == ".json" and path.is_file():
        text = path.read_text()
    elif (path / "config.json").is_file():
        text = (path / "config.json").read_text()
    else:
        header = inspect_checkpoint(where, progress=True)
        return Shapes(str(where), header.config, tuple(header.family.leaves(header.config)))
    try:
        raw = json.loads(text)
        family = family_for(raw["model_type"])
        config = family.parse(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where}: {error}. Expected the config.json of a model.") from error
    return Shapes(str(where), config, tuple(family.leaves(config)))


def plan_names() -> list[str]:
    """Return the names of the configs that ship for planning."""
    folder = importlib.resources.files("specjax.configs") / "plan"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def meshes(devices: int) -> list[MeshShape]:
    """Return every way to split so many devices."""
    return [MeshShape(devices // ways, ways) for ways in range(1, devices + 1) if devices % ways == 0]


def needs(target: Shapes, draft: Shapes | None, mesh: MeshShape, work: Work) -> Needs:
    """Return what a pair needs on each device.

    Args:
        target: the target.
        draft: the draft model, or None where there is none.
        mesh: how they lie.
        work: what is run.
    """
    big = _Side(target, mesh, work, replicated=False)
    small = None if draft is None else _Side(draft, mesh, work, replicated=mesh.draft == "replicated")
    width = work.gamma + 1
    rows = -(-work.batch // mesh.data)
    capacity = capacity_for(work.cache_length, width)
    draft_capacity = kv.round_up(capacity + CATCH_UP)
    record = _RECORD + (_LOGPROBS if work.logprobs else 0)
    return Needs(
        target=big.weights,
        draft=0 if small is None else small.weights,
        target_cache=rows * capacity * big.cached,
        draft_cache=0 if small is None else rows * draft_capacity * small.cached,
        records=rows * capacity * record * (1 + _VIEWS),
        temporaries=max(_decode(big, small, rows, width), _insert(big, small, work.cache_length))
        + _widened(big, small, work),
    )


def largest_batch(target: Shapes, draft: Shapes | None, mesh: MeshShape, work: Work, hbm: int) -> int:
    """Return the most rows that fit into ``hbm`` bytes of each device, a multiple of ``data``; 0 where none do."""

    def fits(rows: int) -> bool:
        return needs(target, draft, mesh, dataclasses.replace(work, batch=rows * mesh.data)).total <= hbm

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * mesh.data


def notes(target: Shapes, draft: Shapes | None, mesh: MeshShape) -> list[str]:
    """Say what is not split although the mesh would split it."""
    found = [f"target: {note}" for note in _notes(target, placement(DecoderFn(target.config), mesh))]
    if draft is not None and mesh.draft == "sharded":
        found += [f"draft: {note}" for note in _notes(draft, placement(DecoderFn(draft.config), mesh))]
    return found


def _notes(model: Shapes, where: Placement) -> list[str]:
    return where.notes({leaf.path: leaf.shape for leaf in model.leaves})


class _Side:
    """One model's numbers on one device.

    Attributes:
        weights: bytes.
        cached: bytes of one position of one row.
        logits, width: columns of the logits that this device computes, and of the residual stream.
        stream: columns of all that is alive of one token within a layer.
    """

    def __init__(self, model: Shapes, mesh: MeshShape, work: Work, *, replicated: bool):
        where = placement(DecoderFn(model.config), mesh, replicated=replicated)
        config, ways = where.expanded, 1 if replicated else mesh.model
        self.weights = sum(_leaf_bytes(leaf, where, work.dtype) for leaf in model.leaves)

        def split(size: int, count: int | None = None) -> int:
            return size if (size if count is None else count) % ways else size // ways

        heads = split(config.num_kv_heads * config.head_dim, config.num_kv_heads)
        self.cached = 2 * config.num_layers * heads * BYTES[work.cache_dtype]
        self.logits = split(config.vocab_size)
        self.width = config.width
        queries = split(config.num_heads * config.head_dim, config.num_heads)
        self.stream = 4 * config.width + 2 * queries + 3 * split(config.mlp_width)


def _leaf_bytes(leaf: Leaf, where: Placement, dtype: str) -> int:
    shape = where.expanded_shape(leaf.path, leaf.shape)
    parts = where.expanded_spec(leaf.path, shape).parts
    sizes = [size // (1 if axis is None else where.sizes.get(axis, 1)) for size, axis in zip(shape, parts, strict=True)]
    return math.prod(sizes) * (BYTES[dtype] if len(shape) > 1 else 4)


def _decode(target: _Side, draft: _Side | None, rows: int, width: int) -> int:
    """Return the temporaries of a round: logits of the block in a few forms, the draft's q, and activations."""
    logits = _FORMS * rows * width * target.logits
    kept = 0 if draft is None else rows * (width - 1) * target.logits
    return 4 * (logits + kept + rows * width * target.stream)


def _insert(target: _Side, draft: _Side | None, longest: int) -> int:
    """Return what the insertion of the longest prompt takes beside the batch: its row, and a piece's activations."""
    sides = [target] if draft is None else [target, draft]
    return sum(bucket(longest) * side.cached for side in sides) + 4 * PIECE * max(side.stream for side in sides)


def _widened(target: _Side, draft: _Side | None, work: Work) -> int:
    if not work.cpu or work.dtype != "bfloat16":
        return 0
    return sum(4 * side.logits * side.width for side in (target, draft) if side is not None)
