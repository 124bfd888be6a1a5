//! Views of the tree: the entries of `class` and `dev` that a machine with only some of the devices
//! would have. `views/NAME` is for one device, `views/.roce` for all RoCE devices. Programs see the
//! latter unless they select devices. The preload library looks there.

use std::path::Path;

use super::layout::{Content, Entry};

/// Name of the view of all RoCE devices. No device has it: names do not begin with a dot.
pub(super) const ROCE: &str = ".roce";

/// Returns a view of these entries of the tree.
pub(super) fn of<'a>(name: &str, entries: impl Iterator<Item = &'a Entry>) -> Vec<Entry> {
    let below = |folder: &str| format!("views/{name}/{folder}");
    let shown = entries.filter(|entry| {
        let path = Path::new(&entry.path);
        path.starts_with("class") || path.starts_with("dev")
    });
    let mut view: Vec<Entry> =
        shown.map(|entry| Entry { path: below(&entry.path), what: entry.what.clone() }).collect();
    // Target of the relative links in `class`.
    let devices = Content::Link("../../devices".to_owned());
    view.push(Entry { path: below("devices"), what: devices });
    view
}
