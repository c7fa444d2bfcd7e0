"""The bytes of training: weights on the host, their copies on the device, stashed inputs, gradients. Knows no plan."""
