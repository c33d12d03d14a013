"""Dispatch and combine over several nodes, composed of operations inside a node and of rails between nodes.

On GPUs everything is enqueued, and the rules below keep it in order. Sending kernels, and torch's operations beside
them, run on the send stream. Receiving kernels run on the receive stream. NCCL has a stream of its own for the rail.

- The memory of kernels, rails and results is made on the caller's stream. `Nodes.enter` then orders the send stream
  after the caller's stream. The operation keeps the memory until `join` has ordered the caller's stream after both.
  Tensors that torch's operations allocate on the send stream are used there alone, or by a rail that the send stream
  waits for.
- A message starts on the stream that wrote it: ids and rows on the send stream, sums on the receive stream. The stream
  that reads a message waits for it: the send stream for rows to forward, the receive stream for sums to add.
- Before the first send, the receive stream is ordered after the send stream. So it runs after plan, notify and `place`.
- A dispatch starts all messages except its counts before anything waits for one of them, or for rows inside the node.
  A combine starts to send each segment's sums back before it waits for the next segment's rows. Otherwise a rail could
  wait for work that waits for that rail.
- The host waits only for counts and totals, with a deadline. Only a dispatch that makes its routing without a capacity
  needs them.
- If an operation fails, the send stream waits for all messages that have begun, since they use the operation's memory.
"""
