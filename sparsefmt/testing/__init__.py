"""Hypothesis strategies for sparse matrices and features, and oracles of results."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from ..formats.oracle import assert_close as assert_close
    from ..formats.oracle import assert_same_matrix as assert_same_matrix
    from ..formats.oracle import dot as dot
    from ..formats.oracle import stored_entries as stored_entries
    from ..ops.edges.oracle import edge_softmax_bound as edge_softmax_bound
    from ..ops.edges.oracle import edge_softmax_oracle as edge_softmax_oracle
    from ..ops.edges.oracle import sddmm_bound as sddmm_bound
    from ..ops.edges.oracle import sddmm_oracle as sddmm_oracle
    from ..ops.matmul.oracle import dot_bound as dot_bound
    from ..ops.matmul.oracle import error_bound as error_bound
    from ..ops.matmul.oracle import spmm_oracle as spmm_oracle
    from .strategies import cbsr as cbsr
    from .strategies import coo as coo
    from .strategies import csc as csc
    from .strategies import csr as csr
    from .strategies import feature_widths as feature_widths
    from .strategies import features as features
    from .strategies import graphs as graphs
    from .strategies import index_dtypes as index_dtypes
    from .strategies import sgt as sgt
    from .strategies import value_dtypes as value_dtypes

#: Module -> the public names that it defines; resolved on first use (PEP 562), since hypothesis
#: imports this package when it looks for the plug-in.
_MODULES = {
    "strategies": "coo csr csc sgt cbsr graphs features feature_widths index_dtypes value_dtypes",
    ".formats.oracle": "assert_close assert_same_matrix dot stored_entries",
    ".ops.matmul.oracle": "dot_bound error_bound spmm_oracle",
    ".ops.edges.oracle": "edge_softmax_bound edge_softmax_oracle sddmm_bound sddmm_oracle",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
