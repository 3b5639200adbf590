"""Pure decisions: what is sent, held and computed, where it lies, and when.  No torch."""
