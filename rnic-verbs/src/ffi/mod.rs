//! The boundary to C: objects that C holds pointers to, and conversion of arguments.

pub(crate) mod absent;
pub(crate) mod entry;
pub(crate) mod handles;
pub(crate) mod pointers;
pub(crate) mod socket_address;
