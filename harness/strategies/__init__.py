"""The strategies that a trial can train with: every policy of `impl`, and the peers for comparison."""
