"""Products of bfloat16 and float16 tensors, computed in float32 where the processor lacks instructions for them."""
