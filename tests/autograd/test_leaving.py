"""Names that leave ``sparsefmt.autograd``: for one release they are there, with a warning."""

import pytest

pytest.importorskip("torch")

from sparsefmt import autograd


def test_names_that_leave_are_there_with_a_warning():
    names = [name for names in autograd._LEAVING.values() for name in names.split()]
    assert not {*names} & {*autograd.__all__}
    for name in names:
        with pytest.warns(DeprecationWarning, match=rf"autograd\.{name} leaves .* import it from"):
            assert getattr(autograd, name) is not None
