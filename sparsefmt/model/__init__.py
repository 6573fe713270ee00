"""Functions that change or run a user's torch model: ``optimize``, ``capture``."""
