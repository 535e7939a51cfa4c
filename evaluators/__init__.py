"""Evaluation: a checkpoint in, a report out. No training loops."""
