"""One number for each stored entry: sampled dense products and edge softmax."""
