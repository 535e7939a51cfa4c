"""What judges experience: label oracles, reward functions, verifiers, reward models. No policy updates."""
