"""What a user of Outrider imports and runs."""
