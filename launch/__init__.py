"""Where commands start: Hydra composition, checks before the work, exit codes. No formulas."""
