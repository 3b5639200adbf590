"""Compares a trial with a single process and with exact values, outside of the time that is measured.

Four terms are used here.  The *masters* are the engine's fp32 weights.  A *unit* is a set of parameters that are
gathered and reduced together.  A *rehearsal* of a step runs the step's forward and backward passes before the step
itself, to compare the messages of these passes.  It changes nothing that training depends on.  The *drawn step* is one
step in the second half of the trial, chosen at random from the trial's seed and repeat number.

A trial makes these comparisons:

- Before training, loss and reduced gradients of the sharded model, in evaluation mode, are compared with those of a
  single process (:mod:`harness.measure.gradient_bounds`).  Some repeats leave this out
  (:func:`~harness.reference_checks.comparison.compares_first`).
- If the suite measures errors, the first repeat rehearses the first, a middle and the last step, and all messages of
  the rehearsals are compared with exact values (:mod:`harness.measure.communication_error`).  If our engine trains,
  loss and gradients of the middle and the last step are also compared with those of a single process that has the same
  masters.
- If our engine trains, one unit is checked before the drawn step, unless that step is rehearsed anyway; seed and repeat
  choose the unit.  The unit's gathered weights, and hpZ's copy of the weights inside a node, are compared with the
  masters.  If a single process can repeat the step, the unit's gradient is also reduced, and the messages of this
  reduction are compared with the bytes that the reference implementation of the codecs gives.
- After the backward passes of the drawn step, the step's loss and the gradients of all units are compared with those of
  a single process.  If Muon is the optimizer, its step of one whole matrix is recomputed afterwards, and compared
  (:mod:`harness.reference_checks.muon_step`).
- If the suite measures errors, each rank of the first repeat encodes and decodes the trained weights and gradients with
  a grid of codecs after the last step, to measure their errors.  No encoded values are sent
  (:mod:`harness.measure.quantisation_error`).
"""
