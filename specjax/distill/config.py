"""The recipe of a distillation: a TOML file, read into typed values; a key that is not known is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from specjax.errors import UsageError

NONE = "none"  # no teacher: train on text alone
Source = Literal["data", "teacher", "student"]


class TokenizerSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tokenizer to train on the corpus: byte-level BPE.

    Attributes:
        vocab_size: ids, the end-of-text token among them.
        eos: the end-of-text token, which also begins every text.
    """

    vocab_size: int
    eos: str = "<|endoftext|>"


class StudentSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is trained.

    Attributes:
        kind: a name of ``specjax.distill.student.KINDS``.
        config: of a "model" from scratch: keys of its ``config.json``, without the vocabulary. Of a head: sizes of
            ``specjax.models.heads.HeadConfig`` that the target does not say, and ``prompt_ids``.
        layers: of a "model": these layers of the teacher, with its embedding and head, to start from.
        init: a folder to start from, in the place of both.
        head_ids: M, a trimmed output head over the M most frequent tokens of the corpus; 0: all.
        steps: of a head: own-feature steps that are trained, S; 0: as many as its kind wants.
        step_weights: of a head: their weights in the loss; default: 0.8 to the power of 0 .. S - 1.
        dtype: the weights' dtype in the folder that is written.
    """

    kind: str = "model"
    config: dict[str, Any] = {}
    layers: list[int] = []
    init: str = ""
    head_ids: int = 0
    steps: int = 0
    step_weights: list[float] = []
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class MixSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where rows come from, from a point of the run on: shares, which need not sum to 1.

    Attributes:
        start: share of the steps that are over when it begins.
        data: the texts of the file.
        teacher: responses of the teacher, drawn once before training.
        student: responses of the student, drawn again during training (on-policy).
    """

    start: float = 0.0
    data: float = 0.0
    teacher: float = 0.0
    student: float = 0.0


class ResponseSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How responses are drawn by the engine.

    Attributes:
        max_new_tokens: of each.
        temperature: of sampling.
        greedy_share: the share of prompts that are answered greedily.
        batch_size: rows at once.
        limit: prompts that the teacher answers; 0: all.
        redraw: steps between two draws of the student.
        prompts_per_draw: prompts that the student answers in each.
        written: prompts that the teacher writes itself, beside those of the file.
        written_temperature: of those.
        prompt_tokens: the beginning of a text that serves as its prompt, where a row has no prompt of its own.
        seed: of the teacher's draws, apart from the run's, so that runs of several seeds can share them.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    greedy_share: float = 0.0
    batch_size: int = 32
    limit: int = 0
    redraw: int = 100
    prompts_per_draw: int = 128
    written: int = 0
    written_temperature: float = 0.8
    prompt_tokens: int = 16
    seed: int = 0


class LossSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A loss, from a point of the run on.

    Attributes:
        name: of ``specjax.distill.losses.LOSSES``.
        start: share of the steps that are over when it begins.
        beta: of jsd.
        weight: of lk_mix.
        teacher_temperature: divides the teacher's logits.
    """

    name: str = "forward_kl"
    start: float = 0.0
    beta: float = 0.5
    weight: float = 0.5
    teacher_temperature: float = 1.0


class TrainSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The optimiser and the run.

    Attributes:
        steps: of the optimiser.
        epochs: passes over the data after which it ends, if earlier; 0: no such end.
        batch_rows: rows of each step.
        length: T, tokens of a row.
        accumulate: parts that a step's rows are computed in; the result is the same.
        learning_rate: its peak.
        final: learning rate at the end, as a share of the peak.
        warmup: steps.
        betas: of AdamW.
        weight_decay: of matrices.
        clip: of the gradient's global norm; 0: none.
        dtype: of the products; parameters, sums and the optimiser are float32.
        remat: compute layers again in the backward pass, for memory.
        data_shards, model_shards: the mesh.
        seed: of everything random.
        save_every: steps between checkpoints.
        keep: newest checkpoints that are kept, beside the best.
        log_every: steps between lines of metrics.
        tensorboard: write those for TensorBoard too.
    """

    steps: int = 1000
    epochs: int = 0
    batch_rows: int = 8
    length: int = 512
    accumulate: int = 1
    learning_rate: float = 1e-3
    final: float = 0.1
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    data_shards: int = 1
    model_shards: int = 1
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    log_every: int = 10
    tensorboard: bool = False


class ValidationSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Validation on held-out prompts.

    Attributes:
        every: steps between validations, which also save; 0: only at the end.
        share: of the prompts that are held out, chosen by a hash of the prompt.
        prompts: at most so many.
        max_new_tokens: of each.
        gamma: drafted tokens per round.
        speed: at the end measure the speed-up, too.
        repeats: timed runs of that.
    """

    every: int = 200
    share: float = 0.05
    prompts: int = 24
    max_new_tokens: int = 64
    gamma: int = 4
    speed: bool = True
    repeats: int = 3


class CardSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the model card says that the recipe does not tell.

    Attributes:
        title: its heading.
        data: where the texts come from, and under which terms.
        licence: of the weights.
    """

    title: str = ""
    data: str = ""
    licence: str = "not stated"


