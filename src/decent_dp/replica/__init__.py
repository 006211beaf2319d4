"""One worker's replica of a model in a run: the part that both drivers share.

replica       rounds, their listeners, and life         parameters    what users do to them: adopted or refused
mean          what is put aside for the mean            averages      the mean of the replicas, and the distance to it
consistency   what fails on one worker fails on all     settings      what all workers must have alike
snapshot      all of it at a step boundary              module_hooks  state dicts saved and loaded in between
construction  from arguments to connected replicas      shutdown      how a worker goes
living        which replicas train; whose step it is    options       what optimizers must have alike
hidden        state that no save would find             optimizers    the user's: parameters and state
stats         counters
"""
