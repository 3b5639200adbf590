"""Our quantised collectives inside torch's own engines: FSDP2 and DDP."""
