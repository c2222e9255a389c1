"""How the engine configures the OpenMP library of torch."""

from __future__ import annotations

import pytest

from conure.engine.runner.openmp import NUM_SPINS, limit_spinning


def test_spinning_is_limited() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    limit_spinning(environment)
    assert environment == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": str(NUM_SPINS)}


@pytest.mark.parametrize("configured", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_environment_takes_precedence(configured: dict[str, str]) -> None:
    environment = dict(configured)
    limit_spinning(environment)
    assert environment == configured
