"""Dispatch and combine over several nodes, composed of operations inside a node and of rails between nodes.

On GPUs everything is enqueued, and the rules below keep it in order. Kernels, and torch's operations beside them, run
on the own stream (runtime/streams.py). Messages cross in the stream of the rail (transport/progress.py).

- The memory of kernels, rails and results is made on the caller's stream. `Nodes.enter` then orders the own stream
  after the caller's stream. The operation keeps the memory until `join` has ordered the caller's stream after it.
  Tensors that torch's operations allocate on the own stream are used there alone, or by a rail that it waits for.
- Messages start on the own stream, which also waits for them: for rows to forward, and for sums to add.
- A dispatch starts all messages except its counts before anything waits for one of them, or for rows inside the node.
  A combine starts to send each segment's sums back before it waits for the next segment's rows. Otherwise a rail could
  wait for work that waits for that rail.
- The host waits only for counts and totals, with a deadline. Only a dispatch that makes its routing without a capacity
  needs them.
- If an operation fails, the own stream waits for all messages that have begun, since they use the operation's memory.
"""
