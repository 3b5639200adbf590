"""Training strategies of trials: every policy of `impl`, and the peers that they are compared with."""
