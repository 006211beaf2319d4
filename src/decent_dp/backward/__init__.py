"""The wrapper's driver: from autograd's events to rounds, with optimizers that step inside the backward.

replica   gradients, windows of accumulation, updates     output   the tensors of a forward's output
units     buckets with their optimizers                   states   optimizer state by parameter name
scaled    a GradScaler that no replica was given
"""
