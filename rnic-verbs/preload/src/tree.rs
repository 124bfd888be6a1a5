//! The daemon's tree, and the part of it that the program sees.

use std::ffi::CStr;

use libc::c_char;

unsafe extern "C" {
    // secure_getenv(3), which the `libc` crate lacks.
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Folder of the tree that contains the views: one for each device, and one for the RoCE devices.
pub(crate) const VIEWS: &[u8] = b"/views/";

/// Tree of the system's daemon, for programs without the variable (`/etc/ld.so.preload`). Only root
/// and the daemon's user can create files in its folder.
const SERVICE_TREE: &[u8] = b"/run/rnicd/rnicd.sock.tree";

/// Returns the root of the tree (`RNIC_TREE`, by default that of the system's daemon).
pub(crate) fn root() -> Option<&'static [u8]> {
    let root = variable(c"RNIC_TREE").unwrap_or(SERVICE_TREE);
    (root.first() == Some(&b'/')).then_some(root)
}

/// View of the RoCE devices.
const ROCE_VIEW: &[u8] = b".roce";

/// Returns the name of the view with the devices that the program sees: the only device in
/// `RNIC_DEVICES`, or the RoCE devices without this variable. Returns `None`, for the whole tree,
/// if the variable names several devices.
pub(crate) fn view() -> Option<&'static [u8]> {
    let names = variable(c"RNIC_DEVICES").unwrap_or_default().trim_ascii();
    if names.is_empty() {
        return Some(ROCE_VIEW);
    }
    let is_name = names[0] != b'.' && !names.iter().any(|byte| b",/".contains(byte));
    is_name.then_some(names)
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
