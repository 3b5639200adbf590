"""Tests of impl.cuda: on the host, through NVRTC, and on a GPU."""
