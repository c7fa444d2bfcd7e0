"""How a plan is run: the executor, and what it holds while it does."""
