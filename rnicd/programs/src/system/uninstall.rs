//! Removes an installation.

use std::collections::HashMap;
use std::path::Path;

use super::manifest::{Item, ItemKind, MANIFEST, Manifest};
use super::parts::LOADER_CONF;
use super::report::{LEFT, Report};
use super::root::Root;
use super::{SystemError, change, installed, loader, mount, service};

/// Removes everything that the manifest lists.
pub fn uninstall(root: &Root, dry_run: bool) -> Result<Report, SystemError> {
    let manifest = installed(root)?;
    let mut report = Report::default();
    if dry_run {
        for item in manifest.items.iter().rev() {
            report.add("remove", description(item));
        }
        return Ok(report);
    }
    service::stop(root)?;
    // A mount is not undone by removing files.
    if root.is_own() {
        mount::hide()?;
    }
    // After a failure, the next attempt can remove the rest.
    let left = remove(root, &manifest.items)?;
    service::reload(root)?;
    report.add("removed", format!("rnicd {} from {}", manifest.version, manifest.prefix.display()));
    for left in left {
        report.add(LEFT, left);
    }
    Ok(report)
}

/// Removes items and the manifest. Returns descriptions of the items that stay.
pub fn remove(root: &Root, items: &[Item]) -> Result<Vec<String>, SystemError> {
    let manifest = root.at(Path::new(MANIFEST))?;
    let is_above = |item: &&Item| Path::new(MANIFEST).starts_with(&item.path);
    let (above, others): (Vec<&Item>, Vec<&Item>) = items.iter().partition(is_above);
    let others: Vec<Item> = others.into_iter().cloned().collect();
    let above: Vec<Item> = above.into_iter().cloned().collect();
    let mut left = change::remove_all(root, &others)?;
    refresh_loader(root, items)?;
    std::fs::remove_file(&manifest).map_err(SystemError::at("cannot remove", &manifest))?;
    left.extend(change::remove_all(root, &above)?);
    Ok(left)
}

/// Updates the loader's cache after the removal of items. A cache that the installation has created
/// is one of the items.
pub fn refresh_loader(root: &Root, items: &[Item]) -> Result<(), SystemError> {
    let has = |path: &str| items.iter().any(|item| item.path == Path::new(path));
    if has(LOADER_CONF) && !has("/etc/ld.so.cache") && loader::can_update(root) {
        loader::update(root)?;
    }
    Ok(())
}

fn description(item: &Item) -> String {
    let path = item.path.display();
    match &item.kind {
        ItemKind::Folder => format!("{path}/ if it is empty"),
        ItemKind::Line { line, .. } => format!("from {path}: {line}"),
        ItemKind::Mount => format!("mount over {path}"),
        ItemKind::File { .. } | ItemKind::Link { .. } | ItemKind::Output => path.to_string(),
    }
}

/// Returns the items of an earlier installation that a new one does not contain.
pub fn stale(root: &Root, old: Option<&Manifest>, new: &[Item]) -> Result<Vec<Item>, SystemError> {
    let mut places = HashMap::new();
    for item in new {
        places.insert(root.real(&item.path)?, item);
    }
    let mut stale = Vec::new();
    for item in old.iter().flat_map(|old| &old.items) {
        let other = places.get(&root.real(&item.path)?);
        if other.is_none_or(|other| is_other_line(&item.kind, &other.kind)) {
            stale.push(item.clone());
        }
    }
    Ok(stale)
}

/// Returns true for different lines of one file.
fn is_other_line(old: &ItemKind, new: &ItemKind) -> bool {
    matches!((old, new), (ItemKind::Line { line, .. }, ItemKind::Line { line: other, .. }) if line != other)
}
