"""Layer calls: intercepted in their model, run on device copies of parameters, and recomputed in backward."""
