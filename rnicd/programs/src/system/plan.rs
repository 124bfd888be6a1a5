//! Compares the parts of an installation with the system.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::SystemError;
use super::manifest::{Item, ItemKind, Manifest};
use super::parts::{Content, Part};
use super::root::Root;

/// A part and the action for it.
#[derive(Debug)]
pub struct Step {
    pub part: Part,
    /// Place of the part in the running system.
    pub place: PathBuf,
    pub action: Action,
    /// Record of the part; `None` if it is not of this installation.
    pub item: Option<Item>,
}

/// Action for a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It exists as it should be.
    Nothing,
    Create,
    /// It exists in an earlier version.
    Replace,
    /// The administrator has changed it.
    Keep,
}

/// Decides the action for each part. `old` is the manifest of an earlier installation.
///
/// # Errors
///
/// If a file that is not of the earlier installation would be replaced.
pub fn decide(
    parts: Vec<Part>,
    root: &Root,
    old: Option<&Manifest>,
) -> Result<Vec<Step>, SystemError> {
    let mut known = HashMap::new();
    for item in old.iter().flat_map(|old| &old.items) {
        known.insert(root.real(&item.path)?, item);
    }
    let mut steps = Vec::new();
    let mut in_the_way = Vec::new();
    for part in parts {
        let place = match part.content {
            Content::Line { .. } => root.file(&part.path)?,
            _ => root.at(&part.path)?,
        };
        match decide_one(&part, &place, known.get(&root.real(&part.path)?).copied())? {
            Some((action, item)) => steps.push(Step { part, place, action, item }),
            None => in_the_way.push(part.path),
        }
    }
    if in_the_way.is_empty() { Ok(steps) } else { Err(SystemError::InTheWay { paths: in_the_way }) }
}

/// Returns the action and the record for a part, or `None` if a file of others is in the way.
fn decide_one(
    part: &Part,
    place: &Path,
    known: Option<&Item>,
) -> Result<Option<(Action, Option<Item>)>, SystemError> {
    let item = |kind| Some(Item { path: part.path.clone(), kind });
    let found = match fs::symlink_metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => Some(found.map_err(SystemError::at("cannot examine", place))?),
    };
    let decided = match &part.content {
        Content::Folder if found.is_none() => Some((Action::Create, item(ItemKind::Folder))),
        // `lib` may be a link.
        Content::Folder => place.is_dir().then(|| (Action::Nothing, known.cloned())),
        Content::Output if found.is_none() => Some((Action::Create, item(ItemKind::Output))),
        Content::Output => Some((Action::Nothing, known.cloned())),
        Content::Link { to } => {
            let link = || item(ItemKind::Link { to: to.clone() });
            let target = fs::read_link(place).ok();
            match (&found, target, known) {
                (None, ..) => Some((Action::Create, link())),
                (_, Some(target), _) if target == *to => {
                    Some((Action::Nothing, known.and_then(|_| link())))
                }
                (_, Some(target), Some(Item { kind: ItemKind::Link { to }, .. }))
                    if target == *to =>
                {
                    Some((Action::Replace, link()))
                }
                _ => None,
            }
        }
        Content::Copy { from, .. } => {
            let new = digest_of(from)?;
            decide_file(part, place, found.as_ref(), known, new)?
        }
        Content::Text(text) => {
            decide_file(part, place, found.as_ref(), known, digest(text.as_bytes()))?
        }
        Content::Line { line, create } => {
            let text = match &found {
                Some(_) => fs::read(place).map_err(SystemError::at("cannot read", place))?,
                None if *create => Vec::new(),
                None => return Ok(Some((Action::Nothing, None))),
            };
            if find_line(&text, line).is_some() {
                return Ok(Some((Action::Nothing, known.cloned())));
            }
            let newline = text.last().is_some_and(|last| *last != b'\n');
            // The earlier installation may have added another line, which this one replaces.
            let before = match known {
                Some(Item { kind: ItemKind::Line { newline, created, .. }, .. }) => {
                    (*newline, *created)
                }
                _ => (false, false),
            };
            let kind = ItemKind::Line {
                line: line.clone(),
                newline: newline || before.0,
                created: found.is_none() || before.1,
            };
            Some((Action::Create, item(kind)))
        }
    };
    Ok(decided)
}

fn decide_file(
    part: &Part,
    place: &Path,
    found: Option<&fs::Metadata>,
    known: Option<&Item>,
    new: String,
) -> Result<Option<(Action, Option<Item>)>, SystemError> {
    let file = |sha256| Some(Item { path: part.path.clone(), kind: ItemKind::File { sha256 } });
    let Some(found) = found else {
        return Ok(Some((Action::Create, file(vec![new]))));
    };
    if !found.is_file() {
        let is_kept = part.path == Path::new(super::parts::CONFIG) && place.is_file();
        return Ok(is_kept.then(|| (Action::Keep, known.cloned())));
    }
    let present = digest_of(place)?;
    let recorded = match known {
        Some(Item { kind: ItemKind::File { sha256 }, .. }) => Some(sha256),
        _ => None,
    };
    Ok(match recorded {
        _ if present == new => Some((Action::Nothing, recorded.and_then(|_| file(vec![new])))),
        Some(digests) if digests.contains(&present) => {
            Some((Action::Replace, file(vec![new, present])))
        }
        // Without a record, a configuration is the administrator's from the beginning.
        Some(_) if is_text(part) => Some((Action::Keep, known.cloned())),
        None if is_text(part) && part.path == Path::new(super::parts::CONFIG) => {
            Some((Action::Keep, None))
        }
        _ => None,
    })
}

fn is_text(part: &Part) -> bool {
    matches!(part.content, Content::Text(_))
}

/// Returns the range of a line in a text, with its newline. Of a line in the format of
/// `/etc/passwd`, only the name must match, because the administrator may have added members.
pub fn find_line(text: &[u8], line: &str) -> Option<std::ops::Range<usize>> {
    let name = line.split_once(":*:").map(|(name, _)| format!("{name}:"));
    let mut start = 0;
    for found in text.split_inclusive(|byte| *byte == b'\n') {
        let end = start + found.len();
        let bare = found.strip_suffix(b"\n").unwrap_or(found);
        let is_it = match &name {
            Some(name) => bare.starts_with(name.as_bytes()),
            None => bare == line.as_bytes(),
        };
        if is_it {
            return Some(start..end);
        }
        start = end;
    }
    None
}

/// Returns the SHA-256 digest of a file, in hexadecimal.
pub fn digest_of(path: &Path) -> Result<String, SystemError> {
    let bytes = fs::read(path).map_err(SystemError::at("cannot read", path))?;
    Ok(digest(&bytes))
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_whole_or_by_name() {
        let text = b"a\n/x/y.so\nrnicd2:x:1:\nrnicd:*:5:alice";
        assert_eq!(find_line(text, "/x/y.so"), Some(2..10));
        assert_eq!(find_line(text, "/x/y"), None);
        assert_eq!(find_line(text, "rnicd:*:7:"), Some(22..37));
        assert_eq!(find_line(b"", "a"), None);
        assert_eq!(digest(b"abc").len(), 64);
        assert!(digest(b"abc").starts_with("ba7816bf"));
    }
}
