"""``ClusterEnv``: Gymnasium's vector API over a fleet of shards."""
