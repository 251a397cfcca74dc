"""The learner: consumes groups, computes updates on every rank, publishes weights. Never imports vllm."""


class LearnerError(Exception):
    """Something the learner cannot work with (model, checkpoint, process groups); one sentence for the user."""
