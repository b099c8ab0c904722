"""Verifiers seem to take long for first tokens: full KV is read where the link can."""

from math import inf

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.path_paces import PathPaces
from vericache_sglang.scheduling.paths import Path

FIRST_S = 60.0
"""Seconds until a verifier has the first token."""
TOKEN_S = 0.01
"""Seconds of each further one."""


def install():
    """Give the rule fixed times in place of those that are measured.

    The first request drafts here, so that it measures the link.
    """
    begin, choose = PathPaces.__init__, PathPaces.choose

    def begun(self, near, first, *, others):
        times = (Ewma(each, least=0.0, most=inf) for each in (TOKEN_S, FIRST_S))
        begin(self, *times, others=others)

    def chosen(self, choice, ends, load_s, load):
        measured = load_s < inf
        return choose(self, choice, ends, load_s, load) if measured else Path.P1_CACHED

    PathPaces.__init__, PathPaces.choose = begun, chosen
