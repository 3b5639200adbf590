"""Methods of one's own, as docs/guide/own_method.md describes them; ``suites/methods.toml`` trains with them."""
