"""Complete learners built on ClusterEnv alone; one file tells one algorithm."""
