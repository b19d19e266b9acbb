"""What a run's calls of attention and cache operators say: their arguments judged by the rules of :mod:`align.fa`, and
those of both sides beside each other."""
