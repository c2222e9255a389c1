"""Queues under every policy, and under our own."""

from __future__ import annotations

import pytest

from conure.server.scheduling.policy import POLICIES, Policy
from conure.server.scheduling.scheduler import Scheduler

from .desks import Desk


@pytest.fixture(params=POLICIES.values(), ids=lambda policy: policy.name)
def policy(request: pytest.FixtureRequest) -> Policy:
    """Every policy."""
    found: Policy = request.param
    return found


@pytest.fixture
def desk(policy: Policy) -> Desk:
    """A queue under every policy: what is tested with this holds under all of them."""
    return Desk(Scheduler(policy))


@pytest.fixture
def conure() -> Desk:
    """A queue under the policy that has our name."""
    return Desk(Scheduler())
