"""Dispatch and combine over several nodes, composed of operations inside a node and of rails between nodes.

On GPUs everything is enqueued, and these rules keep it in order. Kernels that send, and torch's operations beside them,
run on the send stream; what receives runs on the receive stream. NCCL has a stream of its own for the rail.

- Memory of kernels, rails and results is made on the caller's stream. `Nodes.enter` then orders the send stream after
  the caller's. The operation keeps it until `join` has ordered the caller's stream after both. What torch's operations
  make for themselves on the send stream is used there alone, or by a rail that the send stream waits for.
- A message starts on the stream that wrote it: ids and rows on the send stream, sums on the receive stream. The stream
  that reads what comes waits for it: the send stream for what it forwards, the receive stream for the sums it adds.
- The receive stream comes after plan, notify and `place`, by its order after the send stream before the first send.
- All messages of a dispatch but its counts start before anything waits for one of them or for rows inside the node.
  Each sum starts its way back before the next segment's rows are waited for. So rails never wait for what waits for
  them.
- The host waits only for counts and totals, with a deadline: a dispatch that makes its routing without a capacity.
- If an operation fails, the send stream waits for all messages that have begun, since they use the operation's memory.
"""
