"""What a graph looks like in memory: formats, conversions, checks, what is built once."""
