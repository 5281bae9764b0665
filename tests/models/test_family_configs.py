"""Each family's config.json: both forms, defaults of transformers, and every option honoured or refused by name."""

from __future__ import annotations

import json
import re

import pytest
from tiny import DATA

from specjax.models.config import Experts, LayerKind, RopeConfig
from specjax.models.registry import FAMILIES, family_for

EXAMPLES = {family.name: family.examples[0] for family in FAMILIES}


def parse(name: str, **changes):
    hf = {key: value for key, value in {**EXAMPLES[name], **changes}.items() if value != "absent"}
    return family_for(hf["model_type"]).parse(hf)


def windows(config) -> list[int | None]:
    return [config.kind(i).window for i in range(config.num_layers)]


REFUSED = {
    "mistral": [
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"max_position_embeddings": "absent"}, "max_position_embeddings"),
    ],
    "qwen2": [
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "no sliding window"),
        ({"max_window_layers": -1}, "max_window_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "'mrope'"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ],
    "qwen3": [({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'")],
    "gemma2": [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ({"query_pre_attn_scalar": "many"}, "query_pre_attn_scalar"),
    ],
    "gemma3": [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "default"}}, "expected a table for each of full_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "both rope_parameters and rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    ],
    "olmo2": [({"clip_qkv": 8.0}, "clip_qkv"), ({"sliding_window": 8}, "sliding_window")],
    "phi3": [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "'longrope'"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "'su'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}}, "0.5 at the top"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
        ({"n_ctx": 32}, "n_ctx = 32"),
        ({"n_embd": 18}, "n_embd 18"),
    ],
    "mixtral": [
        ({"num_experts_per_tok": 6}, "6 of 5 experts"),
        ({"num_local_experts": "absent"}, "num_local_experts"),
        ({"num_experts": 4}, "num_local_experts is 5 and num_experts 4"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
    ],
    "qwen3_moe": [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"shared_expert_intermediate_size": 20}, "shared_expert_intermediate_size"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers"),
        ({"moe_intermediate_size": "absent"}, "moe_intermediate_size"),
    ],
}
CASES = [(name, changes, words) for name, cases in REFUSED.items() for changes, words in cases]


@pytest.mark.parametrize(("name", "changes", "words"), CASES)
def test_what_is_not_honoured_is_refused_by_name(name, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(name, **changes)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_option_that_nobody_knows_is_refused(name):
    with pytest.raises(ValueError, match="novel_option"):
        parse(name, novel_option=1)
    parse(name, novel_option=None)  # null is the same as absent


def test_every_family_but_llama_has_refusals_here():
    assert set(REFUSED) | {"llama"} == set(EXAMPLES)


@pytest.mark.parametrize(("given", "window"), [(5, 5), (None, None), ("absent", 4096)])
def test_the_window_of_mistral(given, window):
    """Null is none; an absent key is what transformers takes it for."""
    assert windows(parse("mistral", sliding_window=given)) == [window] * 2


def test_the_window_of_qwen2_is_on_the_upper_layers():
    assert windows(parse("qwen2")) == [None, 4]
    assert windows(parse("qwen2", max_window_layers=0)) == [4, 4]
    assert windows(parse("qwen2", max_window_layers="absent")) == [None, None]
    assert windows(parse("qwen2", use_sliding_window=False)) == [None, None]
    assert windows(parse("qwen2", layer_types=["sliding_attention", "full_attention"])) == [4, None]


def test_the_windows_of_gemma():
    assert windows(parse("gemma2")) == [5, None]
    assert windows(parse("gemma3")) == [5, 5, None]
    six = parse("gemma3", sliding_window_pattern="absent", num_hidden_layers=7)
    assert windows(six) == [5] * 5 + [None, 5]


def test_gemma3_has_two_bases_in_both_forms():
    old = parse("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = parse(
        "gemma3",
        rope_theta="absent",
        rope_local_base_freq="absent",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )
    assert old == new
    assert [old.rope_of(i).rope_theta for i in range(3)] == [100.0, 100.0, 1000.0]
    assert old.rope == RopeConfig("linear", 1000.0, factor=8.0)
    bare = parse("gemma3", rope_theta="absent", rope_local_base_freq="absent")
    assert [bare.rope_of(i).rope_theta for i in (0, 2)] == [1e4, 1e6]


def test_the_heads_that_families_take_by_default():
    found = {name: parse(name, head_dim="absent").head_dim for name in ("qwen3", "gemma2", "gemma3", "mistral")}
    assert found == {"qwen3": 128, "gemma2": 256, "gemma3": 256, "mistral": 4}


def test_what_is_tied_by_default():
    tied = {name for name in EXAMPLES if parse(name, tie_word_embeddings="absent").tied}
    assert tied == {"gemma2", "gemma3", "gpt2"}


def test_a_cap_of_null_is_none_and_an_absent_one_the_familys():
    assert parse("gemma2", attn_logit_softcapping=None).attention_cap is None
    config = parse("gemma2", attn_logit_softcapping="absent", final_logit_softcapping="absent")
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)


def test_which_layers_of_qwen3_moe_have_experts():
    def sparse(**changes):
        config = parse("qwen3_moe", num_hidden_layers=4, **changes)
        return [config.kind(i).experts is not None for i in range(4)]

    assert sparse(mlp_only_layers=[1]) == [True, False, True, True]
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(mlp_only_layers=[3], decoder_sparse_step=2) == [False, True, False, False]


def test_the_count_of_experts_has_two_names():
    """Transformers 5 calls it num_local_experts in Qwen3-MoE too."""
    assert parse("qwen3_moe") == parse("qwen3_moe", num_experts="absent", num_local_experts=6)
    assert parse("mixtral").kind(1) == LayerKind(window=5, experts=Experts(5, 2, 20, True))


def test_phi3_turns_a_part_of_each_head():
    assert parse("phi3").rope == RopeConfig(partial_rotary_factor=0.75)
    new = parse("phi3", partial_rotary_factor="absent", rope_parameters={"partial_rotary_factor": 0.75})
    assert new == parse("phi3")


@pytest.mark.parametrize("folder", sorted(path.name for path in (DATA / "families").iterdir()))
def test_the_folders_say_which_form_they_have(folder):
    hf = json.loads((DATA / "families" / folder / "config.json").read_text())
    old = folder.endswith("-old")
    assert ("torch_dtype" in hf, "dtype" in hf) == (old, not old)
    assert "rope_parameters" not in hf or not old
