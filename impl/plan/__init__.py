"""Decides, without torch, what a policy sends, holds and computes, and predicts bytes, memory and step time."""
