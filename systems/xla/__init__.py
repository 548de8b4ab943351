"""XLA by way of torch.export, torchax and JAX: the papers' TensorFlow XLA, for modules of PyTorch."""
