"""Values of entries between the order of a matrix's own data and that of its CSR."""

from typing import Any

from ...formats.arrays import Array, allocating, namespace, on_device_of


def in_csr_order(values: Any, perm: Array | None) -> Any:
    """Move values, or rows of them, from the matrix's order to that of its CSR."""
    if values is None or perm is None:
        return values
    with on_device_of(perm), allocating(f"{values.nbytes} bytes of values in CSR order"):
        return values[perm]


def in_own_order(found: Any, perm: Array | None, out: Array | None = None) -> Any:
    """Write values of the CSR's entries in the matrix's order, to ``out`` or new memory."""
    if perm is None:
        return found
    with on_device_of(perm), allocating(f"{found.nbytes} bytes of values"):
        out = namespace(perm).empty_like(found) if out is None else out
        out[perm] = found
    return out
