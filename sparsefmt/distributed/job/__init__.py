"""A training run over several processes: start, train, watch, save, resume."""
