"""Cases of a parametrised test that a quick run leaves out."""

import pytest


def slow(*values, id: str | None = None):
    """A case that only `-m slow` runs: another one of the same test, which is quick, finds most faults."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
