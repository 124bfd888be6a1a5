//! The objects of `<infiniband/verbs.h>`. Each has one file or folder, with its body and its C
//! functions. [`ops`] sets the function pointers in the C structures of objects.

pub(crate) mod adapter;
pub(crate) mod ah;
pub(crate) mod async_events;
pub(crate) mod buf;
pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod device_list;
pub(crate) mod device_table;
mod event_thread;
pub(crate) mod limits;
pub(crate) mod mr;
pub(crate) mod mw;
pub(crate) mod open;
mod ops;
pub(crate) mod pd;
pub(crate) mod qp;
pub(crate) mod registry;
mod section;
pub(crate) mod session;
pub(crate) mod srq;
