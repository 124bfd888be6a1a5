//! `<infiniband/verbs.h>`, one module per kind of object.

mod address;
mod constants;
mod context;
mod cq;
mod device;
mod memory;
mod qp;
mod srq;
mod wr;

pub use address::*;
pub use constants::*;
pub use context::*;
pub use cq::*;
pub use device::*;
pub use memory::*;
pub use qp::*;
pub use srq::*;
pub use wr::*;

/// An operation that this device lacks. The slot keeps its place in the table and stays `None`, so
/// the inline functions of the headers return `EOPNOTSUPP`.
pub type Unserved = Option<unsafe extern "C" fn()>;
