"""Compiles a policy into hops and schedules, and predicts bytes, memory and step time, without torch."""
