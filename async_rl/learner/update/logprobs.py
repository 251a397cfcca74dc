"""Log-probability of the chosen tokens and entropy, from hidden states, in chunks over tokens.

Owns the only place where vocabulary-wide logits exist. Imports torch only. Invariant: at most `chunk_tokens` rows of
logits are alive at once, forward and backward; log-softmax is fp32 whatever the compute dtype (BR-017).

Shape legend: R tokens to score, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden_RH: torch.Tensor, weight_VH: torch.Tensor, targets_R: torch.Tensor, temperature: float, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_R, entropy_R), fp32, in nats, of `softmax(hidden @ weight.T / temperature)` (algorithms.md §0, §6.6).

    Both carry gradients to hidden and weight.
    """
    logp_R, entropy_R = _TokenLogprobs.apply(hidden_RH, weight_VH, targets_R, temperature, chunk_tokens)
    return logp_R, entropy_R


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH, weight_VH, targets_R, temperature: float, chunk_tokens: int):
        num_tokens = len(targets_R)
        logp_R = torch.empty(num_tokens, dtype=torch.float32, device=hidden_RH.device)
        entropy_R, lse_R = torch.empty_like(logp_R), torch.empty_like(logp_R)
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_RH[chunk], weight_VH, temperature)
            lse_R[chunk] = _logsumexp(logits_CV)
            logp_CV = logits_CV.sub_(lse_R[chunk].unsqueeze(1))
            logp_R[chunk] = logp_CV.gather(1, targets_R[chunk].unsqueeze(1)).squeeze(1)
            entropy_R[chunk] = -_expected(logp_CV)
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, lse_R, entropy_R)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None):
        hidden_RH, weight_VH, targets_R, lse_R, entropy_R = ctx.saved_tensors
        grad_R = torch.zeros_like(lse_R) if grad_R is None else grad_R
        grad_hidden_RH = torch.zeros_like(hidden_RH)
        # Chunks are summed in fp32: in bf16 the hundredth chunk would be rounded away.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, len(targets_R), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits_CV = _logits(hidden_RH[chunk], weight_VH, ctx.temperature)
            scale_C1 = (grad_R[chunk] / ctx.temperature).unsqueeze(1)
            logp_CV = logits_CV.sub_(lse_R[chunk].unsqueeze(1))
            bonus_CV = None
            if grad_entropy_R is not None:
                bonus_C1 = (grad_entropy_R[chunk] / ctx.temperature).unsqueeze(1)
                bonus_CV = _entropy_slope(logp_CV, entropy_R[chunk]).mul_(bonus_C1)
            grad_CV = logp_CV.exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, targets_R[chunk].unsqueeze(1), scale_C1)
            if bonus_CV is not None:
                grad_CV += bonus_CV
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_RH[chunk] = grad_CV @ weight_VH
            if weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.T, hidden_RH[chunk])
            else:
                grad_weight_VH += grad_CV.T @ hidden_RH[chunk]
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_CV = (hidden_CH @ weight_VH.T).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _logsumexp(logits_CV: torch.Tensor) -> torch.Tensor:
    top_C1 = logits_CV.amax(1, keepdim=True)
    return (logits_CV - top_C1).exp_().sum(1).log_().add_(top_C1.squeeze(1))


def _entropy_slope(logp_CV: torch.Tensor, entropy_C: torch.Tensor) -> torch.Tensor:
    """dH/dz = -p (log p + H), z the scaled logits."""
    return -(logp_CV.exp() * (logp_CV.clamp(min=-1e30) + entropy_C.unsqueeze(1)))


def _expected(logp_CV: torch.Tensor) -> torch.Tensor:
    probs_CV = logp_CV.exp()
    # A log-prob of -inf (padded vocabulary) has probability 0 and must add 0, not NaN.
    return probs_CV.mul_(logp_CV.clamp_(min=-1e30)).sum(1)
