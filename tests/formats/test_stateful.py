"""One matrix through any sequence of operations, against a multiset of its entries."""

from hypothesis import settings
from matrix_machine import Matrix

TestMatrix = Matrix.TestCase
TestMatrix.settings = settings(stateful_step_count=30)
