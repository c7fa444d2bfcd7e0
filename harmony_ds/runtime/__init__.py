"""Executes plans: lanes, layer calls, the executor, losses that are not computed yet."""
