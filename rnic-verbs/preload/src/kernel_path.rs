//! Maps paths in the daemon's tree to the paths under which programs see them.

use libc::c_char;

use crate::tree;

/// Returns the path of a file of the tree as the program sees it, in two parts. Returns `None` for
/// other files.
pub(crate) fn of<'a>(path: &'a [u8], root: &[u8]) -> Option<(&'static [u8], &'a [u8])> {
    let mut rest = below(path, root)?;
    if let Some(view) = rest.strip_prefix(tree::VIEWS) {
        let end = view.iter().position(|byte| *byte == b'/').unwrap_or(view.len());
        rest = &view[end..];
    }
    if below(rest, b"/dev").is_some() { Some((b"", rest)) } else { Some((b"/sys", rest)) }
}

/// Returns the rest of a path after `folder`. Returns `None` if the path is not in this folder.
fn below<'a>(path: &'a [u8], folder: &[u8]) -> Option<&'a [u8]> {
    let rest = path.strip_prefix(folder)?;
    (rest.is_empty() || rest[0] == b'/').then_some(rest)
}

/// Replaces a path of the tree by the path that the program sees. Returns its new length, at most
/// `length`. If the tree's root is shorter than `/sys`, the path stays unchanged.
///
/// # Safety
///
/// `length` bytes from `text` on must be readable and writable, and only this thread may use them.
pub(crate) unsafe fn show(text: *mut c_char, length: usize) -> usize {
    let Some(root) = tree::root().filter(|root| root.len() >= b"/sys".len()) else {
        return length;
    };
    // SAFETY: the caller guarantees that the bytes are readable and writable, and that only this
    // thread uses them.
    let bytes = unsafe { std::slice::from_raw_parts_mut(text.cast::<u8>(), length) };
    let Some((start, rest)) = of(bytes, root) else { return length };
    let from = length - rest.len();
    bytes.copy_within(from.., start.len());
    bytes[..start.len()].copy_from_slice(start);
    length - from + start.len()
}

/// Like [`show`], for text that ends in a zero byte. Accepts a null pointer.
///
/// # Safety
///
/// As for [`show`], for the whole text.
pub(crate) unsafe fn show_string(text: *mut c_char) {
    if text.is_null() {
        return;
    }
    // SAFETY: the text ends in a zero byte and is readable.
    let length = unsafe { libc::strlen(text) };
    // SAFETY: the caller guarantees the same as `show` requires.
    let shown = unsafe { show(text, length) };
    if shown < length {
        // SAFETY: the byte is part of the text, which is writable.
        unsafe { *text.add(shown) = 0 };
    }
}

/// Returns true if a truncated path may be a path of the tree.
pub(crate) fn may_be(start: &[u8]) -> bool {
    tree::root().is_some_and(|root| root.starts_with(start) || start.starts_with(root))
}
