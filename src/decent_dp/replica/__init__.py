"""One worker's replica of a model in a run: the part that both drivers share.

replica           the base class of the drivers                live            replicas are started, found and guarded
construction      from arguments to connected replicas         lifecycle       whether it can make rounds, and its end
parameters        the trainable parameters, their changes      module_hooks    state dicts saved and loaded during a run
averages          means of tensors over workers                mean            the replica as the mean, and its own values
consistency       calls of all workers, the same error on all  cadence         rounds in which such calls are due
snapshot          the whole state at a step boundary           host_copies     copies of tensors in memory that is kept
optimizer_state   optimizers' state by parameter name          optimizer_guards  mistakes with optimizers, and saved states
momenta           optimizers' momenta that are mixed, too      uneven          uneven numbers of batches
assignment        which workers are one replica                mates           the other workers of such a replica
state_server      gives its state to a process that joins      state_receiver  gets it from a member
transfer          a state in chunks, and their messages        shards          the parts of DTensors, and fully_shard
shares            what each worker of a node exchanges         node_gradients  the mean of the gradients of its workers
"""
