"""``A @ X`` by sum, mean, max or min, and its gradients."""
