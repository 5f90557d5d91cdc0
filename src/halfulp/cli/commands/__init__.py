"""The commands, one file each: what an option means, what is printed, what is written."""
