//! Carries out the steps of an installation, reverses them after a failure, and removes
//! installed items.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, fcntl_lock};

use super::SystemError;
use super::accounts::{GROUPS, USERS};
use super::manifest::{Item, ItemKind};
use super::parts::Content;
use super::plan::{Action, Step, digest_of, find_line};
use super::root::Root;

/// The steps that were carried out, and how to undo them.
#[derive(Debug, Default)]
pub struct Changes(Vec<Undo>);

#[derive(Debug)]
enum Undo {
    /// Removes a created item.
    Remove { place: PathBuf, item: Item },
    /// Restores the earlier file or link.
    Restore { place: PathBuf },
}

impl Changes {
    /// Carries out a step.
    pub fn make(&mut self, step: &Step) -> Result<(), SystemError> {
        let place = &step.place;
        match (step.action, &step.item) {
            (Action::Create, Some(item)) => {
                // Recorded first, because a step may fail after it has changed something.
                self.0.push(Undo::Remove { place: place.clone(), item: item.clone() });
                create(step)
            }
            (Action::Replace, _) => {
                let kept = earlier(place);
                remove_file(&kept)?;
                // A second name for a file; the link itself for a link.
                fs::hard_link(place, &kept).map_err(SystemError::at("cannot keep", place))?;
                self.0.push(Undo::Restore { place: place.clone() });
                create(step)
            }
            _ => Ok(()),
        }
    }

    /// Undoes all steps in reverse order. Returns a description of each step that failed.
    pub fn undo(self) -> Vec<String> {
        let undo = |step: &Undo| match step {
            Undo::Remove { place, item } => remove(place, item).map(drop),
            Undo::Restore { place } => {
                let kept = earlier(place);
                fs::rename(&kept, place).map_err(SystemError::at("cannot restore", place))?;
                // Two names of one file remain, if it was not replaced.
                remove_file(&kept)
            }
        };
        self.0.iter().rev().filter_map(|step| undo(step).err()).map(|e| e.to_string()).collect()
    }

    /// Makes all steps permanent.
    pub fn keep(self) {
        for step in &self.0 {
            if let Undo::Restore { place } = step {
                // A file that remains is removed with the installation.
                let _ = fs::remove_file(earlier(place));
            }
        }
    }
}

fn create(step: &Step) -> Result<(), SystemError> {
    let place = &step.place;
    match &step.part.content {
        Content::Folder => {
            let make = || {
                fs::create_dir(place)?;
                fs::set_permissions(place, Permissions::from_mode(0o755))
            };
            make().map_err(SystemError::at("cannot create", place))
        }
        Content::Copy { from, mode } => {
            let mut from = File::open(from).map_err(SystemError::at("cannot read", from))?;
            write_file(place, *mode, |to| io::copy(&mut from, to).map(drop))
        }
        Content::Text(text) => write_file(place, 0o644, |to| to.write_all(text.as_bytes())),
        Content::Link { to } => {
            let new = incoming(place);
            remove_file(&new)?;
            let make = || {
                symlink(to, &new)?;
                fs::rename(&new, place)
            };
            make().map_err(SystemError::at("cannot create", place))
        }
        Content::Line { line, .. } => {
            add_line(place, line).map_err(SystemError::at("cannot write", place))
        }
        Content::Output => Ok(()),
    }
}

/// Writes a file beside its place and renames it, so that programs see it whole or not at all.
fn write_file(
    place: &Path,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), SystemError> {
    let new = incoming(place);
    remove_file(&new)?;
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        fill(&mut file)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&new, place)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&new);
        SystemError::at("cannot write", place)(error)
    })
}

