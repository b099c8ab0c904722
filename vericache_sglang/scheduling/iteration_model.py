"""Iteration time as a linear function of the work, fitted online.

Recursive least squares in information form. Forgetting decays the information matrix
towards the prior's and leaves the estimate unchanged: a coefficient that recent work
does not excite keeps its last value, and its uncertainty never exceeds the prior's.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import isfinite

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.ewma import Ewma

SHORTEST_S = 1e-6
LONGEST_S = 60.0
"""Upper bound of a plausible iteration time, in seconds."""

STALLS = 4
"""Times in a row far above the prediction that are ignored: at their first use kernels
are compiled, for up to a second each."""

WARM = 20
"""Iterations before times far from the prediction are treated as outliers."""

OUTLIER = 4.0
"""Ratio of time and prediction beyond which the time is clipped. It is not dropped, so
that the model follows a machine that became ten times slower."""

DRIFT = 0.2
"""Mean relative error, over about ten iterations, that counts as drift."""

DRIFT_MEMORY = 12.0
"""Memory of the estimator during drift, in iterations."""

TINY = 1e-6
"""Share of an iteration below which a coefficient's contribution counts as 0."""

HOLD = 1e9
"""Factor on the information that constrains a coefficient to 0."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one forward.

    Attributes:
        tokens: Query tokens.
        reads: KV slots read, summed over rows.
        products: Query tokens times KV slots, summed over rows.
    """

    tokens: float
    reads: float
    products: float


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit of work.

    Attributes:
        base_s: Per iteration: reading the weights, launches, the scheduler.
        per_token_s: Per token.
        per_read_s: Per KV slot read.
        per_product_s: Per token and KV slot.
    """

    base_s: float
    per_token_s: float
    per_read_s: float
    per_product_s: float

    def marginal(self, work: Work) -> float:
        """Return the time that the work adds to an iteration, in seconds."""
        return _marginal(self.per_token_s, self.per_read_s, self.per_product_s, work)


def _marginal(token: float, read: float, product: float, work: Work) -> float:
    return token * work.tokens + read * work.reads + product * work.products


MOST = Coefficients(base_s=30.0, per_token_s=1.0, per_read_s=1e-2, per_product_s=1e-3)
"""Upper bounds of the coefficients; the lower bounds are 0."""


class IterationModel:
    """T = base + per_token * tokens + per_read * reads + per_product * products.

    The paper's T_gpu (arXiv:2605.17613, appendix A.1) with the terms it omits. From a
    start that is a hundred times off, it converges in some hundred iterations.

    Args:
        start: Initial coefficients, each > 0 and at most ``MOST``.
        confidence: Weight of a starting value, in iterations, for a coefficient that
            explains all of the time; > 0.
        memory: Iterations after which an observation weighs a third, > 1.

    Attributes:
        iteration_s: T_iter, the mean of the observed times, in seconds.

    Raises:
        InvariantError: An argument is out of bounds.
    """

    def __init__(
        self, start: Coefficients, *, confidence: float = 0.003, memory: float = 500.0
    ) -> None:
        self._start: tuple[float, ...] = astuple(start)
        self._most: tuple[float, ...] = astuple(MOST)
        pairs = zip(self._start, self._most, strict=True)
        if not all(0 < value <= most for value, most in pairs):
            raise InvariantError(f"iteration model cannot start at {start}")
        if not confidence > 0 or not memory > 1:
            raise InvariantError(f"confidence {confidence} or memory {memory}")
        self._confidence = confidence
        self._memory = memory
        self._least = confidence * TINY
        self._values = self._start
        # The unconstrained estimate, in units of the start.
        self._free = (1.0, 1.0, 1.0, 1.0)
        # Upper triangle, row by row, of the 4 x 4 information matrix. Coefficients are
        # counted in units of their start and times in units of the iteration's, so that
        # its entries are of order 1.
        self._information = (0.0,) * 10
        self._drift = Ewma(0.0, least=-1.0, most=1.0)
        self._count = self._stalls = 0
        self.iteration_s = Ewma(
            min(max(start.base_s, SHORTEST_S), LONGEST_S),
            least=SHORTEST_S,
            most=LONGEST_S,
        )

    @property
    def coefficients(self) -> Coefficients:
        """The current estimate; each coefficient in [0, ``MOST``]."""
        return Coefficients(*self._values)

    def predict(self, work: Work) -> float:
        """Return the predicted time of an iteration with this work, in seconds, > 0."""
        return max(SHORTEST_S, self._values[0] + self.marginal(work))

    def marginal(self, work: Work) -> float:
        """See ``Coefficients.marginal``."""
        _, token, read, product = self._values
        return _marginal(token, read, product, work)

    def observe(self, work: Work, seconds: float) -> None:
        """Update the model with one iteration; implausible times are ignored."""
        if not seconds > 0 or not isfinite(seconds):
            return
        expected = self.predict(work)
        self._stalls = self._stalls + 1 if seconds > OUTLIER * expected else 0
        if 0 < self._stalls <= STALLS:
            return
        self._count += 1
        if self._count > WARM:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        seconds = min(max(seconds, SHORTEST_S), LONGEST_S)
        self.iteration_s.observe(seconds)
        self._drift.observe((seconds - expected) / max(seconds, expected))
        drifted = self._count > WARM and abs(self._drift.value) > DRIFT
        memory = DRIFT_MEMORY if drifted else self._memory
        # In units of the larger one, so that a far too short time has no larger weight.
        self._learn(work, seconds, max(seconds, expected), memory)
        self._values = self._bounded()

    def _learn(self, work: Work, seconds: float, unit_s: float, memory: float) -> None:
        """Do one recursive least-squares update on the relative error."""
        v0, v1, v2, v3 = self._free
        s0, s1, s2, s3 = self._start
        x1, x2, x3 = work.tokens, work.reads, work.products
        f0, f1 = s0 / unit_s, s1 * x1 / unit_s
        f2, f3 = s2 * x2 / unit_s, s3 * x3 / unit_s
        error = seconds / unit_s - (v0 * f0 + v1 * f1 + v2 * f2 + v3 * f3)
        # The prior of a coefficient weighs in proportion to the share of the time it
        # explains: work that never varies then scales all coefficients alike, and a
        # negligible one can still grow. The first update starts from the prior alone.
        keep = 1.0 - 1.0 / memory if self._count > 1 else 0.0
        prior = (1.0 - keep) * self._confidence
        a00, a01, a02, a03, a11, a12, a13, a22, a23, a33 = self._information
        a00 = keep * a00 + f0 * f0 + prior * max(f0, TINY)
        a01 = keep * a01 + f0 * f1
        a02 = keep * a02 + f0 * f2
        a03 = keep * a03 + f0 * f3
        a11 = keep * a11 + f1 * f1 + prior * max(f1, TINY)
        a12 = keep * a12 + f1 * f2
        a13 = keep * a13 + f1 * f3
        a22 = keep * a22 + f2 * f2 + prior * max(f2, TINY)
        a23 = keep * a23 + f2 * f3
        a33 = keep * a33 + f3 * f3 + prior * max(f3, TINY)
        self._information = (a00, a01, a02, a03, a11, a12, a13, a22, a23, a33)
        g0, g1, g2, g3 = _solve(self._information, (f0, f1, f2, f3), self._least)
        self._free = (
            v0 + g0 * error,
            v1 + g1 * error,
            v2 + g2 * error,
            v3 + g3 * error,
        )

    def _bounded(self) -> tuple[float, float, float, float]:
        """Return the most likely coefficients inside the bounds, in seconds.

        Negative coefficients are fixed at 0 and the others are solved again. The
        estimate itself stays unconstrained, so that its information stays valid.
        """
        free = list(self._free)
        if min(free) < 0.0:
            free = _without_negatives(self._information, self._free, self._least)
        c0, c1, c2, c3 = (
            min(max(value, 0.0) * start, most)
            for value, start, most in zip(free, self._start, self._most, strict=True)
        )
        return c0, c1, c2, c3


def _solve(
    matrix: tuple[float, ...], right: tuple[float, float, float, float], least: float
) -> tuple[float, float, float, float]:
    """Solve a symmetric 4 x 4 system by its L D L^T factors, unrolled for speed.

    Args:
        matrix: Upper triangle, row by row.
        right: Right-hand side.
        least: Lower bound of the eigenvalues, and so of the pivots.
    """
    a00, a01, a02, a03, a11, a12, a13, a22, a23, a33 = matrix
    l10, l20, l30 = a01 / a00, a02 / a00, a03 / a00
    d1 = max(a11 - l10 * a01, least)
    c12 = a12 - l10 * a02
    c13 = a13 - l10 * a03
    l21, l31 = c12 / d1, c13 / d1
    d2 = max(a22 - l20 * a02 - l21 * c12, least)
    c23 = a23 - l20 * a03 - l21 * c13
    l32 = c23 / d2
    d3 = max(a33 - l30 * a03 - l31 * c13 - l32 * c23, least)
    y0, y1, y2, y3 = right
    y1 -= l10 * y0
    y2 -= l20 * y0 + l21 * y1
    y3 -= l30 * y0 + l31 * y1 + l32 * y2
    g3 = y3 / d3
    g2 = y2 / d2 - l32 * g3
    g1 = y1 / d1 - l21 * g2 - l31 * g3
    return y0 / a00 - l10 * g1 - l20 * g2 - l30 * g3, g1, g2, g3


def _without_negatives(
    matrix: tuple[float, ...], free: tuple[float, ...], least: float
) -> list[float]:
    """Return the point with no negative entry that is nearest in the matrix's metric.

    Repeatedly fixes the most negative entry at 0 and solves for the others, at most
    four times. Exact unless an entry fixed early would have become positive again.
    """
    a00, a01, a02, a03, a11, a12, a13, a22, a23, a33 = matrix
    x0, x1, x2, x3 = free
    right = (
        a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3,
        a01 * x0 + a11 * x1 + a12 * x2 + a13 * x3,
        a02 * x0 + a12 * x1 + a22 * x2 + a23 * x3,
        a03 * x0 + a13 * x1 + a23 * x2 + a33 * x3,
    )
    hold = HOLD * max(a00, a11, a22, a33)
    held = [0.0, 0.0, 0.0, 0.0]
    point = list(free)
    while min(point) < 0.0:
        held[point.index(min(point))] = hold
        h0, h1, h2, h3 = held
        pinned = (a00 + h0, a01, a02, a03, a11 + h1, a12, a13, a22 + h2, a23, a33 + h3)
        solved = _solve(pinned, right, least)
        point = [0.0 if h else x for x, h in zip(solved, held, strict=True)]
    return point
