//! Results of the commands, as text and as JSON.

use std::fmt;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use serde::Serialize;
use serde::ser::SerializeMap;

use super::SystemError;
use super::manifest::{ItemKind, Manifest};
use super::parts::{COMMANDS, PRELOAD_LIST, library_folder};
use super::plan::{digest_of, find_line};
use super::root::Root;
use super::service::{SOCKET, TREE, serving};
use super::{loader, mount};

/// Names with one or more lines each.
#[derive(Debug, Default)]
pub struct Report {
    lines: Vec<(&'static str, Vec<String>)>,
}

impl Report {
    /// Adds a line.
    pub fn add(&mut self, name: &'static str, line: impl Into<String>) {
        match self.lines.last_mut() {
            Some((last, lines)) if *last == name => lines.push(line.into()),
            _ => self.lines.push((name, vec![line.into()])),
        }
    }

    /// Returns an error if items could not be removed.
    pub fn complaint(&self) -> Option<SystemError> {
        let (_, left) = self.lines.iter().find(|(name, _)| *name == LEFT)?;
        Some(SystemError::Left(left.clone()))
    }
}

/// Name of the lines about items that could not be removed.
pub const LEFT: &str = "left";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, lines) in &self.lines {
            for line in lines {
                writeln!(f, "{name:<width$}  {line}")?;
            }
        }
        Ok(())
    }
}

impl Serialize for Report {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.lines.len()))?;
        for (name, lines) in &self.lines {
            map.serialize_entry(name, lines)?;
        }
        map.end()
    }
}

/// Describes an installation.
pub fn status(root: &Root, manifest: &Manifest) -> Report {
    let mut report = Report::default();
    let prefix = &manifest.prefix;
    report.add("installed", format!("rnicd {} in {}", manifest.version, prefix.display()));
    if !manifest.complete {
        report.add("installed", "incompletely: install again, or uninstall");
    }
    for item in &manifest.items {
        if let Some(what) = difference(root, item) {
            report.add("changed", format!("{} ({what})", item.path.display()));
        }
    }
    if loader::can_update(root) {
        match loader::check(root, prefix) {
            Ok(()) => report.add("loader", "finds the libraries of rnicd first"),
            Err(error) => report.add("loader", error.to_string()),
        }
    }
    if root.is_own() {
        daemon(&mut report);
    }
    commands(&mut report, prefix, manifest);
    let has = |path: &str| manifest.item(Path::new(path)).is_some();
    if root.is_own() && mount::is_mounted() {
        report.add("/sys", "shows the devices by a mount over /sys/class");
    } else if has(PRELOAD_LIST) {
        report.add("/sys", format!("shows the devices by {PRELOAD_LIST}"));
    } else {
        report.add("/sys", "does not show the devices (--mount, --preload)");
    }
    report
}

/// Adds the state of the daemon, its clients and its devices.
pub fn daemon(report: &mut Report) {
    match serving() {
        Ok(pid) => report.add("daemon", format!("pid {pid}, at {SOCKET}")),
        Err(error) => report.add("daemon", error),
    }
    if let Ok(found) = fs::metadata(SOCKET) {
        let mode = found.permissions().mode() & 0o777;
        report.add("users", users_of(mode, found.gid()));
    }
    let devices = fs::read_dir(Path::new(TREE).join("class/infiniband"));
    let mut names: Vec<String> = devices
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    if !names.is_empty() {
        report.add("devices", names.join(", "));
    }
}

fn users_of(mode: u32, gid: u32) -> String {
    let groups = fs::read_to_string(super::accounts::GROUPS).unwrap_or_default();
    let id = gid.to_string();
    let name = groups.lines().find(|line| line.split(':').nth(2) == Some(&id));
    let name = name.and_then(|line| line.split(':').next()).unwrap_or(&id);
    match mode {
        _ if mode & 0o006 == 0o006 => "everyone".to_owned(),
        _ if mode & 0o060 == 0o060 => format!("root and members of the group {name}"),
        _ => "root".to_owned(),
    }
}

/// Adds the folders of the commands.
pub fn commands(report: &mut Report, prefix: &Path, manifest: &Manifest) {
    report.add("commands", format!("{}", library_folder(prefix).join("bin").display()));
    for (name, folder) in COMMANDS {
        let path = prefix.join(folder).join(name);
        if manifest.item(&path).is_some() {
            report.add("commands", path.display().to_string());
        }
    }
}

/// Returns the difference between an item and its installed state.
fn difference(root: &Root, item: &super::manifest::Item) -> Option<&'static str> {
    let place = match item.place(root) {
        Ok(place) => place,
        Err(_) => return Some("leads out of the root"),
    };
    let is_there = fs::symlink_metadata(&place).is_ok();
    match &item.kind {
        // Files below /run are gone after a restart.
        ItemKind::Output | ItemKind::Mount => None,
        ItemKind::Folder if item.path.starts_with("/run") => None,
        _ if !is_there => Some("missing"),
        ItemKind::Folder => None,
        ItemKind::File { sha256 } => {
            let same = digest_of(&place).is_ok_and(|digest| sha256.contains(&digest));
            (!same).then_some("changed")
        }
        ItemKind::Link { to } => {
            let same = fs::read_link(&place).is_ok_and(|target| target == *to);
            (!same).then_some("changed")
        }
        ItemKind::Line { line, .. } => {
            let text = fs::read(&place).unwrap_or_default();
            find_line(&text, line).is_none().then_some("lacks its line")
        }
    }
}
