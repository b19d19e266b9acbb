"""The three checklists of the seeds, evaluated on a finished run: ok, failed, not observable, not applicable.

Whatever an item rests on is told with the number that it was evaluated on; what the run does not know is not
observable, never ok. :mod:`align.checklists.table` has the items, :mod:`align.checklists.evaluate` judges a result, and
:mod:`align.checklists.fa` is where attention's arguments come from.
"""
