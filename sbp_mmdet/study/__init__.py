"""What SBP does to gradients, and to the models that come out of a training."""
