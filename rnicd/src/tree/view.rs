//! A view of each device, `views/NAME`: the entries of `class` and `dev` that a machine with only
//! this device would have. The preload library looks there for a program that sees one device.

use std::path::Path;

use super::layout::{Content, Entry};

/// Appends the view of a device. `shared` entries are in every view, and `own` in this one only.
/// Their positions are those in `all`.
pub(super) fn add(
    all: &mut Vec<Entry>,
    device: &str,
    shared: std::ops::Range<usize>,
    own: std::ops::Range<usize>,
) {
    let below = |folder: &str| format!("views/{device}/{folder}");
    let entries = all[shared].iter().chain(&all[own]);
    let shown = entries.filter(|entry| {
        let path = Path::new(&entry.path);
        path.starts_with("class") || path.starts_with("dev")
    });
    let mut view: Vec<Entry> =
        shown.map(|entry| Entry { path: below(&entry.path), what: entry.what.clone() }).collect();
    // Target of the relative links in `class`.
    let devices = Content::Link("../../devices".to_owned());
    view.push(Entry { path: below("devices"), what: devices });
    all.append(&mut view);
}
