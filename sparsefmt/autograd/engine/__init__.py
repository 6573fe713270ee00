"""The bridge from torch to the table of operations: library ops, memory, checks."""
