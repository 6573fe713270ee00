"""The planner: compositions of layers against each other."""
