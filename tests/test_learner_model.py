"""The policy as loaded: fp32, no dropout, no mask, what follows a token never matters; and models it must refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3ForCausalLM

from async_rl.learner import LearnerError
from async_rl.learner.update.model import hf_named_parameters, load_policy

from .learner_cases import CPU, make_config, make_policy

torch.set_num_threads(1)


def score(policy, ids_BL, row=0, start=3, stop=6):
    cols = torch.arange(start - 1, stop - 1)
    return policy(ids_BL, torch.full_like(cols, row), cols, ids_BL[row, start:stop], 1.0)[0]


def saved(hf: PreTrainedModel, folder: Path, max_model_len: int = 24):
    hf.save_pretrained(folder)
    return make_config(model={"path": str(folder), "max_model_len": max_model_len})


def test_what_follows_a_token_and_what_pads_a_row_do_not_change_its_score():
    policy = make_policy()
    torch.manual_seed(0)
    alone = torch.randint(1, 100, (1, 6))
    expected = score(policy, alone)
    for pad in (0, 57):
        padded = torch.cat([torch.full((2, 11), pad), torch.full((2, 3), 99 - pad)], 1)
        padded[1, :6] = alone[0]
        torch.testing.assert_close(score(policy, padded, row=1), expected, atol=1e-5, rtol=1e-5)


def test_a_prompt_token_changes_the_score_of_the_response():
    policy = make_policy()
    ids = torch.arange(1, 7).unsqueeze(0)
    other = ids.clone()
    other[0, 0] = 42
    assert (score(policy, ids) - score(policy, other)).abs().max() > 1e-3


def test_two_passes_of_a_model_with_dropout_agree_and_carry_gradient():
    policy = make_policy(attention_dropout=0.5)
    ids = torch.arange(1, 7).unsqueeze(0)
    first = score(policy, ids)
    assert torch.equal(first, score(policy, ids))
    assert first.requires_grad


def test_no_attention_mask_is_materialised(monkeypatch):
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def look(*args, attn_mask=None, is_causal=False, **kwargs):
        seen.append((attn_mask, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    score(make_policy(), torch.arange(1, 13).reshape(2, 6))
    assert seen == [(None, True)] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_in_fp32_under_its_own_names_tied_weights_once(tmp_path, tied):
    hf = make_policy(tie_word_embeddings=tied).hf
    policy = load_policy(saved(hf.bfloat16(), tmp_path), CPU, None)
    named = hf_named_parameters(policy)
    assert {p.dtype for _, p in named} == {torch.float32}
    names = [name for name, _ in named]
    assert len(names) == len(set(names)) and names[0] == "model.embed_tokens.weight"
    assert ("lm_head.weight" in names) == (not tied)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name].float(), p) for name, p in named)


def test_a_model_with_learned_positions_is_scored_like_its_own_logits(tmp_path):
    torch.manual_seed(0)
    hf = GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=1)
    )
    policy = load_policy(saved(hf, tmp_path), CPU, None)
    ids = torch.arange(1, 7).unsqueeze(0)
    expected = hf.eval()(input_ids=ids).logits[0, 2:5].log_softmax(-1).gather(1, ids[0, 3:6].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(score(policy, ids), expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_bends_its_logits_is_refused_in_one_sentence(tmp_path):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape: dict[str, Any] = {"vocab_size": 100, "num_key_value_heads": 1, "head_dim": 16}
    hf = Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=0.05, **sizes, **shape))
    with pytest.raises(LearnerError, match=r"model.path is .* a Gemma2ForCausalLM whose log-probs come out .* nat off"):
        load_policy(saved(hf, tmp_path), CPU, None)


def test_a_folder_without_model_is_named(tmp_path):
    config = make_config(model={"path": str(tmp_path / "nowhere"), "max_model_len": 24})
    with pytest.raises(LearnerError, match=r"model.path is .*nowhere, where there is no config.json"):
        load_policy(config, CPU, None)


def test_a_model_with_fewer_positions_than_asked_for_is_refused(tmp_path):
    with pytest.raises(LearnerError, match=r"model.max_model_len is 80, but .* knows 64 positions: lower it"):
        load_policy(saved(make_policy().hf, tmp_path, max_model_len=80), CPU, None)
