"""Scheduler harnesses under every policy, and under the default policy."""

from __future__ import annotations

import pytest

from conure.server.scheduling.policy import POLICIES, Policy
from conure.server.scheduling.scheduler import Scheduler

from .scheduler_harness import SchedulerHarness


@pytest.fixture(params=POLICIES.values(), ids=lambda policy: policy.name)
def policy(request: pytest.FixtureRequest) -> Policy:
    """Return each policy."""
    found: Policy = request.param
    return found


@pytest.fixture
def harness(policy: Policy) -> SchedulerHarness:
    """Return a scheduler under every policy, for behaviour that all of them share."""
    return SchedulerHarness(Scheduler(policy))


@pytest.fixture
def default_harness() -> SchedulerHarness:
    """Return a scheduler under the default policy."""
    return SchedulerHarness(Scheduler())
