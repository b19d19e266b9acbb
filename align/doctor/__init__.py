"""Whether this machine can run ``align``: what is missing, and the command that mends it.

One module per topic; :mod:`align.doctor.examine` runs them all. Nothing heavy is imported before it is needed, because
what cannot be imported is one of the things to find.
"""
