"""Shapes: validation, presets, and Hugging Face config files."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagen.errors import ShapeError
from megagen.shape import FAMILIES, PRESETS, MoEShape

sizes = st.integers(1, 120).map(lambda n: 128 * n)


@given(hidden=sizes, intermediate=sizes, experts=st.integers(1, 512), top_k=st.integers(1, 32))
def test_valid_sizes_are_kept(hidden, intermediate, experts, top_k):
    top_k = min(top_k, experts)
    shape = MoEShape(hidden, intermediate, experts, top_k)
    assert (shape.hidden, shape.intermediate, shape.experts, shape.top_k) == (
        hidden,
        intermediate,
        experts,
        top_k,
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": 2880}, ["hidden=2880", "128", "2944"]),
        ({"intermediate": 100}, ["intermediate=100", "128"]),
        ({"hidden": 0}, ["hidden=0", "below 1"]),
        ({"intermediate": -128}, ["intermediate=-128"]),
        ({"experts": 0}, ["experts=0"]),
        ({"top_k": 0}, ["top_k=0"]),
        ({"top_k": 33, "experts": 64}, ["top_k=33", "32"]),
        ({"top_k": 9}, ["top_k=9", "experts=8"]),
        ({"hidden": 512.0}, ["hidden=512.0", "float"]),
        ({"experts": True}, ["experts=True", "bool"]),
    ],
)
def test_bad_sizes_are_named(changed, words):
    with pytest.raises(ShapeError) as caught:
        MoEShape(**({"hidden": 512, "intermediate": 512, "experts": 8, "top_k": 2} | changed))
    assert all(word in str(caught.value) for word in words)


def test_shape_is_frozen_and_hashable():
    shape = MoEShape.preset("tiny")
    with pytest.raises(AttributeError):
        shape.hidden = 1024
    assert hash(shape) == hash(MoEShape(512, 512, 8, 2))


@given(experts=st.integers(1, 512), ranks=st.integers(1, 72))
def test_experts_per_rank(experts, ranks):
    shape = MoEShape(128, 128, experts, 1)
    if experts % ranks == 0:
        assert shape.experts_per_rank(ranks) * ranks == experts
    else:
        with pytest.raises(ShapeError, match=rf"experts={experts}.*ranks={ranks}"):
            shape.experts_per_rank(ranks)


def test_zero_ranks_are_refused():
    with pytest.raises(ShapeError, match=r"ranks=0"):
        MoEShape.preset("tiny").experts_per_rank(0)
    with pytest.raises(ShapeError, match=r"ranks=0"):
        MoEShape.preset("flash8", ranks=0)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "gpt-oss-120b"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_presets_have_shapes(name, ranks):
    shape = MoEShape.preset(name, ranks)
    assert shape.experts == PRESETS[name].experts * (ranks if PRESETS[name].per_rank else 1)


def test_per_rank_presets_match_eight_gpus_of_the_full_models():
    assert MoEShape.preset("flash8", ranks=8) == MoEShape.preset("deepseek-v4-flash")
    assert MoEShape.preset("pro8", ranks=8) == MoEShape.preset("deepseek-v4-pro")


def test_gpt_oss_is_known_but_refused_by_size():
    with pytest.raises(ShapeError, match=r"hidden=2880 is not a multiple of 128"):
        MoEShape.preset("gpt-oss-120b")


def test_unknown_preset_lists_the_known():
    with pytest.raises(ShapeError, match=r"gpt-5.*deepseek-v3.*micro"):
        MoEShape.preset("gpt-5")


CONFIGS = {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "hidden_act": "silu",
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_gives_the_preset(name, tmp_path):
    expected = MoEShape.preset(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert MoEShape.from_config(CONFIGS[name]) == expected
    assert MoEShape.from_config(path) == expected
    assert MoEShape.from_config(str(tmp_path)) == expected


def test_nested_text_config_is_followed():
    config = {
        "model_type": "qwen3_vl_moe",
        "text_config": CONFIGS["qwen3-30b-a3b"] | {"model_type": "qwen3_vl_moe_text"},
    }
    assert MoEShape.from_config(config) == MoEShape.preset("qwen3-30b-a3b")


def test_gpt_oss_config_reaches_the_named_size_error():
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "experts_per_token": 4,
    }
    with pytest.raises(ShapeError, match=r"hidden=2880 is not a multiple of 128"):
        MoEShape.from_config(config)


def test_unknown_family_lists_what_was_looked_for():
    with pytest.raises(ShapeError) as caught:
        MoEShape.from_config({"model_type": "llama", "text_config": {"model_type": "llama_text"}})
    message = str(caught.value)
    assert "'llama' > 'llama_text'" in message
    assert all(family in message for family in FAMILIES)


def test_missing_field_lists_its_names():
    config = {k: v for k, v in CONFIGS["mixtral-8x7b"].items() if k != "num_experts_per_tok"}
    with pytest.raises(ShapeError, match=r"top_k.*num_experts_per_tok or experts_per_token"):
        MoEShape.from_config(config)


def test_other_activations_are_refused():
    with pytest.raises(ShapeError, match=r"hidden_act='gelu'"):
        MoEShape.from_config(CONFIGS["mixtral-8x7b"] | {"hidden_act": "gelu"})


@pytest.mark.parametrize("contents", ["{", "[1]", b"\xff\xfe"])
def test_unreadable_config_is_named(contents, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(ShapeError, match=r"config.json"):
        MoEShape.from_config(path)
    with pytest.raises(ShapeError, match=r"absent.json"):
        MoEShape.from_config(tmp_path / "absent.json")


def test_shape_arch_and_routing_do_not_import_torch():
    code = "import sys, megagen.shape, megagen.arch, megagen.routing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
