"""Complete learners on ClusterEnv's public API, one file per algorithm."""
