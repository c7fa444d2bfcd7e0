"""One thread: the models are tiny, and torch's threads wait for each other by spinning, thirty times longer when other
programs run."""

import torch

torch.set_num_threads(1)
