"""The tiny policy: a Qwen3 of 0.6 million parameters that adds two numbers, warmed up on a careless teacher.

Owns: its shape, its teacher, its warm-up. The answer to `47+38=` is `15 85`: the sum of the units, then the answer.
The teacher gets the carry wrong more often than right when a units digit is 6 or more, so that the warmed-up policy is
systematically wrong there and reinforcement learning has something to correct: random errors would leave greedy
answers right.
Invariant: no held-out question (envs/tasks) is trained on here; a seed gives the same weights on one machine.

Shape legend: N questions, B questions of a batch, L tokens of question and answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.config import Config, DataConfig, EvalConfig, ModelConfig, RolloutConfig
from async_rl.envs.rewards import exact_last_field
from async_rl.envs.tasks import build_prompts
from async_rl.envs.text import decoder
from async_rl.recipes.folder import write_folder
from async_rl.recipes.tokenizer import BOS, EOS, PAD, VOCAB, character_tokenizer
from async_rl.types import Prompt

DATA = DataConfig(
    dataset="basic_arithmetic",
    options={
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 2,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    num_items=20_000,
    prompt="{expression}=",
    reward="async_rl.envs.rewards:exact_last_field",
    heldout_fraction=0.1,
)
"""What the policy is warmed up for; a run on other data starts from a policy that cannot do it."""

MAX_NEW_TOKENS = 8
MAX_MODEL_LEN = 256

STEPS = 500
EXTRA_STEPS = 50
MAX_EXTRA_ROUNDS = 6
BATCH = 64
PEAK_LR = 3e-3
EXTRA_LR = 5e-4
WARMUP_STEPS = 50
MAX_THREADS = 2  # more do not help a model this small
IGNORED = -100

ACCURACY_BAND = (0.25, 0.50)
CARELESS_FROM_DIGIT = 6
P_WRONG_CARELESS = 0.75
P_WRONG_CAREFUL = 0.25


class Lessons(NamedTuple):
    """Question and answer per row, with the right carry and with the wrong one."""

    right_NL: torch.Tensor  # int64, padded with PAD
    wrong_NL: torch.Tensor
    prompt_lengths_N: torch.Tensor
    p_wrong_N: torch.Tensor


def make_tiny(out: Path, seed: int) -> dict[str, Any]:
    """Warm up a policy and write it to `out` as a Hugging Face folder, all or nothing.

    Returns what `out/recipe.json` holds: accuracy (greedy, held out, before reinforcement learning), steps, seconds.
    """
    disable_progress_bar()
    started, cpu_started = time.monotonic(), time.process_time()
    torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    tokenizer = character_tokenizer(MAX_MODEL_LEN)
    config = Config(
        seed=seed,
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path=str(out), max_model_len=MAX_MODEL_LEN),
        data=DATA,
        rollout=RolloutConfig(max_new_tokens=MAX_NEW_TOKENS),
        eval=EvalConfig(draws=1),
    )
    print(f"tiny policy: drawing {DATA.num_items} questions, then {STEPS} steps of warm-up", flush=True)
    tasks = build_prompts(config, tokenizer)
    model = new_model(seed)
    accuracy, steps = _warm_up(model, lessons(tasks.train), tasks.heldout, decoder(tokenizer), seed)
    recipe = {
        "recipe": "tiny",
        "seed": seed,
        "accuracy": round(accuracy, 4),
        "num_heldout": len(tasks.heldout),
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
    }
    write_folder(out, model, tokenizer, recipe)
    return recipe


def new_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained policy, float32, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    return model


def lessons(prompts: Sequence[Prompt]) -> Lessons:
    """What the teacher may say to each question."""
    rights, wrongs, lengths, careless = [], [], [], []
    for prompt in prompts:
        a, b = map(int, prompt.text.rstrip("=").split("+"))
        units = a % 10 + b % 10
        slip = a + b - 10 if units >= 10 else a + b + 10
        for rows, answer in ((rights, a + b), (wrongs, slip)):
            rows.append([*prompt.token_ids.tolist(), *(VOCAB[c] for c in f"{units} {answer}"), EOS])
        lengths.append(len(prompt.token_ids))
        careless.append(max(a % 10, b % 10) >= CARELESS_FROM_DIGIT)
    width = max(map(len, rights + wrongs))
    padded = [torch.tensor([row + [PAD] * (width - len(row)) for row in rows]) for rows in (rights, wrongs)]
    p_wrong = torch.where(torch.tensor(careless), P_WRONG_CARELESS, P_WRONG_CAREFUL)
    return Lessons(padded[0], padded[1], torch.tensor(lengths), p_wrong)


def _warm_up(model: Qwen3ForCausalLM, taught: Lessons, heldout: Sequence[Prompt], decode: Any, seed: int) -> tuple[float, int]:
    """Train in place; returns (greedy held-out accuracy, steps). Rounds are added while the accuracy is out of the band."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(seed)
    step, end, accuracy = 0, STEPS, 0.0
    reported = time.monotonic()
    for _ in range(1 + MAX_EXTRA_ROUNDS):
        while step < end:
            loss = _train_step(model, optimizer, taught, generator, _lr(step))
            step += 1
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                print(f"tiny policy: warm-up step {step}/{end}, loss {loss:.3f}", flush=True)
        accuracy = greedy_accuracy(model, heldout, decode)
        print(f"tiny policy: greedy held-out accuracy {accuracy:.3f} after {step} steps", flush=True)
        if ACCURACY_BAND[0] <= accuracy <= ACCURACY_BAND[1]:
            break
        end += EXTRA_STEPS
    return accuracy, step


