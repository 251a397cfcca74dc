"""Asynchronous, decoupled actor-learner reinforcement learning of language models."""

__version__ = "0.1.0"
