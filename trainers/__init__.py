"""Learners, the run directory, checkpoints and the run loop."""
