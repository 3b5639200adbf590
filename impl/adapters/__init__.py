"""Uses this project's quantised collectives inside torch's own engines, FSDP2 and DDP."""
