"""``Collector``: trajectories from shards that act by themselves."""
