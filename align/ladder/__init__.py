"""The ladder: the same case at simpler layouts, to say which dimension of a layout introduces a divergence.

:mod:`align.ladder.types` has what is known, :mod:`align.ladder.planner` decides what to run next, as a pure function of
it, :mod:`align.ladder.executor` runs it, and :mod:`align.ladder.memory` says which layout is the simplest that fits.
"""
