"""Exchanges over sockets: ``protocol`` (frames), ``connection`` (the state of one peer), ``framing`` (which frame goes next),
``reactor`` (the thread), ``exchange`` (pairs and groups), ``reduction_tree`` and ``addresses``."""
