"""A weight's way from the learner's parameters into running engines."""
