"""The front end of torch.compile: gradients move between sites inside the backward graph."""
