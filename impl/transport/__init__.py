"""What :mod:`impl.comm.wire` sends messages with: process groups, shared memory, thread ranks, a GPU's side streams."""
