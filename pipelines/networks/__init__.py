"""Networks of the learners."""