class Recipe(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Everything that a run needs.

    Attributes:
        teacher: WHERE of the target, or "none": then the loss is cross_entropy, on text alone.
        data: JSON Lines of prompts and texts; a relative path is taken from the working folder.
        output: the run's folder.
        tokenizer: one to train; else the teacher's.
        student, responses, train, validation, card: the parts.
        mix: where rows come from; default: the data.
        loss: which loss; default: forward_kl, or cross_entropy without a teacher.
        teacher_dtype: of the teacher's weights.
        shards: a folder where packed rows are kept for several runs; default: in each run's own.
    """

    teacher: str
    data: str
    output: str = "distilled"
    tokenizer: TokenizerSpec | None = None
    student: StudentSpec = StudentSpec()
    mix: list[MixSpec] = []
    responses: ResponseSpec = ResponseSpec()
    loss: list[LossSpec] = []
    train: TrainSpec = TrainSpec()
    validation: ValidationSpec = ValidationSpec()
    card: CardSpec = CardSpec()
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    shards: str = ""

    @property
    def has_teacher(self) -> bool:
        """Whether there is a target to distil from."""
        return self.teacher != NONE

    @property
    def losses(self) -> list[LossSpec]:
        """The losses in force, by their starts."""
        default = LossSpec() if self.has_teacher else LossSpec("cross_entropy")
        return sorted(self.loss or [default], key=lambda loss: loss.start)

    @property
    def mixes(self) -> list[MixSpec]:
        """The mixes in force, by their starts."""
        return sorted(self.mix or [MixSpec(data=1.0)], key=lambda mix: mix.start)


def read_recipe(path: str | Path, **changes: Any) -> Recipe:
    """Read a recipe, and check what can be checked without data.

    Args:
        path: a TOML file, or the name of a recipe in ``specjax.configs``.
        **changes: fields of ``Recipe`` to replace, None for none. ``data`` of another file name leaves the card's words
            out, since they speak of the recipe's own texts.

    Raises:
        UsageError: it cannot be read, has an unknown key, or asks for what does not go together.
    """
    from specjax.distill.losses import LOSSES

    try:
        recipe = msgspec.toml.decode(_text(path), type=Recipe)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UsageError(f"Recipe {path}: {error}.") from error
    given = {name: value for name, value in changes.items() if value is not None}
    if Path(given.get("data", recipe.data)).name != Path(recipe.data).name:
        given["card"] = CardSpec()
    recipe = msgspec.structs.replace(recipe, **given)
    for problem in _problems(recipe, set(LOSSES)):
        raise UsageError(f"Recipe {path}: {problem}")
    return recipe


def _text(path: str | Path) -> str:
    import importlib.resources

    shipped = importlib.resources.files("specjax.configs") / "distill"
    try:
        if Path(path).suffix != ".toml" and (shipped / f"{path}.toml").is_file():
            return (shipped / f"{path}.toml").read_text()
        return Path(path).read_text()
    except OSError as error:
        names = sorted(item.name.removesuffix(".toml") for item in shipped.iterdir() if item.name.endswith(".toml"))
        raise UsageError(
            f"Recipe {path} cannot be read: {error.strerror}. Give a .toml file, or one of {', '.join(names)}."
        ) from error


def _problems(recipe: Recipe, losses: set[str]):
    """Yield what is wrong, one sentence each."""
    train, student = recipe.train, recipe.student
    least = {"steps": 1, "batch_rows": 1, "length": 2, "accumulate": 1, "save_every": 1, "keep": 1, "log_every": 1,
             "data_shards": 1, "model_shards": 1, "warmup": 0, "epochs": 0}  # fmt: skip
    for name, lowest in least.items():
        if getattr(train, name) < lowest:
            yield f"train.{name} is {getattr(train, name)}; expected at least {lowest}."
    if train.batch_rows % (train.accumulate * train.data_shards):
        yield (
            f"train.batch_rows is {train.batch_rows}; expected a multiple of accumulate {train.accumulate} times "
            f"data_shards {train.data_shards}."
        )
    for loss in recipe.losses:
        if loss.name not in losses:
            yield f"loss {loss.name!r} is not known; known: {', '.join(sorted(losses))}."
        if loss.name != "cross_entropy" and not recipe.has_teacher:
            yield f"loss {loss.name!r} needs a teacher; without one it is cross_entropy."
        if not (0.0 <= loss.beta <= 1.0 and 0.0 <= loss.weight <= 1.0 and loss.teacher_temperature > 0):
            yield f"loss {loss.name!r}: beta and weight lie in 0..1, teacher_temperature above 0."
    for mix in recipe.mixes:
        if min(mix.data, mix.teacher, mix.student) < 0 or mix.data + mix.teacher + mix.student <= 0:
            yield "a mix needs shares of data, teacher or student, none below 0."
        if (mix.teacher or mix.student) and not recipe.has_teacher:
            yield "responses of a teacher or student need a teacher."
    if student.kind != "model" and not recipe.has_teacher:
        yield f"student.kind {student.kind!r} reads its teacher's features; expected a teacher."
    if student.kind != "model" and any(mix.student for mix in recipe.mixes):
        yield "a head writes no texts by itself, its own are the teacher's: leave student out of the mix."
    for name, parts in (("loss", recipe.losses), ("mix", recipe.mixes)):
        if parts[0].start != 0 or any(not 0 <= part.start < 1 for part in parts):
            yield f"the first {name} starts at 0, the others below 1."
    if recipe.has_teacher and recipe.tokenizer is not None:
        yield "a draft shares its teacher's tokenizer: leave out [tokenizer]."
    if not recipe.has_teacher and recipe.tokenizer is None and not student.init:
        yield "without a teacher there is no tokenizer: add [tokenizer], or student.init with one."
    if recipe.tokenizer is not None and recipe.tokenizer.vocab_size < 257:
        yield f"tokenizer.vocab_size is {recipe.tokenizer.vocab_size}; expected at least 257, the bytes and an end."
    if not 0.0 < recipe.validation.share < 1.0:
        yield f"validation.share is {recipe.validation.share}; expected between 0 and 1."
