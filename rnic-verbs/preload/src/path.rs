//! Paths that lead to the kernel's RDMA devices lead into the tree.

use std::mem::MaybeUninit;

use libc::{c_char, strlen};

/// Longest path, its zero byte included, that is mapped; what is longer is handed on as it is.
const ROOM: usize = libc::PATH_MAX as usize;

/// What the tree stands for: paths that begin like this, and how much of that goes.
const PREFIXES: [(&[u8], usize); 3] = [
    // `infiniband_verbs` and its like, too.
    (b"/sys/class/infiniband", b"/sys".len()),
    // Where the links in these lead.
    (b"/sys/devices/rnicd/", b"/sys".len()),
    (b"/dev/infiniband", 0),
];

/// Calls with the path, or with where it leads in the tree.
///
/// # Safety
///
/// The path is null or ends in a zero byte.
pub(crate) unsafe fn mapped<T>(path: *const c_char, call: impl FnOnce(*const c_char) -> T) -> T {
    // SAFETY: as the caller says.
    let Some(cut) = (unsafe { cut_of(path) }) else { return call(path) };
    // SAFETY: the name ends in a zero byte. Programs that change their environment while other
    // threads read it break every other reader as well.
    let root = unsafe { libc::getenv(c"RNIC_TREE".as_ptr()) };
    if root.is_null() {
        return call(path);
    }
    let mut whole = [const { MaybeUninit::<u8>::uninit() }; ROOM];
    let to = whole.as_mut_ptr().cast::<u8>();
    // SAFETY: both end in zero bytes, and the cut is within the path; what is copied fits.
    unsafe {
        let rest = path.add(cut);
        let (first, second) = (strlen(root), strlen(rest) + 1);
        if first == 0 || first + second > ROOM {
            return call(path);
        }
        to.copy_from_nonoverlapping(root.cast(), first);
        to.add(first).copy_from_nonoverlapping(rest.cast(), second);
    }
    call(to.cast_const().cast())
}

/// How much of a path goes if it leads into the tree; none if it does not.
///
/// # Safety
///
/// As of [`mapped`].
unsafe fn cut_of(path: *const c_char) -> Option<usize> {
    if path.is_null() {
        return None;
    }
    let found = PREFIXES.iter().find(|(prefix, _)| {
        prefix.iter().enumerate().all(|(at, byte)| {
            // SAFETY: all bytes before are those of the prefix, so the path has not ended.
            unsafe { path.add(at).cast::<u8>().read() == *byte }
        })
    });
    found.map(|(_, cut)| *cut)
}
