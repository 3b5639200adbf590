"""Comparisons of a trial with a single process and with exact values, outside of the time that is measured.

Four terms are used here.  The *masters* are the engine's fp32 weights.  A *unit* is a set of parameters that are
gathered and reduced together.  A *rehearsal* runs the passes of a step before the step itself, to compare its messages,
and changes nothing that training depends on.  The *drawn step* is one step in the second half of the trial, chosen at
random by the trial's seed and repeat.

A trial makes these comparisons:

- Before training, loss and reduced gradients of the sharded model, in evaluation mode, are compared with those of a
  single process (:mod:`harness.measure.gradient_bounds`).  Some repeats leave this out
  (:func:`~harness.reference_checks.comparison.compares_first`).
- If the suite measures errors, the first, a middle and the last step are rehearsed, and all messages of the rehearsals
  are compared with exact values (:mod:`harness.measure.communication_error`).  If our engine trains, loss and gradients
  of the middle and the last step are also compared with those of a single process that has the same masters.
- If our engine trains, one unit is checked before the drawn step; seed and repeat choose the unit.  Its gathered
  weights, and hpZ's copy of them, are compared with its masters.  Its gradient is reduced once, and the messages of
  this reduction are compared with what the reference codecs encode.
- After the backward passes of the drawn step, the step's loss and the gradients of all units are compared with those of
  a single process.  If Muon is the optimizer, its step of one whole matrix is recomputed afterwards, and compared
  (:mod:`harness.reference_checks.muon_step`).
- If the suite measures errors, a grid of codecs is tried on the trained weights and gradients after the last step.
  Nothing is sent for this (:mod:`harness.measure.quantisation_error`).
"""
