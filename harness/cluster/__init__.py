"""Where ranks run and what joins them: processes, namespaces, shaped links, Ctrl-C."""
