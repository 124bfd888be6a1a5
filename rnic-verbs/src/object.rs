//! Objects of which C sees the head.
//!
//! A verbs object is a structure of C that programs read, and in places write, followed by what
//! stands behind it. C holds a pointer to the head; here it is turned back into the body. Nothing
//! forms a reference to a head after it has been published: the program may write it at any time.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use crate::c;

/// What stands behind a structure of C.
pub(crate) trait Body {
    /// The structure.
    type Head;
}

#[repr(C)]
pub(crate) struct Object<B: Body> {
    head: UnsafeCell<B::Head>,
    body: B,
}

/// Puts an object where C can hold it.
pub(crate) fn publish<B: Body>(head: B::Head, body: B) -> NonNull<B::Head> {
    let object = Box::new(Object { head: UnsafeCell::new(head), body });
    // The head is at the start of the object, so they have one address.
    NonNull::from(Box::leak(object)).cast()
}

/// The body behind a head that C handed in.
///
/// # Safety
///
/// `head` is null, or came from [`publish`] with this body and has not been withdrawn; it will not
/// be while the result is in use, which is the program's part of the contract of every verb.
pub(crate) unsafe fn body<'a, B: Body>(head: *const B::Head) -> Option<&'a B> {
    if head.is_null() {
        return None;
    }
    // SAFETY: by the caller's promise it points to an `Object<B>`; of that only the body is
    // referenced, which C has no part in.
    Some(unsafe { &(*head.cast::<Object<B>>()).body })
}

/// Takes an object away from C.
///
/// # Safety
///
/// `head` came from [`publish`] with this body, and nobody uses it, now or later.
pub(crate) unsafe fn withdraw<B: Body>(head: *mut B::Head) -> B {
    // SAFETY: by the caller's promise this is the box that `publish` leaked, given back once.
    let object = unsafe { Box::from_raw(head.cast::<Object<B>>()) };
    object.body
}

/// A pointer that is C's: kept, compared and given back, and followed only at the boundary.
#[derive(Debug)]
pub(crate) struct Foreign<T>(pub(crate) *mut T);

impl<T> Clone for Foreign<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Foreign<T> {}

impl<T> PartialEq for Foreign<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Foreign<T> {
    pub(crate) const NULL: Foreign<T> = Foreign(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }
}

// SAFETY: it is an address and nothing else; whoever follows it says why that may be.
unsafe impl<T> Send for Foreign<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Foreign<T> {}

/// A structure of C of which zeros are a value.
///
/// # Safety
///
/// It consists of numbers, of pointers, of `Option`s of function pointers, and of such structures.
pub(crate) unsafe trait Plain {}

macro_rules! plain {
    ($($name:ident),* $(,)?) => {
        $(
            // SAFETY: a structure of the C API, of numbers, pointers and optional functions.
            unsafe impl Plain for c::$name {}
        )*
    };
}

plain!(
    ibv_ah,
    ibv_ah_attr,
    ibv_async_event,
    ibv_comp_channel,
    ibv_cq_ex,
    ibv_device,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_mr,
    ibv_mw,
    ibv_pd,
    ibv_port_attr,
    ibv_qp_attr,
    ibv_qp_ex,
    ibv_qp_init_attr_ex,
    ibv_srq,
    rdma_addrinfo,
    rdma_cm_event,
    rdma_cm_id,
    rdma_ud_param,
    verbs_context,
);

/// A structure of C with all bytes zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` says that zeros are a value of the structure.
    unsafe { std::mem::zeroed() }
}
