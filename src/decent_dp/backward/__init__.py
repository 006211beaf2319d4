"""The wrapper's driver: from autograd's events to rounds, with optimizers that step inside the backward.

driver    updates, buckets, saves and loads       events        the backward's, and windows of accumulation
units     buckets with their optimizers           state_dicts   the model's
scaled    a GradScaler that no replica was given
"""
