//! The daemon's tree, and the part of it that the program sees.

use std::ffi::CStr;

use libc::c_char;

unsafe extern "C" {
    // secure_getenv(3), which the `libc` crate lacks.
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Folder of the tree that contains a view for each device.
pub(crate) const VIEWS: &[u8] = b"/views/";

/// Tree of the system's daemon, for programs without the variable (`/etc/ld.so.preload`). Only root
/// and the daemon's user can create files in its folder.
const SERVICE_TREE: &[u8] = b"/run/rnicd/rnicd.sock.tree";

/// Returns the root of the tree (`RNIC_TREE`, by default that of the system's daemon).
pub(crate) fn root() -> Option<&'static [u8]> {
    let root = variable(c"RNIC_TREE").unwrap_or(SERVICE_TREE);
    (root.first() == Some(&b'/')).then_some(root)
}

/// Returns the only device that the program sees, if `RNIC_DEVICES` names a single one. Its view
/// contains the files of that device only.
pub(crate) fn only_device() -> Option<&'static [u8]> {
    let name = variable(c"RNIC_DEVICES")?.trim_ascii();
    let is_name = !name.is_empty() && name[0] != b'.' && !name.iter().any(|b| b",/".contains(b));
    is_name.then_some(name)
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: the name must end in a zero byte. The environment must not change while the result
    // is in use; programs that change it while other threads read it break every other reader as
    // well.
    let value = unsafe { secure_getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: values in the environment end in a zero byte.
    Some(unsafe { CStr::from_ptr(value) }.to_bytes())
}
