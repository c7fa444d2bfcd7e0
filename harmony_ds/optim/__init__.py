"""The optimizers that update weights, on the host, on the device or on disk, and the thread that runs them."""
