"""Holds the bytes: host weights and optimizer state, device copies, stashed inputs, gradients. Knows no plan."""