/// Appends a line to a file. The file keeps its owner, mode and security label.
fn add_line(place: &Path, line: &str) -> io::Result<()> {
    let _lock = lock_accounts(place)?;
    let is_new = !place.exists();
    let mut options = OpenOptions::new();
    let mut file = options.read(true).append(true).create(true).open(place)?;
    if is_new {
        // Whatever the umask is: a list of the loader that users cannot read has no effect.
        file.set_permissions(Permissions::from_mode(0o644))?;
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let newline = if text.last().is_some_and(|last| *last != b'\n') { "\n" } else { "" };
    // One call, so that a reader sees the whole line or nothing.
    file.write_all(format!("{newline}{line}\n").as_bytes())
}

/// Removes a line from a file by writing the rest of the file over it.
fn remove_line(place: &Path, line: &str, newline: bool, created: bool) -> io::Result<()> {
    let _lock = lock_accounts(place)?;
    let mut file = match OpenOptions::new().read(true).write(true).open(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    if let Some(range) = find_line(&text, line) {
        let rest = &text[range.end..];
        // The newline that was added before the line, unless another line has followed.
        let start = range.start - usize::from(newline && rest.is_empty() && range.start > 0);
        file.seek(SeekFrom::Start(start as u64))?;
        file.write_all(rest)?;
        file.set_len((start + rest.len()) as u64)?;
    }
    if created && file.metadata()?.len() == 0 {
        fs::remove_file(place)?;
    }
    Ok(())
}

/// Takes the lock of `lckpwdf(3)` for the files of accounts, if the lock file exists.
fn lock_accounts(place: &Path) -> io::Result<Option<File>> {
    let is_of_accounts =
        [USERS, GROUPS].iter().any(|path| place.file_name() == Path::new(path).file_name());
    let lock = place.with_file_name(".pwd.lock");
    if !is_of_accounts || !lock.exists() {
        return Ok(None);
    }
    let no_follow = OFlags::NOFOLLOW.bits().cast_signed();
    let lock = OpenOptions::new().write(true).custom_flags(no_follow).open(lock)?;
    fcntl_lock(&lock, FlockOperation::LockExclusive)?;
    Ok(Some(lock))
}

/// Removes an installed item. Returns the reason if the item stays because others have changed it.
pub fn remove(place: &Path, item: &Item) -> Result<Option<&'static str>, SystemError> {
    let failed = |what| SystemError::at(what, place);
    remove_file(&incoming(place))?;
    remove_file(&earlier(place))?;
    let found = match fs::symlink_metadata(place) {
        Err(error) if is_absent(&error) => return Ok(None),
        found => found.map_err(failed("cannot examine"))?,
    };
    let is_same = match &item.kind {
        ItemKind::Folder => found.is_dir(),
        ItemKind::File { sha256 } => found.is_file() && sha256.contains(&digest_of(place)?),
        ItemKind::Link { to } => fs::read_link(place).ok().as_ref() == Some(to),
        ItemKind::Output => !found.is_dir(),
        ItemKind::Line { .. } | ItemKind::Mount => true,
    };
    if !is_same {
        return Ok(Some("changed since it was installed"));
    }
    match &item.kind {
        ItemKind::Folder => match fs::remove_dir(place) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                return Ok(Some("not empty"));
            }
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                return Ok(Some("a file system is mounted there"));
            }
            removed => removed.map_err(failed("cannot remove"))?,
        },
        ItemKind::Line { line, newline, created } => {
            remove_line(place, line, *newline, *created).map_err(failed("cannot change"))?;
        }
        ItemKind::File { .. } | ItemKind::Link { .. } | ItemKind::Output => remove_file(place)?,
        ItemKind::Mount => {}
    }
    Ok(None)
}

/// Removes items in reverse order. Returns the items that were left in place, with the reason.
pub fn remove_all(root: &Root, items: &[Item]) -> Result<Vec<String>, SystemError> {
    let mut left = Vec::new();
    for item in items.iter().rev() {
        if let Some(why) = remove(&item.place(root)?, item)? {
            left.push(format!("{} ({why})", item.path.display()));
        }
    }
    Ok(left)
}

/// Removes a file or link that may not exist.
fn remove_file(path: &Path) -> Result<(), SystemError> {
    match fs::remove_file(path) {
        Err(error) if is_absent(&error) => Ok(()),
        removed => removed.map_err(SystemError::at("cannot remove", path)),
    }
}

/// Returns true for the errors of a path that leads to nothing.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Path of a file before it is renamed to its place.
fn incoming(place: &Path) -> PathBuf {
    beside(place, "new")
}

/// Path of the earlier file while an installation runs.
fn earlier(place: &Path) -> PathBuf {
    beside(place, "old")
}

fn beside(place: &Path, what: &str) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    place.with_file_name(format!(".{name}.rnicd-{what}"))
}

#[cfg(test)]
mod tests {
    use super::super::parts::Part;
    use super::*;

    #[test]
    fn undone_replacement_leaves_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("program");
        fs::write(&place, "old").unwrap();
        let content = Content::Copy { from: folder.path().join("missing"), mode: 0o755 };
        let part = Part { path: place.clone(), content };
        let step = Step { part, place: place.clone(), action: Action::Replace, item: None };
        let mut changes = Changes::default();
        assert!(changes.make(&step).is_err());
        assert_eq!(changes.undo(), [] as [&str; 0]);
        assert_eq!(fs::read(&place).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
