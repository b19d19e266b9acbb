"""What kind of fault makes an operator's result wrong: hypotheses that are fitted to the error and tested.

:func:`explain` takes one accused checkpoint and returns the faults that reproduce what was recorded down to the noise.
``kinds.tsv`` lists them; each module proposes some: what the result would be if that fault were there.
"""

from align.fits.case import INPUTS, FitCase
from align.fits.explanation import explain
from align.fits.fit import Fit
from align.fits.table import FaultKind, kinds

__all__ = ["INPUTS", "FaultKind", "Fit", "FitCase", "explain", "kinds"]
