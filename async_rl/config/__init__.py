"""The one configuration tree: what a user may set, what cannot be right, and how a file becomes a tree.

Imports neither torch, vllm nor transformers: `async-rl check` must answer at once.
"""

from async_rl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from async_rl.config.load import ConfigError, load_config, parse_config, preset, preset_names
from async_rl.config.schema import (
    Config,
    DataConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    TransportConfig,
    config_keys,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "KLConfig",
    "LearnerConfig",
    "ModelConfig",
    "RolloutConfig",
    "TransportConfig",
    "config_keys",
    "load_config",
    "parse_config",
    "preset",
    "preset_names",
]
