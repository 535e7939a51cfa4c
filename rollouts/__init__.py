"""Experience: trajectories, the policies that act, the loop that collects. No rewards, no losses."""
