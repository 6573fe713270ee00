"""What every room of operations shares: the choice of a kernel, checks, compilation."""
