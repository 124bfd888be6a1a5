//! MPA (RFC 5044): start-up frames, FPDU framing, Markers and CRC.
