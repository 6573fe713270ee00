"""ES-SpMM: products with a sample of each row."""
