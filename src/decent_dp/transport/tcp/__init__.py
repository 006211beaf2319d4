"""Frames over sockets of our own: ``addresses``, ``greeting`` (who is at the other end) and ``acceptor``, ``protocol``
(frames), ``connection`` (the socket of one peer), ``framing`` (which frame goes next) and ``reactor`` (the thread)."""
