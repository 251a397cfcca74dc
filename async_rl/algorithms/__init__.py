"""The maths of the policy update: advantages, corrections, losses, aggregation, schedules, filters, diagnostics.

Pure functions on tensors (numpy where the input is a Group): no clock, no I/O, no process group, no model.
Each family is a registry, `dict[str, function]`, keyed by the name a config uses; adding a method is adding an entry.

Shape legend: N trajectories, R response tokens (flat, trajectory after trajectory), G siblings of one group.
Invariant: what stands at a masked position, be it NaN or infinity, changes neither a value nor a gradient.
Each docstring gives its paper id; worked numbers are in tests/golden/algorithms.json.
"""
