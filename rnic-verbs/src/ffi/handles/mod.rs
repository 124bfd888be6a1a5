//! Objects that C holds pointers to.
//!
//! A verbs object is a C structure, the head, that programs read and partly write, followed by a
//! body. C holds a pointer to the head; [`live`] finds the object. The library never forms a
//! reference to a published head, because the program may write it at any time.
//!
//! [`table`] lists the live objects. The library refuses a pointer to anything else, destroyed
//! objects included, and does not dereference it. It cannot detect a new object of the same kind at
//! the same address, so [`quarantine`] keeps the memory of the objects destroyed last.

mod quarantine;
mod table;

use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};

use crate::c;
use crate::errno::Errno;
use crate::ffi::pointers::Fields;

pub(crate) use table::{Kind, add, is_live, remove};

/// The part of an object that C does not access.
pub(crate) trait Body {
    /// The C structure.
    type Head;
    const KIND: Kind;
}

/// A body whose head starts with the pointer to its context.
///
/// # Safety
///
/// The first field of the head, or of its first field, has type `*mut ibv_context`.
pub(crate) unsafe trait OfContext: Body {}

/// Aligned so that the low bits of the address are free for the kind (see [`table`]).
#[repr(C, align(32))]
pub(crate) struct Object<B: Body> {
    head: UnsafeCell<B::Head>,
    body: B,
}

/// Allocates an object for C and adds it to the live objects.
pub(crate) fn publish<B: Body>(head: B::Head, body: B) -> NonNull<B::Head> {
    let object = Box::new(Object { head: UnsafeCell::new(head), body });
    // The head is at the start of the object, so both have the same address.
    let head: NonNull<B::Head> = NonNull::from(Box::leak(object)).cast();
    table::add(B::KIND, head.as_ptr().expose_provenance());
    head
}

/// Returns the live objects of this kind that were created with a context.
pub(crate) fn all_of<B: OfContext>(context: *mut c::ibv_context) -> Vec<*mut B::Head> {
    let of_context = |address| {
        let head: *const *mut c::ibv_context = with_exposed_provenance(address);
        // SAFETY: `publish` exposed the address of an object, and `table::all` keeps the object
        // from being destroyed. Its head begins with the pointer to its context.
        std::ptr::eq(unsafe { head.read_volatile() }, context)
    };
    table::all(B::KIND, of_context).into_iter().map(with_exposed_provenance_mut).collect()
}

/// An object that was live when it was looked up. It is a pointer, not a guard: as with the C
/// pointer, no use may follow a call that destroys the object.
pub(crate) struct Live<B: Body>(NonNull<Object<B>>);

impl<B: Body> Clone for Live<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Body> Copy for Live<B> {}

impl<B: Body> Deref for Live<B> {
    type Target = B;

    fn deref(&self) -> &B {
        // SAFETY: `publish` created the object. The caller of `withdraw` guarantees that no `Live`
        // is used any more. Only the body is referenced, which C does not access.
        unsafe { &(*self.0.as_ptr()).body }
    }
}

// SAFETY: the head is part of the object, which is live as for `deref`, and is only accessed by
// pointers.
unsafe impl<B: Body> Fields for Live<B> {
    type C = B::Head;

    fn at(&self) -> *mut B::Head {
        self.0.as_ptr().cast()
    }
}

/// Returns the object that a C pointer refers to.
///
/// # Errors
///
/// `EINVAL` if the pointer is null, `ENOENT` if it refers to no live object of this kind.
pub(crate) fn live<B: Body>(head: *const B::Head) -> Result<Live<B>, Errno> {
    let kind = B::KIND;
    // The object starts with its head.
    let object = NonNull::new(head.cast_mut().cast())
        .ok_or_else(|| invalid!("the {kind} is a null pointer"))?;
    if is_live(kind, head.addr()) { Ok(Live(object)) } else { Err(not_live(kind, head.addr())) }
}

/// Like [`live`], but accepts a null pointer.
pub(crate) fn live_or_null<B: Body>(head: *const B::Head) -> Result<Option<Live<B>>, Errno> {
    if head.is_null() { Ok(None) } else { live(head).map(Some) }
}

fn not_live(kind: Kind, address: usize) -> Errno {
    errno!(libc::ENOENT, "{address:#x} is not a {kind}: destroyed, or never created")
}

/// Removes an object from the live objects and returns its body.
///
/// # Errors
///
/// The errors of [`live`]. If two threads destroy the same object, one of them gets `ENOENT`.
///
/// # Safety
///
/// No thread uses the object during the call or later, which the manual pages require of programs:
/// every [`Live`] of it is out of use.
pub(crate) unsafe fn withdraw<B: Body>(head: *mut B::Head) -> Result<B, Errno> {
    live::<B>(head)?;
    if !table::remove(B::KIND, head.addr()) {
        return Err(not_live(B::KIND, head.addr()));
    }
    const { assert!(!std::mem::needs_drop::<B::Head>(), "the head is not dropped") };
    let object = head.cast::<Object<B>>();
    // SAFETY: this is the box that `publish` leaked. `remove` returns true once for each object, so
    // the body is moved out once, and the memory given to `quarantine` once.
    unsafe {
        let body = (&raw const (*object).body).read();
        quarantine::keep(NonNull::new_unchecked(object.cast()), Layout::new::<Object<B>>());
        Ok(body)
    }
}

/// A pointer of the program. The library stores, compares and returns it; only C functions
/// dereference it.
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

// SAFETY: it is only an address; code that dereferences it justifies the access.
unsafe impl<T> Send for Foreign<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Foreign<T> {}

/// A C structure for which all zeros is a valid value.
///
/// # Safety
///
/// The type consists of numbers, pointers, `Option`s of function pointers, and structures and
/// unions of these.
pub(crate) unsafe trait Plain {}

macro_rules! plain {
    ($($name:ident),* $(,)?) => {
        $(
            // SAFETY: a type of the C API with numbers, pointers and optional functions only.
            unsafe impl Plain for c::$name {}
        )*
    };
}

plain!(
    ibv_ah_attr,
    ibv_async_event,
    ibv_cq_ex,
    ibv_device,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_port_attr,
    ibv_qp_attr,
    ibv_qp_ex,
    ibv_qp_init_attr_ex,
    ibv_sa_path_rec,
    ibv_srq,
    ibv_send_wr,
    rdma_addrinfo,
    rdma_cm_event,
    rdma_cm_id,
    rdma_conn_param,
    rdma_sockaddr,
    rdma_ud_param,
    verbs_context,
);

/// Returns a C structure with all bytes zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` guarantees that zeros are a valid value.
    unsafe { std::mem::zeroed() }
}
