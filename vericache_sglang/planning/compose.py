"""VeriCache over another drafter: appendix A.3 of arXiv:2605.17613."""

from __future__ import annotations

from vericache_sglang.errors import ConfigError


def composition_multiplier(drafter_rate: float, positions: int) -> float:
    """Return 1 + gamma_e (d_e - 1), tokens per outer position.

    Args:
        drafter_rate: gamma_e, share of the drafter's tokens that the compressed KV
            accepts, in [0, 1].
        positions: d_e, tokens an outer position may yield: the target's own and
            d_e - 1 of the drafter; >= 1.

    Raises:
        ConfigError: An argument is out of bounds.
    """
    if not 0 <= drafter_rate <= 1 or positions < 1:
        raise ConfigError(f"no drafter has gamma_e={drafter_rate}, d_e={positions}")
    return 1 + drafter_rate * (positions - 1)


def composed_length(accepted: float, multiplier: float) -> float:
    """Return the accepted length of a cycle under both: gamma x [1 + ...].

    The paper assumes that the two drafters err independently of each other.
    """
    return accepted * multiplier


def composed_speedup(alone: float, drafter: float, slowdown: float = 1.0) -> float:
    """Return the speedup of both, from the speedup of each over full KV.

    Args:
        alone: VeriCache without the drafter.
        drafter: The drafter without VeriCache: its multiplier over its own cost.
        slowdown: How much longer an iteration with the drafter is in VeriCache's
            larger batch than in the baseline's; 1 where it costs the same in both.

    Raises:
        ConfigError: An argument is not above 0.
    """
    if min(alone, drafter, slowdown) <= 0:
        raise ConfigError("speedups and slowdown must be > 0")
    return alone * drafter / slowdown
