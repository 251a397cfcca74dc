"""What outlives the learner: checkpoints, which of them is best, and the folder that is exported from one."""
