"""Exchanges over sockets: ``addresses``, ``greeting`` (who is at the other end) and ``acceptor``, ``protocol`` (frames),
``connection`` (the state of one peer), ``framing`` (which frame goes next), ``reactor`` (the thread), ``exchange`` (pairs and
groups) and ``reduction_tree``."""
