//! Pointers that programs pass: structures, results, arrays and strings.
//!
//! # Safety
//!
//! The conversions rely on the rules of the manual pages: a pointer is null where that is allowed,
//! or points to the structure that the page describes; no thread changes the structure during the
//! call; memory that a request refers to stays valid until the request has completed. A program
//! that breaks a rule breaks itself, as with any C library. It gains no access to the daemon or to
//! other programs.
//!
//! The library never forms a reference to a structure that it writes, because the program may have
//! left it uninitialised.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use crate::errno::Errno;

/// A parameter of a C function (see [`entry!`](crate::ffi::entry::entry)).
pub(crate) trait Argument {
    /// The type in C.
    type C;

    /// # Safety
    ///
    /// The program passes `c` to a function in the current call, and obeys the rules of this
    /// module.
    unsafe fn from_c(c: Self::C) -> Self;
}

macro_rules! as_is {
    ($([$($of:ident)?] $type:ty;)*) => {$(
        impl$(<$of>)? Argument for $type {
            type C = Self;

            unsafe fn from_c(c: Self) -> Self {
                c
            }
        }
    )*};
}

as_is! {
    [] c_int;
    [] c_uint;
    [] u8;
    [] u16;
    [] u64;
    [] usize;
    // A pointer to an object, which `handles` checks, or a pointer that is only stored.
    [T] *mut T;
    [T] *const T;
}

/// A structure that a function reads.
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T> Argument for In<T> {
    type C = *const T;

    unsafe fn from_c(c: *const T) -> Self {
        In(c)
    }
}

impl<T: Copy> In<T> {
    /// Returns a copy of the structure.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the pointer is null.
    pub(crate) fn read(self, name: &str) -> Result<T, Errno> {
        self.optional().ok_or_else(|| null(name))
    }

    /// Copies the first `length` bytes of the structure over `default`: older programs have a
    /// structure without the last fields.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the pointer is null.
    ///
    /// # Safety
    ///
    /// The structure of the program has `length` bytes, and the fields of `T` accept every value.
    pub(crate) unsafe fn read_prefix(
        self,
        name: &str,
        default: T,
        length: usize,
    ) -> Result<T, Errno> {
        if self.0.is_null() {
            return Err(null(name));
        }
        let mut copy = MaybeUninit::new(default);
        let length = length.min(size_of::<T>());
        // SAFETY: the caller guarantees it, and `length` is at most the size of the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(self.0.cast::<u8>(), copy.as_mut_ptr().cast(), length);
            Ok(copy.assume_init())
        }
    }

    /// Returns a copy of the structure, or `None` for a null pointer.
    pub(crate) fn optional(self) -> Option<T> {
        // SAFETY: the pointer is not null, so it is valid during the call.
        (!self.0.is_null()).then(|| unsafe { self.0.read() })
    }
}

/// Memory for a result.
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T> Argument for Out<T> {
    type C = *mut T;

    unsafe fn from_c(c: *mut T) -> Self {
        Out(c)
    }
}

impl<T> Out<T> {
    /// Checks that the pointer is not null.
    ///
    /// # Errors
    ///
    /// `EINVAL` otherwise.
    pub(crate) fn required(self, name: &str) -> Result<Self, Errno> {
        if self.0.is_null() { Err(null(name)) } else { Ok(self) }
    }

    /// Writes the result, unless the pointer is null.
    pub(crate) fn write(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the pointer has room for a `T` during the call.
            unsafe { self.0.write(value) };
        }
    }

    /// Returns the memory for `count` results.
    ///
    /// # Safety
    ///
    /// The manual page requires room for `count` results, and this call does not use the memory
    /// otherwise while the slice is in use.
    pub(crate) unsafe fn slots<'a>(self, count: usize) -> &'a mut [MaybeUninit<T>] {
        if count == 0 || self.0.is_null() {
            return &mut [];
        }
        // SAFETY: the caller guarantees it. The slots may be uninitialised.
        unsafe { std::slice::from_raw_parts_mut(self.0.cast(), count) }
    }

    /// Copies as much of a structure as fits, and fills the rest of `length` with zeros.
    ///
    /// # Safety
    ///
    /// The manual page requires room for `length` bytes, the size of an older or newer structure,
    /// at the place with this index.
    pub(crate) unsafe fn write_prefix(self, value: &T, index: usize, length: usize) {
        let common = length.min(size_of::<T>());
        // SAFETY: the caller guarantees the room, and `common` is at most the size of `value`.
        unsafe {
            let to = self.0.cast::<u8>().add(index * length);
            std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast(), to, common);
            to.add(common).write_bytes(0, length - common);
        }
    }
}

