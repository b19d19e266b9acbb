"""The smallest case that still shows a finding.

:mod:`align.reduce.types` has what is known, :mod:`align.reduce.planner` proposes smaller cases as a pure function of
it, :mod:`align.reduce.executor` tries them, and :mod:`align.reduce.layers` cuts a checkpoint to its first layers.
"""
