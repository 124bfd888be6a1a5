//! The daemon's tree, and the part of it that the program sees.

use std::ffi::CStr;

use libc::c_char;

unsafe extern "C" {
    // secure_getenv(3), which the `libc` crate lacks.
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Folder of the tree that contains the views: one for each device, one for each set of devices if
/// the daemon has few devices, and one for the RoCE devices.
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

/// The devices that the program sees: those in `RNIC_DEVICES`, or the RoCE devices without this
/// variable.
pub(crate) struct View(&'static [u8]);

impl View {
    /// Returns the view; `None`, for the whole tree, if a name cannot be a file name.
    pub(crate) fn of_program() -> Option<Self> {
        let list = variable(c"RNIC_DEVICES").unwrap_or_default();
        let view = View(if list.trim_ascii().is_empty() { ROCE_VIEW } else { list });
        let is_name = |name: &[u8]| !name.contains(&b'/') && (name[0] != b'.' || name == ROCE_VIEW);
        let mut names = view.names();
        names.all(is_name).then_some(view)
    }

    /// Returns the names in ascending order. Joined by commas, they are the name of the view.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static [u8]> + use<> {
        let list = self.0;
        std::iter::successors(after(list, None), move |last| after(list, Some(*last)))
    }
}

/// Returns the first name of a list, in ascending order, that is greater than `last`.
fn after(list: &'static [u8], last: Option<&[u8]>) -> Option<&'static [u8]> {
    let names = list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    names.filter(|name| !name.is_empty() && last.is_none_or(|last| *name > last)).min()
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