/// A structure of which only some fields are valid: the program's headers may lack the last ones,
/// or a mask selects fields. Read and written by field, with [`get!`](crate::ffi::pointers::get)
/// and [`set!`](crate::ffi::pointers::set).
#[derive(Clone, Copy)]
pub(crate) struct InOut<T>(*mut T);

impl<T> Argument for InOut<T> {
    type C = *mut T;

    unsafe fn from_c(c: *mut T) -> Self {
        InOut(c)
    }
}

impl<T> InOut<T> {
    /// Returns access to the fields.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the pointer is null.
    pub(crate) fn required(self, name: &str) -> Result<Place<T>, Errno> {
        self.optional().ok_or_else(|| null(name))
    }

    /// Returns access to the fields, or `None` for a null pointer.
    pub(crate) fn optional(self) -> Option<Place<T>> {
        (!self.0.is_null()).then_some(Place(self.0))
    }
}

/// The fields of a structure of the program.
#[derive(Clone, Copy)]
pub(crate) struct Place<T>(*mut T);

impl<T> Place<T> {
    /// Returns a copy of the whole structure.
    pub(crate) fn read(self) -> T
    where
        T: Copy,
    {
        // SAFETY: as for `Fields`.
        unsafe { self.0.read() }
    }

    /// Replaces the first `length` bytes of the structure: older programs have a structure without
    /// the last fields.
    ///
    /// # Safety
    ///
    /// The structure of the program has `length` bytes.
    pub(crate) unsafe fn write_prefix(self, value: &T, length: usize) {
        // SAFETY: the caller guarantees it.
        unsafe { Out(self.0).write_prefix(value, 0, length) }
    }

    /// Returns a structure with which this one begins.
    ///
    /// # Safety
    ///
    /// `T` begins with the fields of `U`.
    pub(crate) unsafe fn prefix<U>(self) -> Place<U> {
        Place(self.0.cast())
    }
}

/// A C structure whose fields are accessed without a reference to the structure.
///
/// # Safety
///
/// The fields that the manual page describes are valid for reads and writes at `at`.
pub(crate) unsafe trait Fields {
    /// The structure.
    type C;

    fn at(&self) -> *mut Self::C;
}

// SAFETY: the program obeys the rules of this module.
unsafe impl<T> Fields for Place<T> {
    type C = T;

    fn at(&self) -> *mut T {
        self.0
    }
}

/// Reads a field: `get!(PLACE.FIELD)`.
macro_rules! get {
    ($place:ident.$($field:ident).+) => {{
        let at = $crate::ffi::pointers::Fields::at(&$place);
        // SAFETY: `Fields` guarantees that the field is readable. The program may write the head of
        // an object at any time.
        unsafe { (&raw const (*at).$($field).+).read_volatile() }
    }};
}

/// Writes a field: `set!(PLACE.FIELD = VALUE)`.
macro_rules! set {
    ($place:ident.$($field:ident).+ = $value:expr) => {{
        let value = $value;
        let at = $crate::ffi::pointers::Fields::at(&$place);
        // SAFETY: `Fields` guarantees that the field is writable. The program may read the head of
        // an object at any time.
        unsafe { (&raw mut (*at).$($field).+).write_volatile(value) }
    }};
}

/// Adds to a 32-bit counter, which the program may read at any time: `add!(PLACE.FIELD += MORE)`.
macro_rules! add {
    ($place:ident.$($field:ident).+ += $more:expr) => {{
        let more: u32 = $more;
        let at = $crate::ffi::pointers::Fields::at(&$place);
        // SAFETY: `Fields` guarantees that the field is writable. It has the alignment of
        // `AtomicU32`, and the library only adds to it.
        let counter = unsafe {
            std::sync::atomic::AtomicU32::from_ptr((&raw mut (*at).$($field).+).cast())
        };
        counter.fetch_add(more, std::sync::atomic::Ordering::Relaxed);
    }};
}

pub(crate) use add;
pub(crate) use get;
pub(crate) use set;

/// Bytes that a function reads.
///
/// # Safety
///
/// `from` is null or points to `length` bytes, which do not change while the result is in use.
pub(crate) unsafe fn bytes<'a>(from: *const c_void, length: usize) -> &'a [u8] {
    if from.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts(from.cast(), length) }
}

/// A string, or null.
pub(crate) struct Text(*const c_char);

impl Argument for Text {
    type C = *const c_char;

    unsafe fn from_c(c: *const c_char) -> Self {
        Text(c)
    }
}

impl Text {
    /// Returns the text, or `None` for a null pointer.
    pub(crate) fn read(&self) -> Result<Option<&str>, std::str::Utf8Error> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: the pointer is a C string, which does not change during the call.
        unsafe { CStr::from_ptr(self.0) }.to_str().map(Some)
    }
}

fn null(name: &str) -> Errno {
    invalid!("{name} is a null pointer")
}
