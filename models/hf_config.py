"""Reading ``config.json`` as transformers 4 and 5 write it: every key is used, known to be harmless, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.config import RopeConfig

# Keys that change nothing a forward pass computes.
HARMLESS = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward cross_attention_hidden_size dtype
    eos_token_id finetuning_task id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id
    model_type name_or_path output_attentions output_hidden_states pad_token_id prefix problem_type
    return_dict sep_token_id task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unsloth_version unsloth_fixed use_cache add_cross_attention decoder_start_token_id
    tie_encoder_decoder pruned_heads
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

    def rope(self, max_positions: int) -> RopeConfig:
        """Return the rotary embedding, from ``rope_parameters`` (5) or ``rope_theta`` and ``rope_scaling`` (4)."""
        theta = self.get("rope_theta", None)
        new, old = self.get("rope_parameters", None), self.get("rope_scaling", None)
        if new is not None and old is not None and dict(new) != dict(old):
            raise ValueError("config.json has both rope_parameters and rope_scaling, and they differ: keep one.")
        fields = dict(new if new is not None else old or {})
        kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
        fields.pop("type", None)
        inner = fields.pop("rope_theta", None)
        if theta is not None and inner is not None and float(theta) != float(inner):
            raise ValueError(f"config.json: rope_theta is {theta} at the top and {inner} in rope_parameters: keep one.")
        if kind not in ROPE_FIELDS:
            raise ValueError(f"rope type {kind!r} is not honoured; known: {', '.join(ROPE_FIELDS)}.")
        partial = fields.pop("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor = {partial} is not honoured; only 1.0 is.")
        self.only("partial_rotary_factor", 1.0)
        fields = {key: value for key, value in fields.items() if value is not None}
        if unknown := sorted(set(fields) - set(ROPE_FIELDS[kind])):
            raise ValueError(f"rope type {kind!r}: {', '.join(unknown)} not honoured.")
        if lacking := [key for key in REQUIRED_ROPE_FIELDS[kind] if key not in fields]:
            raise ValueError(f"rope type {kind!r} needs {', '.join(lacking)}.")
        if kind in ("llama3", "yarn"):
            fields.setdefault("original_max_position_embeddings", max_positions)
        base = next((float(value) for value in (theta, inner) if value is not None), 10000.0)
        return RopeConfig(rope_type=kind, rope_theta=base, **fields)

    def refuse_the_rest(self) -> None:
        """Raise ValueError naming every key that was neither used nor known to be harmless."""
        rest = {k for k, v in self._hf.items() if k not in self._used | HARMLESS | GENERATION and v is not None}
        if rest:
            raise ValueError(f"config.json: option not honoured: {', '.join(sorted(rest))}.")
