"""Every golden case of weights, masks and the approximate proximal policy."""

from __future__ import annotations

import torch

from async_rl.algorithms.corrections import CORRECTIONS
from async_rl.algorithms.masks import MASKS, m2po_squares, m2po_threshold, sequence_statistic
from async_rl.algorithms.proximal import prox_logp_loglinear

from .estimator_cases import CASES, cases
from .loss_cases import close, f64, flat, index_of, make_terms

STATISTICS = {"ratio_product": "product", "ratio_geomean": "geomean", "k3_mean": "k3_mean", "ratio_min": "min"}


def ragged_terms(inputs, target):
    sequence = index_of(inputs["mask"])
    adv = f64(inputs["adv_seq"])[sequence] if "adv_seq" in inputs else None
    rows = {"behav": flat(inputs["logp_behav"]), "prox": flat(target), "mask": flat(inputs["mask"])}
    return make_terms(flat(target), adv=adv, sequence=sequence, **rows)


def by_sequence(keep_R, terms):
    return [bool(keep_R[(terms.sequence_R == i) & terms.mask_R].all()) for i in range(terms.num_sequences)]


@cases("is_weights")
def test_weights_of_every_level_and_mode_are_the_golden_ones(inputs, expected, tol):
    terms = ragged_terms(inputs, inputs["logp_target"])
    correction = CORRECTIONS[f"{inputs['level']}_{inputs['mode']}"]
    got = correction(*terms[1:3], *terms[5:], low=inputs["low"], high=inputs["high"])
    close(got, flat(expected["weights"]), tol)


@cases("seq_rejection")
def test_a_sequence_is_kept_or_dropped_as_in_the_golden_case(inputs, expected, tol):
    terms, statistic = ragged_terms(inputs, inputs["logp_target"]), STATISTICS[inputs["stat"]]
    close(sequence_statistic(terms, statistic), expected["value"], tol)
    if statistic == "min":
        keep = MASKS["veto"](terms, threshold=inputs["low"])
    else:
        keep = MASKS[f"sequence_{statistic}"](terms, low=inputs["low"], high=inputs["high"])
    assert by_sequence(keep, terms) == [bool(k) for k in expected["keep"]]


@cases("opsm_mask")
def test_opsm_drops_the_golden_sequences(inputs, expected, tol):
    terms = ragged_terms(inputs, inputs["logp"])._replace(logp_prox_R=torch.zeros(6, dtype=torch.float64))
    keep = MASKS["opsm"](terms, delta=inputs["delta"])
    assert by_sequence(keep, terms) == [bool(k) for k in expected["keep"]]


@cases("m2po_mask")
def test_m2po_drops_the_golden_tokens_in_both_variants(inputs, expected, tol):
    harmful_only = inputs["harmful_only"]
    anchor = {} if not harmful_only else {"prox": [-9.0] * 5}  # the authors' form looks at the current log-probs
    terms = make_terms(inputs["logp"], behav=inputs["logp_behav"], adv=inputs["adv"], mask=inputs["mask"], **anchor)
    squares = m2po_squares(terms.logp_R, *terms[2:4], terms.mask_R, harmful_only=harmful_only)
    close(squares[squares >= 0].mean(), expected["m2"], tol)
    keep = MASKS["m2po" if harmful_only else "m2po_all"](terms, cut=m2po_threshold(squares, tau=inputs["threshold"]))
    assert keep.int().tolist() == expected["keep"]


def test_icepop_keeps_the_tokens_whose_masked_weight_is_positive():
    by_token = [
        c for c in CASES if c["fn"] == "is_weights" and (c["inputs"]["level"], c["inputs"]["mode"]) == ("token", "mask")
    ]
    assert by_token
    for case in by_token:
        inputs, weights = case["inputs"], case["expected"]["weights"]
        keep = MASKS["icepop"](ragged_terms(inputs, inputs["logp_target"]), low=inputs["low"], high=inputs["high"])
        assert keep.tolist() == [w > 0 for w in flat(weights)]


@cases("prox_logp_loglinear")
def test_the_loglinear_proximal_log_probs_are_the_golden_ones(inputs, expected, tol):
    logp, behav, versions = f64(inputs["logp"]), f64(inputs["logp_behav"]), torch.tensor(inputs["v_behav"])
    mask, at = torch.ones(4, dtype=torch.bool), {"prox_version": inputs["v_prox"], "current_version": inputs["v_theta"]}
    close(prox_logp_loglinear(logp.requires_grad_(), behav, versions, mask, **at), expected["logp_prox"], tol)
    mask[0] = False
    logp = torch.where(mask, logp.detach(), torch.nan)
    got = prox_logp_loglinear(logp, behav, versions, mask, **at)
    assert got.tolist() == [0.0, *expected["logp_prox"][1:]]
