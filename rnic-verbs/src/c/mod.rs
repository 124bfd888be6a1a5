//! The types and constants of `<infiniband/verbs.h>`, `<infiniband/sa.h>` and `<rdma/rdma_cma.h>`,
//! with the layout of rdma-core 44. Programs were compiled against that layout and access it with
//! inline functions, so sizes and offsets must not change. `layout` checks each of them.
//!
//! This module defines no functions.

// The names come from the C headers.
#![allow(non_camel_case_types)]
// The manual page that each structure names describes the fields.
#![allow(missing_docs)]

pub mod cm;
pub mod verbs;

mod layout;

pub use cm::*;
pub use verbs::*;
