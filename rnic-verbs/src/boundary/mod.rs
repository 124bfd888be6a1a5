//! The functions that programs call: each turns what C hands in into what the rest of the crate
//! takes, makes one call, and turns the answer back.
//!
//! # Safety
//!
//! What all of them rely on is what the manual pages say of a program: a pointer is null where that
//! is allowed, or points to what the page names; objects came from the function that makes them and
//! have not been destroyed; nobody destroys an object that another thread is using; memory that a
//! request names stays until it has completed. A program that breaks this breaks itself, as with
//! any library of C; to the daemon and to others it can do no more than it could do without. Blocks
//! that rely on nothing else say "as the module says".

// Each function has the contract of its manual page, and of the module.
#![allow(clippy::missing_safety_doc)]

use crate::errno::Errno;

/// A structure that C hands in.
///
/// # Errors
///
/// `EINVAL` if the pointer is null.
unsafe fn argument<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Errno> {
    // SAFETY: as the module says.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(name))
}

/// As [`argument`], of a structure that is written.
unsafe fn argument_mut<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T, Errno> {
    // SAFETY: as the module says.
    unsafe { pointer.as_mut() }.ok_or_else(|| null(name))
}

fn null(name: &str) -> Errno {
    Errno::invalid(format_args!("{name} is a null pointer"))
}

pub(crate) mod address_handles;
mod addresses;
pub(crate) mod addrinfo;
pub(crate) mod connections;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod cq_ex;
pub(crate) mod endpoint;
pub(crate) mod events;
pub(crate) mod id;
pub(crate) mod memory;
pub(crate) mod qp;
pub(crate) mod qp_ex;
pub(crate) mod srq;
mod work;
