"""Reading ``config.json`` as transformers 4 and 5 write it: every key is used, known to be harmless, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specjax.models.config import Experts, LayerKind, RopeConfig

# Keys that change nothing a forward pass computes.
HARMLESS = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size dtype eos_token_id finetuning_task id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id model_type name_or_path output_attentions output_hidden_states
    pad_token_id prefix problem_type return_dict sep_token_id task_specific_params tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unsloth_version unsloth_fixed use_cache
    add_cross_attention decoder_start_token_id tie_encoder_decoder pruned_heads
    """.split()
)
# Generation settings that old versions kept in config.json: the caller decides those.
GENERATION = frozenset(
    """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p tf_legacy_loss
    use_bfloat16
    """.split()
)
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate"
    ).split(),
}
REQUIRED_ROPE_FIELDS = {"linear": ("factor",), "yarn": ("factor",), "llama3": ROPE_FIELDS["llama3"], "default": ()}
ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_MISSING = object()


class Reader:
    """Takes keys out of a config one by one; ``refuse_the_rest`` names what nobody asked for."""

    def __init__(self, hf: Mapping[str, Any]):
        self._hf = dict(hf)
        self._used: set[str] = set()

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Return a value; null counts as absent. Raises ValueError when it is absent and has no default."""
        self._used.add(key)
        value = self._hf.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"config.json lacks {key!r}.")
            return default
        return value

    def positive(self, key: str, default: Any = _MISSING) -> Any:
        """Return a positive int (or the default as it is)."""
        value = self.get(key, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ValueError(f"config.json: {key} is {value!r}; expected a positive integer.")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """Return a float."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"config.json: {key} is {value!r}; expected a number.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} is {value!r}; expected true or false.")
        return value

    def only(self, key: str, honoured: Any, *, ignored: bool = False) -> None:
        """Accept one value of a key, refuse others by name (or accept any, when it only matters in training)."""
        value = self.get(key, honoured)
        if value != honoured and not ignored:
            raise ValueError(f"config.json: {key} = {value!r} is not honoured; only {honoured!r} is.")

    def activation(self, key: str, default: str) -> Literal["silu", "gelu", "gelu_tanh"]:
        """Return the function that an activation's name stands for."""
        name = self.get(key, default)
        if name not in ACTIVATIONS:
            raise ValueError(f"config.json: {key} = {name!r} is not honoured; known: {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[name]

    def window(self, default: int | None) -> int | None:
        """Return ``sliding_window``: null is none, an absent key the family's default."""
        value = self.positive("sliding_window", None)
        return default if value is None and "sliding_window" not in self._hf else value

    def kinds(self, num_layers: int, window: int | None, sliding: list[bool]) -> tuple[LayerKind, ...]:
        """Return a kind per layer, from ``layer_types`` or, where that is absent, from ``sliding``."""
        names = {"sliding_attention": True, "full_attention": False}
        types = self.get("layer_types", None)
        if types is not None:
            if unknown := sorted({str(t) for t in types} - set(names)):
                raise ValueError(
                    f"config.json: layer_types {', '.join(unknown)} not honoured; known: {', '.join(names)}."
                )
            if len(types) != num_layers:
                raise ValueError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers.")
            sliding = [names[t] for t in types]
        if any(sliding) and window is None:
            raise ValueError("config.json: layer_types asks for sliding_attention, but there is no sliding window.")
        return tuple(LayerKind(window=window if slides else None) for slides in sliding)

    def cap(self, key: str, default: float | None) -> float | None:
        """Return a soft cap: null is none, an absent key the family's default."""
        if self.get(key, None) is None:
            return None if key in self._hf else default
        value = self.number(key)
        if value <= 0:
            raise ValueError(f"config.json: {key} is {value}; expected a positive number, or null for none.")
        return value

    def experts(self, width: int, *, normalised: bool) -> Experts:
        """Return the experts; settings of their training are known to be harmless."""
        new, old = (self.positive(key, None) for key in ("num_local_experts", "num_experts"))
        if new is not None and old is not None and new != old:
            raise ValueError(f"config.json: num_local_experts is {new} and num_experts {old}: keep one.")
        count, top = new or old or self.positive("num_local_experts"), self.positive("num_experts_per_tok")
        if top > count:
            raise ValueError(f"config.json: num_experts_per_tok {top} of {count} experts.")
        for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
            self.get(key, None)
        return Experts(count=count, top=top, width=width, normalised=normalised)

    def shape(
        self,
        *,
        head_dim: int | None = None,
        norm_eps: float = 1e-6,
        tied: bool = False,
        max_positions: Any = _MISSING,
    ) -> dict[str, Any]:
        """Return the DecoderConfig fields that most families spell alike: sizes, epsilon, tying.

        Args:
            head_dim: the family's default; None: width by heads.
            norm_eps, tied, max_positions: the family's defaults.
        """
        width = self.positive("hidden_size")
        heads = self.positive("num_attention_heads")
        groups = self.positive("num_key_value_heads", heads)
        size = self.positive("head_dim", None) or head_dim
        if size is None:
            if width % heads:
                raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}: set head_dim.")
            size = width // heads
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}.")
        self.only("attention_dropout", 0.0, ignored=True)
        return {
            "vocab_size": self.positive("vocab_size"),
            "width": width,
            "mlp_width": self.positive("intermediate_size"),
            "num_layers": self.positive("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": groups,
            "head_dim": size,
            "max_positions": self.positive("max_position_embeddings", max_positions),
            "norm_eps": self.number("rms_norm_eps", norm_eps),
            "tied": self.flag("tie_word_embeddings", tied),
        }

    def rope(self, max_positions: int, *, default_theta: float = 10000.0, partial: bool = False) -> RopeConfig:
        """Return the rotary embedding, from ``rope_parameters`` (5) or ``rope_theta`` and ``rope_scaling`` (4).

        Args:
            max_positions: the context length.
            default_theta: the family's base.
            partial: the family honours ``partial_rotary_factor``.
        """
        theta = self.get("rope_theta", None)
        new, old = self.get("rope_parameters", None), self.get("rope_scaling", None)
        if not all(isinstance(table, Mapping) for table in (new or {}, old or {})):
            raise ValueError("config.json: rope_parameters or rope_scaling is not a table.")
        if new is not None and old is not None and dict(new) != dict(old):
            raise ValueError("config.json has both rope_parameters and rope_scaling, and they differ: keep one.")
        fields = dict(new if new is not None else old or {})
        outer, inner = self.get("partial_rotary_factor", None), fields.get("partial_rotary_factor")
        if outer is not None and inner is not None and outer != inner:
            raise ValueError(f"config.json: partial_rotary_factor is {outer} at the top and {inner} inside: keep one.")
        share = fields["partial_rotary_factor"] = next((s for s in (outer, inner) if s is not None), 1.0)
        if share != 1.0 and not partial:
            raise ValueError(f"partial_rotary_factor = {share} is not honoured; only 1.0 is.")
        return rope_from(fields, max_positions, theta=theta, default_theta=default_theta)

    def refuse_the_rest(self) -> None:
        """Raise ValueError naming every key that was neither used nor known to be harmless."""
        rest = {k for k, v in self._hf.items() if k not in self._used | HARMLESS | GENERATION and v is not None}
        if rest:
            raise ValueError(f"config.json: option not honoured: {', '.join(sorted(rest))}.")


def rope_from(
    fields: Mapping[str, Any], max_positions: int, *, theta: float | None = None, default_theta: float = 10000.0
) -> RopeConfig:
    """Read one ``rope_parameters`` table.

    Args:
        fields: the table; ``type`` is an old name of ``rope_type``.
        max_positions: the context length.
        theta: the base that stands outside it, if any.
        default_theta: the base where neither place has one.

    Raises:
        ValueError: a kind or a field that is not honoured, a lacking one, or two bases that differ.
    """
    fields = dict(fields)
    old_kind = fields.pop("type", None)
    kind = fields.pop("rope_type", None) or old_kind or "default"
    inner = fields.pop("rope_theta", None)
    if theta is not None and inner is not None and float(theta) != float(inner):
        raise ValueError(f"config.json: rope_theta is {theta} at the top and {inner} in rope_parameters: keep one.")
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope type {kind!r} is not honoured; known: {', '.join(ROPE_FIELDS)}.")
    share = fields.pop("partial_rotary_factor", 1.0)
    fields = {key: value for key, value in fields.items() if value is not None}
    if unknown := sorted(set(fields) - set(ROPE_FIELDS[kind])):
        raise ValueError(f"rope type {kind!r}: {', '.join(unknown)} not honoured.")
    if lacking := [key for key in REQUIRED_ROPE_FIELDS[kind] if key not in fields]:
        raise ValueError(f"rope type {kind!r} needs {', '.join(lacking)}.")
    if kind in ("llama3", "yarn"):
        fields.setdefault("original_max_position_embeddings", max_positions)
    base = next((float(value) for value in (theta, inner) if value is not None), default_theta)
    return RopeConfig(rope_type=kind, rope_theta=base, partial_rotary_factor=float(share), **fields)
