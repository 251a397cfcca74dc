"""The data floor: prompts in, books that balance out. Pure: no clock, no I/O; imports numpy and async_rl.types only."""
