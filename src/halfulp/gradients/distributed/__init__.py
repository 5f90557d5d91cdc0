"""Agreement between processes that share gradients by DistributedDataParallel, its join(), or FSDP2."""
