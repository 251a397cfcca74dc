"""What the learner says of itself: metrics, record, samples, the result at the end."""
