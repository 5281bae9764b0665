"""Reading config.json: both forms of rotary settings, and every option used, harmless or refused by name."""

from __future__ import annotations

import json
import re

import pytest
from tiny import DATA

from specjax.models import llama
from specjax.models.config import RopeConfig

BASE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def parse(**changes):
    return llama.parse({key: value for key, value in {**BASE, **changes}.items() if value != "absent"})


def test_defaults_are_those_of_transformers():
    config = parse()
    assert config.num_kv_heads == 4
    assert config.head_dim == 4
    assert config.norm_eps == 1e-6
    assert not config.tied
    assert [config.qkv_bias, config.out_bias, config.mlp_bias] == [False] * 3
    assert config.rope == RopeConfig("default", 10000.0)


def test_a_head_size_of_its_own_is_used():
    """Case 69: N * H need not equal D."""
    config = parse(head_dim=32, hidden_size=64)
    assert (config.width, config.num_heads * config.head_dim) == (64, 128)
    assert {leaf.path[-2]: leaf.shape for leaf in llama.leaves(config) if leaf.path[1:2] == ("attention",)} == {
        "q": (128, 64),
        "k": (128, 64),
        "v": (128, 64),
        "out": (64, 128),
    }


def test_the_base_may_stand_inside_rope_parameters_alone():
    """Case 61: transformers 5 writes it only there."""
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.rope_theta == 5e5


def test_the_base_at_the_top_and_an_old_scaling():
    rope = parse(rope_theta=2e4, rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert rope == RopeConfig("linear", 2e4, factor=2.0)


def test_both_places_may_agree():
    assert parse(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 500000}).rope.rope_theta == 5e5


@pytest.mark.parametrize("changes", [{"rope_theta": None}, {"rope_scaling": None}, {"rope_parameters": None}])
def test_null_counts_as_absent(changes):
    assert parse(**changes).rope == RopeConfig()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
REFUSED = {
    "two bases": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 at the top and 500000.0"),
    "two scalings": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "both rope_parameters and rope_scaling",
    ),
    "unknown kind": ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "unknown rope field": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
    "lacking rope field": ({"rope_scaling": {**LLAMA3, "factor": None}}, "needs factor"),
    "lacking factor": ({"rope_scaling": {"type": "linear"}}, "needs factor"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotary inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "unknown option": ({"sliding_window": 8}, "sliding_window"),
    "another unknown option": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "missing key": ({"hidden_size": "absent"}, "hidden_size"),
    "not a number": ({"vocab_size": "many"}, "vocab_size"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "a flag as a number": ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "heads and groups": ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    "heads and width": ({"hidden_size": 18}, "hidden_size 18"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(fault):
    changes, words = REFUSED[fault]
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(**changes)


def test_llama3_and_yarn_fields_arrive():
    rope = parse(rope_scaling=LLAMA3, rope_theta=5e5).rope
    assert rope == RopeConfig("llama3", 5e5, 8.0, 8192, 1.0, 4.0)
    yarn = parse(rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "rope_theta": 1e6}).rope
    assert yarn == RopeConfig("yarn", 1e6, 4.0, 64, beta_fast=16)


def test_options_that_matter_in_training_or_for_the_caller_are_accepted():
    parse(
        attention_dropout=0.1, pretraining_tp=2, use_cache=False, temperature=0.3, torch_dtype="float16", bos_token_id=1
    )


@pytest.mark.parametrize("name", ["llama-gqa-tied", "llama-8-heads", "llama3-rope-untied", "llama-bf16-sharded"])
def test_the_fixtures_configs_parse(name):
    hf = json.loads((DATA / name / "config.json").read_text())
    config = llama.parse(hf)
    assert config.vocab_size == hf["vocab_size"]
    assert config.tied == hf["tie_word_embeddings"]
