"""Scoring from hidden states: the same numbers as the naive way, in a fraction of its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from async_rl.learner.update.logprobs import token_logprobs

torch.set_num_threads(1)


def naive(hidden_RH, weight_VH, targets_R, temperature):
    logp_RV = ((hidden_RH @ weight_VH.T).float() / temperature).log_softmax(-1)
    entropy_R = -(logp_RV.exp() * logp_RV).sum(-1)
    return logp_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1), entropy_R


def inputs(num_tokens=37, hidden=16, vocab=53, dtype=torch.float32):
    torch.manual_seed(1)
    hidden_RH = torch.randn(num_tokens, hidden, dtype=dtype, requires_grad=True)
    weight_VH = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    return hidden_RH, weight_VH, torch.randint(0, vocab, (num_tokens,)), torch.randn(num_tokens)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_values_and_gradients_equal_the_naive_ones(chunk_tokens, temperature):
    hidden, weight, targets, upstream = inputs()
    expected_logp, expected_entropy = naive(hidden, weight, targets, temperature)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, chunk_tokens)
    torch.testing.assert_close(logp, expected_logp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)

    def of(logp, entropy):
        """Of the log-probs alone, of the entropy alone, of both at once."""
        scalars = [(logp * upstream).sum(), (entropy * upstream.flip(0)).sum()]
        return [torch.autograd.grad(s, (hidden, weight), retain_graph=True) for s in (*scalars, scalars[0] - 0.3 * scalars[1])]

    for got, expected in zip(of(logp, entropy), of(expected_logp, expected_entropy), strict=True):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


def test_the_log_softmax_of_bf16_logits_is_taken_in_fp32():
    hidden, weight, targets, _ = inputs(num_tokens=8, hidden=32, vocab=20_000, dtype=torch.bfloat16)
    logits_RV = (hidden @ weight.T).detach()
    expected = logits_RV.float().log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    logp, _ = token_logprobs(hidden, weight, targets, 1.0, 3)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-6)
    logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_temperature_divides_the_logits():
    # logits [1, 0] at T = 0.6: -0.1730, against -0.3133 untempered (BR-023)
    logp, _ = token_logprobs(torch.ones(1, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([0]), 0.6, 4)
    assert logp.item() == pytest.approx(-0.1730, abs=1e-4)


def test_no_token_gives_zero_gradients_not_none():
    hidden, weight, _, _ = inputs(num_tokens=0)
    logp, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, 8)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_impossible_vocabulary_entries_leave_the_entropy_finite():
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[1.0], [0.0], [-1e30]])
    _, entropy = token_logprobs(hidden, weight, torch.tensor([0]), 1.0, 8)
    entropy.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    weight = torch.tensor([[1.0], [0.0], [-torch.inf]])
    logp, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), 1.0, 8)
    assert logp.item() == pytest.approx(-0.31326, abs=1e-4)
    assert entropy.item() == pytest.approx(0.58220, abs=1e-4)


MEMORY = """
import resource, torch
torch.set_num_threads(1)
from async_rl.learner.update.logprobs import token_logprobs
T, V, H = 2048, 50_000, 8
hidden, weight = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
targets = torch.randint(0, V, (T,))
def score(chunk):
    if chunk: return token_logprobs(hidden, weight, targets, 1.0, chunk)[0]
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets.unsqueeze(1))
token_logprobs(hidden[:4], weight, targets[:4], 1.0, 4)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
score(CHUNK).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (T * V * 4))
"""


def peak_share(chunk_tokens: int) -> float:
    code = MEMORY.replace("CHUNK", str(chunk_tokens))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    return float(done.stdout)


def test_peak_memory_is_under_a_quarter_of_the_full_logits():
    assert peak_share(128) < 0.25


@pytest.mark.slow
def test_the_naive_way_needs_more_than_the_full_logits_so_the_measure_can_fail():
    assert peak_share(0) > 1.5
