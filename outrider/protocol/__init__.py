"""What both ends of a stream share: packed fields, errors, the handshake, sampling parameters."""
