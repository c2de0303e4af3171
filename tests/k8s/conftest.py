"""Every combination of base, components and overlays that is checked."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import COMBINATIONS, Manifests, rendered


@pytest.fixture(params=COMBINATIONS, ids=lambda combination: "+".join([combination[0], *combination[1]]))
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """One combination, rendered."""
    base, components = request.param
    return rendered(base, tuple(components))
