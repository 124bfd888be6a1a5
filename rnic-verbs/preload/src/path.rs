//! Maps paths of the kernel's RDMA devices to paths in the daemon's tree.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use libc::c_char;

use crate::bytes::Bytes;

unsafe extern "C" {
    // secure_getenv(3), which the `libc` crate lacks.
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Maximum length of a mapped path including its zero byte. Longer paths are passed on unchanged.
const ROOM: usize = libc::PATH_MAX as usize;

/// Tree of the system's daemon, for programs without the variable (`/etc/ld.so.preload`). Only root
/// and the daemon's user can create files in its folder.
const SERVICE_TREE: &[u8] = b"/run/rnicd/rnicd.sock.tree";

/// Prefixes of paths that the tree replaces, with the number of leading bytes that are removed.
const PREFIXES: [(&[u8], usize); 3] = [
    // Matches `infiniband_verbs` and similar too.
    (b"/sys/class/infiniband", b"/sys".len()),
    // Target of the links in these directories.
    (b"/sys/devices/rnicd/", b"/sys".len()),
    (b"/dev/infiniband", 0),
];

/// Calls `call` with the path, or with its counterpart in the tree. The path may be any pointer: an
/// unreadable pointer is passed on, and the C library and the kernel reject it.
pub(crate) fn mapped<T>(path: *const c_char, call: impl FnOnce(*const c_char) -> T) -> T {
    let mut whole = [const { MaybeUninit::<u8>::uninit() }; ROOM];
    match fill(path, &mut whole) {
        Some(()) => call(whole.as_ptr().cast()),
        None => call(path),
    }
}

/// Writes the counterpart of a path in the tree, with its zero byte. Returns `None` if the path has
/// no counterpart or if it is too long.
fn fill(path: *const c_char, whole: &mut [MaybeUninit<u8>; ROOM]) -> Option<()> {
    let cut = cut_of(path)?;
    // SAFETY: the name must end in a zero byte. The environment must not change during the call;
    // programs that change it while other threads read it break every other reader as well.
    let root = unsafe { secure_getenv(c"RNIC_TREE".as_ptr()) };
    let root = if root.is_null() {
        SERVICE_TREE
    } else {
        // SAFETY: values in the environment end in a zero byte.
        unsafe { CStr::from_ptr(root) }.to_bytes()
    };
    if root.is_empty() || root.len() >= ROOM {
        return None;
    }
    let (start, rest) = whole.split_at_mut(root.len());
    for (to, byte) in start.iter_mut().zip(root) {
        to.write(*byte);
    }
    let mut bytes = Bytes::of(path.wrapping_add(cut));
    for to in rest {
        let byte = bytes.next()?;
        to.write(byte);
        if byte == 0 {
            return Some(());
        }
    }
    None
}

/// Returns the length of the prefix that the tree replaces, or `None` for other paths.
fn cut_of(path: *const c_char) -> Option<usize> {
    let mut start = Bytes::of(path);
    if !start.is_readable() {
        return None;
    }
    let found = PREFIXES.iter().find(|(prefix, _)| {
        let mut bytes = start.clone();
        prefix.iter().all(|byte| bytes.next() == Some(*byte))
    });
    found.map(|(_, cut)| *cut)
}
