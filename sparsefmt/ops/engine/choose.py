"""The former names of ``call`` and ``explain``."""

from .call import call as run  # noqa: F401
from .call import convert_to_csr as convert_to_csr
from .explain import explaining as explaining
from .explain import remark as remark
