//! The functions that programs call. Each converts the C arguments, makes one call into the rest of
//! the crate, and converts the result.
//!
//! # Safety
//!
//! All functions rely on the rules of the manual pages for programs: a pointer is null where that
//! is allowed, or points to the object that the page describes; an object came from the function
//! that creates it and has not been destroyed; no thread destroys an object while another thread
//! uses it; memory that a request refers to stays valid until the request has completed. A program
//! that breaks a rule breaks itself, as with any C library. It gains no access to the daemon or to
//! other programs.
//!
//! The comment on each unsafe block names the rule that the block relies on. In these comments, the
//! caller is the program, or a function that passes its arguments on, and a pointer is valid if it
//! refers to the object that the manual page describes.

// Each function has the contract of its manual page and of this module.
#![allow(clippy::missing_safety_doc)]

use crate::errno::Errno;

/// Returns a structure passed by C.
///
/// # Errors
///
/// `EINVAL` if the pointer is null.
///
/// # Safety
///
/// The pointer is null or valid while the result is in use.
pub(crate) unsafe fn argument<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Errno> {
    // SAFETY: the caller guarantees that `pointer` is null or refers to a `T`.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(name))
}

/// Like [`argument`], for a structure that is written.
///
/// # Safety
///
/// The same as for [`argument`], and no other thread uses the structure.
pub(crate) unsafe fn argument_mut<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T, Errno> {
    // SAFETY: the caller guarantees that `pointer` is null or refers to an unshared `T`.
    unsafe { pointer.as_mut() }.ok_or_else(|| null(name))
}

fn null(name: &str) -> Errno {
    Errno::invalid(format_args!("{name} is a null pointer"))
}
