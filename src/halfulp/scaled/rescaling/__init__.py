"""Where payloads stray from 1, and how they are brought back."""
