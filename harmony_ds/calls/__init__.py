"""What one call of a layer is: cut out of its model, run on device copies, and recomputed."""
