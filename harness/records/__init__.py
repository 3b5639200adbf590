"""An answer as data: records of trials and of benches, and the statistics over them.  No torch."""
