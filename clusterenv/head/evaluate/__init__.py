"""``Evaluator``: episodes of published versions, beside training."""
