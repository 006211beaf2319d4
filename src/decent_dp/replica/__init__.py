"""One worker's replica of a model in a run: the part that both drivers share.

replica       the base class of the drivers              parameters    the trainable parameters, and changes to them
mean          backup of values while a mean is in place  averages      means over workers, and distances to them
consistency   checks that raise the same error on all    settings      settings that must be equal on all workers
snapshot      the whole state at a step boundary         module_hooks  state dicts saved and loaded during a run
construction  from arguments to connected replicas       shutdown      the end of a worker
registry      the replicas of this process               options       comparison of the optimizers' options
hidden_state  optimizer state that no save contains      optimizers    the user's optimizers and their state
shards        replicas of several workers (DTensor)      stats         counters
"""
