"""The certificate: every check that a run's files allow, in the order in which a reader would doubt it."""

from __future__ import annotations

from reports import checks_arms, checks_generator, checks_work
from reports.check import Check
from reports.read import Run


def certify(run: Run) -> list[Check]:
    """All checks. Pure; none of them raises on incomplete data: what cannot be told is ``not checked``."""
    return [
        *checks_arms.features_as_declared(run),
        *checks_arms.arms_alike(run),
        *checks_arms.same_device(run),
        *checks_generator.generator_healthy(run),
        *checks_generator.arrivals_on_time(run),
        *checks_generator.within_self_test(run),
        *checks_generator.first_tokens_alone(run),
        *checks_work.same_user_text(run),
        *checks_work.prompt_lengths(run),
        *checks_work.tokens_conserved(run),
        *checks_arms.cold_prompts(run),
        *checks_arms.follow_ups(run),
        *checks_work.sessions_complete(run),
        *checks_work.failures(run),
        *checks_work.enough_samples(run),
        *checks_work.same_outputs(run),
        *checks_generator.ttft_agrees(run),
        *checks_generator.simulator_on_time(run),
    ]
