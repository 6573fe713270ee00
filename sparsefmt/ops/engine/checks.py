"""The former names of checks of words, numbers and results."""

from .bind import count_of_features as count_of_features
from .bind import flag as flag
from .bind import output as output
from .bind import same_dtype as same_dtype
from .bind import structure as structure
from .bind import word as word
