"""Numbers that leave a format's range: underflow, overflow, an eps of zero, NaN and infinities."""
