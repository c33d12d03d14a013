"""What every communicator is made of: lock, first error, board, streams, close."""
