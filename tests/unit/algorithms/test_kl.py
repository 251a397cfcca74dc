"""KL estimators, the gradient of each placement by enumeration, controller and gate, and rewards per token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.kl import KL_LOSSES, MAX_K3, KLGate, adaptive_beta, attached_k3, k1, k2, k3, straight_through_k3
from async_rl.algorithms.reinforce import discounted_returns
from async_rl.algorithms.token_rewards import overlong_penalty, terminal_rewards, token_rewards_with_kl

from .estimator_cases import bools, cases, close, columns, f64, ragged, sequence_of

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@cases("kl_estimators")
def test_estimators_are_the_golden_ones(inputs, expected, tol):
    logp, ref, mask = f64([inputs["logp"]]), f64([inputs["logp_ref"]]), bools([1])
    for name, estimator in ESTIMATORS.items():
        close(estimator(logp, ref, mask), [expected[name]], tol)


def slope(p, samples, loss_of) -> torch.Tensor:
    """Gradient by the logits of a softmax policy of the expected loss over `samples`, which do not move with it."""
    logits = p.log().requires_grad_()
    (samples * loss_of(logits.log_softmax(0))).sum().backward()
    assert logits.grad is not None
    return logits.grad


@cases("kl_expected_gradient")
def test_the_expected_gradient_of_each_placement_is_the_golden_one(inputs, expected, tol):
    p, ref, mu = (f64(inputs[key]) for key in ("p", "ref", "behaviour"))
    all3 = bools([1, 1, 1])
    for name, estimator in ESTIMATORS.items():
        close(slope(p, p, lambda logp, f=estimator: f(logp, ref.log(), all3)), expected[f"{name}_in_loss"], tol)
    close(slope(p, mu, lambda logp: k3(logp, ref.log(), all3)), expected["offpolicy_k3_no_is"], tol)
    in_reward = slope(p, p, lambda logp: k1(logp, ref.log(), all3).detach() * logp)
    close(in_reward, expected["k1_in_reward"], tol)
    golden = {"attached_k3": "offpolicy_k3_is_attached", "detached_k2": "offpolicy_k2_is_detached"}
    for name, loss in KL_LOSSES.items():
        got = slope(p, mu, lambda logp, f=loss: f(logp, ref.log(), mu.log(), all3, 100.0))
        close(got, expected["true_reverse_kl_grad"], tol)
        close(got, expected[golden.get(name, "true_reverse_kl_grad")], tol)
    wrong = slope(p, mu, lambda logp: (logp - mu.log()).exp().detach() * k3(logp, ref.log(), all3))
    close(wrong, expected["offpolicy_k3_is_detached"], tol)
    close(wrong, expected["true_forward_kl_grad"], tol)
    for unbiased in (attached_k3, straight_through_k3):
        close((mu * unbiased(p.log(), ref.log(), mu.log(), all3, 100.0)).sum(), (p * (p / ref).log()).sum())


@cases("kl_sequence_gradient")
def test_in_the_reward_a_token_pays_for_the_divergence_that_it_leads_to(inputs, expected, tol):
    p, ref, second = (f64(inputs[key]) for key in ("p_first", "ref_first", "kl_second_given_first"))
    logp = torch.stack([p.log(), second], 1).flatten()  # two trajectories of two tokens; the second pays `second`
    logp_ref = torch.stack([ref.log(), torch.zeros(2, dtype=torch.float64)], 1).flatten()
    mask, sequence = bools([1] * 4), torch.tensor([0, 0, 1, 1])
    rewards = token_rewards_with_kl(f64([0, 0]), logp, logp_ref, mask, sequence, beta=1.0)
    to_go = discounted_returns(rewards, mask, sequence, 2, gamma=1.0)[::2]
    close(slope(p, p, lambda first: -to_go * first), expected["full_sequence"], tol)
    close(slope(p, p, lambda first: k2(first, ref.log(), bools([1, 1]))), expected["token_level_k2_loss"], tol)


@cases("token_rewards_with_kl")
def test_rewards_per_token_are_the_golden_ones(inputs, expected, tol):
    logp, ref, mask = f64(inputs["logp"]), f64(inputs["logp_ref"]), bools(inputs["mask"])
    sequence = torch.zeros(len(mask), dtype=torch.int64)
    close(
        token_rewards_with_kl(f64([inputs["score"]]), logp, ref, mask, sequence, beta=inputs["beta"]), expected["rewards"], tol
    )


@settings(max_examples=100, deadline=None)
@given(ragged)
def test_rewards_per_token_equal_their_plain_loop(rows):
    scores = [1.0 + i if any(t[-1] for t in row) else math.nan for i, row in enumerate(rows)]
    want = []
    for row, score in zip(rows, scores, strict=True):
        last = max((k for k, t in enumerate(row) if t[-1]), default=None)
        want += [(score if k == last else 0.0) - 0.1 * (p - b) if m else 0.0 for k, (_, _, p, b, m) in enumerate(row)]
    _, _, logp, ref, mask = columns(rows, garbage=math.nan)
    got = token_rewards_with_kl(f64(scores), logp, ref, mask, sequence_of(rows), beta=0.1)
    close(got, want)
    close(terminal_rewards(f64(scores), mask, sequence_of(rows)).sum(), sum(s for s in scores if s == s))


@cases("overlong_penalty")
def test_the_soft_overlong_penalty_is_the_golden_one(inputs, expected, tol):
    close(overlong_penalty(torch.tensor(inputs["lengths"]), inputs["max_len"], inputs["cache"]), expected["penalty"], tol)
    for buffer in (0, inputs["max_len"] + 1):
        with pytest.raises(ValueError, match="buffer_tokens"):
            overlong_penalty(torch.tensor([1]), inputs["max_len"], buffer)


def test_estimates_of_far_policies_are_bounded_and_k3_is_never_negative():
    logp, ref, mask = f64([-1000.0, 0.0, -1.0]), f64([0.0, -1000.0, -1.0 - 1e-9]), bools([1, 1, 1])
    got = k3(logp, ref, mask)
    assert got.tolist() == pytest.approx([MAX_K3, MAX_K3, 0.0])
    assert (got >= 0).all()
    assert k1(logp, ref, mask).tolist() == pytest.approx([-20, 20, 1e-9])


@pytest.mark.parametrize("loss", KL_LOSSES.values())
def test_garbage_under_the_mask_changes_no_bit_of_a_kl_loss_or_its_gradient(loss):
    out = []
    for garbage in (0.0, math.nan, math.inf):
        logp = f64([-1, garbage, -3]).requires_grad_()
        ref, behav, mask = f64([-2, garbage, -1]), f64([-1.5, garbage, -3]), bools([1, 0, 1])
        got = loss(logp, ref, behav, mask, 2.0)
        got.sum().backward()
        assert logp.grad is not None
        out.append((got.detach(), logp.grad))
        assert float(got[1].detach()) == float(logp.grad[1]) == 0
    for value, grad in out[1:]:
        assert torch.equal(value, out[0][0])
        assert torch.equal(grad, out[0][1])


def test_the_cap_bounds_the_detached_weights_only():
    logp, ref, behav, mask = f64([-1.0]), f64([-2.0]), f64([-3.0]), bools([1])
    values = {name: float(loss(logp, ref, behav, mask, 2.0)) for name, loss in KL_LOSSES.items()}
    assert values["detached_k2"] == pytest.approx(2.0 * 0.5)
    assert values["straight_through_k3"] == pytest.approx(2.0 * math.exp(-1))
    assert values["attached_k3"] == pytest.approx(math.exp(2) * math.exp(-1))


def test_constants_that_carry_gradient_and_shapes_that_differ_are_refused():
    x, mask = f64([-1.0]), bools([1])
    for loss in KL_LOSSES.values():
        with pytest.raises(ValueError, match="logp_ref carries gradient"):
            loss(x, x.clone().requires_grad_(), x, mask, 2.0)
        with pytest.raises(ValueError, match="logp_behav carries gradient"):
            loss(x, x, x.clone().requires_grad_(), mask, 2.0)
        with pytest.raises(ValueError, match="logp_behav has shape"):
            loss(x, x, f64([1, 2]), mask, 2.0)
    with pytest.raises(ValueError, match="logp_ref has shape"):
        k1(x, f64([1, 2]), mask)


@cases("adaptive_kl")
def test_the_controller_is_the_golden_one(inputs, expected, tol):
    options = {"target": inputs["target"], "horizon": inputs["horizon"], "num_steps": inputs["n_steps"]}
    close([adaptive_beta(inputs["beta"], kl, **options) for kl in inputs["current_kl"]], expected["beta"], tol)
    assert adaptive_beta(inputs["beta"], math.nan, **options) == inputs["beta"]
    assert adaptive_beta(inputs["beta"], math.inf, **options) == pytest.approx(expected["beta"][0])


GATE = {"threshold": 10.0, "patience": 2, "resume_ratio": 0.8}


def states(seq_kls, gate: KLGate, **options) -> list[str]:
    out = []
    for seq_kl in seq_kls:
        gate = gate.step(seq_kl, **options)
        out.append("paused" if gate.paused else "run")
    return out


@cases("kl_gate")
def test_the_gate_pauses_and_resumes_as_the_golden_one(inputs, expected, tol):
    options = {key: inputs[key] for key in GATE}
    assert states(inputs["seq_kl"], KLGate(), **options) == expected["state"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([4.0, 8.0, 9.0, 10.0, 11.0, math.nan]), max_size=12), st.integers(0, 12))
def test_a_gate_that_went_through_a_checkpoint_goes_on_as_it_would_have(seq_kls, at):
    gate = KLGate()
    for seq_kl in seq_kls[:at]:
        gate = gate.step(seq_kl, **GATE)
    again = KLGate(**gate._asdict())
    assert states(seq_kls[:at], KLGate(), **GATE) + states(seq_kls[at:], again, **GATE) == states(seq_kls, KLGate(), **GATE)


def test_a_kl_that_is_not_a_number_is_not_a_good_one():
    assert states([math.nan, math.nan, math.nan, 7.0], KLGate(), **GATE) == ["run", "paused", "paused", "run"]
    assert states([11.0, 10.0, 11.0, 11.0, 8.0, 7.9], KLGate(), **GATE) == ["run", "run", "run", "paused", "paused", "run"]
