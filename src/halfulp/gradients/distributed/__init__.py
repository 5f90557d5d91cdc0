"""What processes that share gradients agree on: DistributedDataParallel, its join(), and FSDP2."""
