//! `dlopen(3)` of rdma-core's libraries under any file name.
//!
//! rnicd's libraries are loaded before the program (`LD_PRELOAD`), so `dlopen(3)` with their
//! SONAMEs returns them. Programs also load such libraries by a path, by the name for linking
//! (`libibverbs.so`), or by a name with a hash (Python wheels). This module replaces these names by
//! the SONAMEs.

use std::arch::naked_asm;
use std::ffi::CStr;

use libc::{c_char, c_int, c_void};

use crate::bytes::Bytes;
use crate::next::next;

/// SONAMEs of rnicd's libraries, and the start of the names of files that contain such a library.
const LIBRARIES: [(&CStr, &[u8]); 2] =
    [(c"libibverbs.so.1", b"libibverbs"), (c"librdmacm.so.1", b"librdmacm")];

/// Same as the C library's function of this name.
///
/// Jumps to that function instead of calling it, because it searches in the `DT_RUNPATH` of the
/// library that contains the return address, and opens the file in that library's namespace.
///
/// # Safety
///
/// Same as for the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rsi",
        "call {replaced}",
        "pop rsi",
        "mov rdi, rax",
        "jmp rdx",
        replaced = sym replaced,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x30, x1, [sp, #-16]!",
        "bl {replaced}",
        "mov x16, x1",
        "ldp x30, x1, [sp], #16",
        "br x16",
        replaced = sym replaced,
    );
}

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// First argument and function of the call, returned in the registers for results.
#[repr(C)]
struct Call {
    name: *const c_char,
    function: Dlopen,
}

extern "C" fn replaced(name: *const c_char) -> Call {
    let ours = LIBRARIES.iter().find(|(_, start)| is_file_of(start, name));
    let name = ours.map_or(name, |(soname, _)| soname.as_ptr());
    Call { name, function: next!(dlopen: Dlopen).unwrap_or(missing) }
}

unsafe extern "C" fn missing(_: *const c_char, _: c_int) -> *mut c_void {
    std::ptr::null_mut()
}

/// Returns true if the last component of a path is `start`, then a hash or nothing, then `.so` and
/// a version or nothing.
fn is_file_of(start: &[u8], path: *const c_char) -> bool {
    let mut bytes = Bytes::of(path);
    let mut name = Bytes::of(path);
    loop {
        match bytes.next() {
            Some(b'/') => name = bytes.clone(),
            Some(0) => break,
            Some(_) => {}
            None => return false,
        }
    }
    if !start.iter().all(|byte| name.next() == Some(*byte)) {
        return false;
    }
    let mut byte = name.next();
    if byte == Some(b'-') {
        let mut hash = std::iter::from_fn(|| name.next());
        byte = hash.find(|byte| !byte.is_ascii_hexdigit());
    }
    byte == Some(b'.')
        && name.next() == Some(b's')
        && name.next() == Some(b'o')
        && matches!(name.next(), Some(0 | b'.'))
}
