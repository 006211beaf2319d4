"""``decent_dp.gossip`` in other training frameworks, in one line each. Nothing here is imported by the rest of the library.

Each module needs the extra of its name: ``[transformers]``, for example.
"""
