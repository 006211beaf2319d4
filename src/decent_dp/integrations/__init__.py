"""``decent_dp.gossip`` in other training frameworks, in one line each. Nothing here is imported by the rest of the library.

Each module needs the extra of its name: ``[transformers]``, for example.
"""

__all__ = ["OPTIONS"]

# The arguments of ``gossip`` that a framework's user chooses; the framework itself has the others.
OPTIONS = frozenset({"topology", "compression", "mix_every", "rule", "faults", "encrypt", "overlap", "bucket_size_in_mb"})
OPTIONS |= {"local_world_size", "replica"}
