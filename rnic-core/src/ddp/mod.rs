//! DDP (RFC 5041): segment headers.