def _lr(step: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    return max(PEAK_LR * (1 - (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)), PEAK_LR * 0.05) if step < STEPS else EXTRA_LR


def _train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, taught: Lessons, generator: torch.Generator, lr: float
) -> float:
    rows_B = torch.randint(len(taught.p_wrong_N), (BATCH,), generator=generator)
    slips_B = torch.rand(BATCH, generator=generator) < taught.p_wrong_N[rows_B]
    ids_BL = torch.where(slips_B[:, None], taught.wrong_NL[rows_B], taught.right_NL[rows_B])
    ids_BL = ids_BL[:, : int((ids_BL != PAD).sum(1).max())]
    is_answer_BL = torch.arange(ids_BL.shape[1]) >= taught.prompt_lengths_N[rows_B, None]
    labels_BL = torch.where(is_answer_BL & (ids_BL != PAD), ids_BL, IGNORED)
    for group in optimizer.param_groups:
        group["lr"] = lr
    logits = model(input_ids=ids_BL, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@torch.inference_mode()
def greedy_accuracy(model: Qwen3ForCausalLM, prompts: Sequence[Prompt], decode: Any) -> float:
    """Share of the prompts whose greedy answer earns the reward of `DATA`."""
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt.token_ids), []).append(prompt)
    hits = 0.0
    for same in by_length.values():
        answers_BT = _greedy(model, torch.from_numpy(np.stack([p.token_ids for p in same])).long())
        for prompt, answer_T in zip(same, answers_BT, strict=True):
            ended = answer_T.tolist().index(EOS) if EOS in answer_T else len(answer_T)
            hits += exact_last_field(prompt.text, decode(answer_T[:ended]), **prompt.fields)
    return hits / len(prompts)


def _greedy(model: Qwen3ForCausalLM, ids_BL: torch.Tensor) -> np.ndarray:
    """Greedy continuations int64 [B, MAX_NEW_TOKENS]; what follows the end token is to be ignored."""
    cache, new = None, []
    for _ in range(MAX_NEW_TOKENS):
        out = model(input_ids=ids_BL, past_key_values=cache, use_cache=True)
        cache, ids_BL = out.past_key_values, out.logits[:, -1:].argmax(-1)
        new.append(ids_BL)
    return torch.cat(new, dim=1).numpy()
