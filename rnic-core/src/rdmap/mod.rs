//! RDMAP (RFC 5040): opcodes, Read Request and Terminate headers.
