"""The search's plan beside the best one of all."""
