"""How anything is drawn: colours, markers, axes."""
