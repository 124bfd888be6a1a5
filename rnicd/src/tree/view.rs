//! Views of the tree: the entries of `class` and `dev` that a machine with only some of the devices
//! would have. `views/NAME` is for one device, `views/NAME,NAME` for several, in ascending order of
//! their names, and `views/.roce` for all RoCE devices. Programs see the latter unless they select
//! devices. The preload library looks there.

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

/// Returns the views of each set of at least two devices, given by name and entries. If there are
/// more than [`MAX_DEVICES`], returns none: programs that select several see all.
pub(super) fn of_sets(shared: &[Entry], mut devices: Vec<(&str, &Vec<Entry>)>) -> Vec<Entry> {
    if devices.len() > MAX_DEVICES {
        return Vec::new();
    }
    devices.sort_unstable_by_key(|(name, _)| *name);
    let sets = (0..1u32 << devices.len()).filter(|set| set.count_ones() > 1);
    let view = |set: u32| {
        let chosen = devices.iter().enumerate().filter(|(n, _)| set >> n & 1 == 1);
        let (names, own): (Vec<_>, Vec<_>) = chosen.map(|(_, device)| *device).unzip();
        let name = names.join(",");
        let fits = name.len() <= MAX_NAME;
        fits.then(|| of(&name, shared.iter().chain(own.into_iter().flatten())))
    };
    sets.filter_map(view).flatten().collect()
}

/// `NAME_MAX` of a file name.
const MAX_NAME: usize = 255;
/// Maximum number of devices for which each set has a view: 26 views of several devices.
const MAX_DEVICES: usize = 5;
