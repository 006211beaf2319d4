"""What the wrapper is made of: everything about one replica that is neither its public face nor how bytes move.

settings   what it is told once               agree      how workers agree on it, and fail together
guard      the model, watched                 engine     finish, step and start of a bucket
schedule   from autograd's events to updates  building   the buckets and optimizers, alike on all workers
states     optimizer state by parameter name  snapshot   all of it at a step boundary, and going on from there
consensus  the mean of the replicas           leaving    how a worker goes
"""
