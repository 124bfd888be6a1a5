//! The types and constants of `<infiniband/verbs.h>`, `<infiniband/sa.h>` and `<rdma/rdma_cma.h>`,
//! with the layout of rdma-core 44. Programs were compiled against that layout and reach into it
//! with inline functions, so a size or an offset here is a promise; `layout` checks each.
//!
//! Nothing here has behaviour.

// The names are those of the C headers, so that a reader who knows verbs finds them.
#![allow(non_camel_case_types)]
// Structures name their manual page; their fields are described there.
#![allow(missing_docs)]

pub mod cm;
pub mod verbs;

#[cfg(target_arch = "x86_64")]
mod layout;

pub use cm::*;
pub use verbs::*;
