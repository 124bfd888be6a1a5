//! Objects of which C sees the head.
//!
//! A verbs object is a C structure that programs read, and in places write, followed by its body. C
//! holds a pointer to the head; [`live`] turns it back into the body. Nothing forms a reference to
//! a published head: the program may write it at any time.
//!
//! [`handles`] lists the live objects. A pointer to a destroyed object, or to anything else, is
//! refused and not followed, unless a new object of the same kind has the same address. [`remains`]
//! keeps the memory of the objects destroyed last, so that their addresses are not used again soon.

mod handles;
mod remains;

use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};

use crate::c;
use crate::errno::Errno;

pub(crate) use handles::{Kind, add, is_live, remove};

/// The part of an object that C does not see.
pub(crate) trait Body {
    /// The C structure.
    type Head;
    const KIND: Kind;
}

/// A body whose head begins with the pointer to its context.
///
/// # Safety
///
/// The first field of the head, or of its first field, has type `*mut ibv_context`.
pub(crate) unsafe trait OfContext: Body {}

/// Aligned so that the low bits of its address are free for the kind (see [`handles`]).
#[repr(C, align(32))]
pub(crate) struct Object<B: Body> {
    head: UnsafeCell<B::Head>,
    body: B,
}

/// Puts an object where C can hold it.
pub(crate) fn publish<B: Body>(head: B::Head, body: B) -> NonNull<B::Head> {
    let object = Box::new(Object { head: UnsafeCell::new(head), body });
    // The head is at the start of the object, so they have one address.
    let head: NonNull<B::Head> = NonNull::from(Box::leak(object)).cast();
    handles::add(B::KIND, head.as_ptr().expose_provenance());
    head
}

/// The live objects of this kind that were made with a context.
pub(crate) fn all_of<B: OfContext>(context: *mut c::ibv_context) -> Vec<*mut B::Head> {
    let of_context = |address| {
        let head: *const *mut c::ibv_context = with_exposed_provenance(address);
        // SAFETY: `publish` exposed the address of an object, which is not destroyed meanwhile; its
        // head begins with the pointer to its context.
        std::ptr::eq(unsafe { head.read_volatile() }, context)
    };
    handles::all(B::KIND, of_context).into_iter().map(with_exposed_provenance_mut).collect()
}

/// The body of the object that a pointer of C names.
///
/// # Errors
///
/// `EINVAL` if the pointer is null, `ENOENT` if it names no live object of this kind.
///
/// # Safety
///
/// No other thread destroys the object while the result is in use, as the manual pages demand.
pub(crate) unsafe fn live<'a, B: Body>(head: *const B::Head) -> Result<&'a B, Errno> {
    check::<B>(head)?;
    // SAFETY: `publish` made it, `withdraw` has not taken it, and by the caller's promise will not
    // while the result is in use. Only the body is referenced, which C does not access.
    Ok(unsafe { &(*head.cast::<Object<B>>()).body })
}

/// As [`live`], of a pointer that may be null.
///
/// # Safety
///
/// As of [`live`].
pub(crate) unsafe fn live_or_null<'a, B: Body>(
    head: *const B::Head,
) -> Result<Option<&'a B>, Errno> {
    if head.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promises.
    unsafe { live(head) }.map(Some)
}

fn check<B: Body>(head: *const B::Head) -> Result<(), Errno> {
    let kind = B::KIND;
    if head.is_null() {
        return Err(Errno::invalid(format_args!("the {kind} is a null pointer")));
    }
    if !is_live(kind, head.addr()) {
        return Err(not_live(kind, head.addr()));
    }
    Ok(())
}

fn not_live(kind: Kind, address: usize) -> Errno {
    let reason = format_args!("{address:#x} is no {kind}: it was destroyed, or never created");
    Errno::new(libc::ENOENT, reason)
}

/// Takes an object away from C.
///
/// # Errors
///
/// Those of [`live`]. Of two threads that destroy one object, one gets `ENOENT`.
///
/// # Safety
///
/// No other thread uses the object, now or later.
pub(crate) unsafe fn withdraw<B: Body>(head: *mut B::Head) -> Result<B, Errno> {
    check::<B>(head)?;
    if !handles::remove(B::KIND, head.addr()) {
        return Err(not_live(B::KIND, head.addr()));
    }
    const { assert!(!std::mem::needs_drop::<B::Head>(), "the head is not dropped") };
    let object = head.cast::<Object<B>>();
    // SAFETY: this is the box that `publish` leaked. `remove` returns true once for each object, so
    // the body is moved out once, and the memory given to `remains` once.
    unsafe {
        let body = (&raw const (*object).body).read();
        remains::keep(NonNull::new_unchecked(object.cast()), Layout::new::<Object<B>>());
        Ok(body)
    }
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
    ibv_sa_path_rec,
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
