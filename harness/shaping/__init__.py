"""Gives the link between nodes a rate: network namespaces, queues of an interface, or pauses between messages."""
