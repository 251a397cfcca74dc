"""The one configuration tree: what a user may set, what cannot be right, and how a file becomes a tree.

Imports neither torch, vllm nor transformers: `async-rl check` must answer at once.
"""

from async_rl.config.load import ConfigError, load_config, parse_config
from async_rl.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    config_keys,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "LearnerConfig",
    "ModelConfig",
    "RolloutConfig",
    "config_keys",
    "load_config",
    "parse_config",
]
