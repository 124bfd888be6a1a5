//! What keeps our libraries from a program whatever it needs of them: the kind of file that it is,
//! and rights that it gets at its start.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::elf::Elf;
use crate::libraries::PATH_VARIABLE;

/// Why a program cannot be given our libraries, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{} {obstacle}", path.display())]
pub struct Refusal {
    /// The program: of a script its interpreter.
    pub path: PathBuf,
    /// What stands in the way.
    pub obstacle: Obstacle,
}

/// What stands in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Nothing loads libraries with it.
    Static,
    /// Its libraries are those of another kind of machine.
    OtherMachine,
    /// This loader of another C library loads it.
    OtherLibc(PathBuf),
    /// This loader of it is not there.
    NoLoader(PathBuf),
    /// It gets rights at its start, in these words.
    Rights(&'static str),
}

/// What keeps the loader from giving a program our libraries. `Err` if nothing does: its loader, or
/// none if it is one.
pub(super) fn kind(elf: &Elf) -> Result<Obstacle, Option<PathBuf>> {
    match &elf.interpreter {
        _ if !Elf::here().is_ok_and(|here| elf.target == here) => Ok(Obstacle::OtherMachine),
        None if elf.is_loader() => Err(None),
        None => Ok(Obstacle::Static),
        Some(loader) if loader.to_string_lossy().contains("ld-musl") => {
            Ok(Obstacle::OtherLibc(loader.clone()))
        }
        Some(loader) if !loader.exists() => Ok(Obstacle::NoLoader(loader.clone())),
        Some(loader) => Err(Some(loader.clone())),
    }
}

/// A program that gets rights at its start is loaded without `LD_LIBRARY_PATH` and `LD_PRELOAD`
/// ("secure execution", ld.so(8)). The rights count where the kernel gives them, execve(2).
pub(super) fn rights(path: &Path) -> Option<Obstacle> {
    let found = std::fs::metadata(path).ok()?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let capabilities = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]);
    let why = if found.mode() & SETUID != 0 && found.uid() != uid {
        "is setuid"
    } else if found.mode() & SETGID == SETGID && found.gid() != gid {
        "is setgid"
    } else if capabilities.is_ok_and(|length| length > 0) && uid != 0 {
        "has file capabilities"
    } else {
        return None;
    };
    let ignored = rustix::fs::statvfs(path)
        .is_ok_and(|mounted| mounted.f_flag.contains(StatVfsMountFlags::NOSUID));
    let given = !ignored && !rustix::thread::no_new_privs().unwrap_or(false);
    given.then_some(Obstacle::Rights(why))
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => write!(
                f,
                "is linked statically, so that no library of ours can be loaded: what it has of \
                 libibverbs is inside; link it dynamically (--mount shows it the devices' files, \
                 and no verbs), or, if it only starts others, start it by a shell (sh -c)"
            ),
            Obstacle::OtherMachine => write!(
                f,
                "is for another kind of machine than rnicd's libraries; get it for this one"
            ),
            Obstacle::OtherLibc(loader) => write!(
                f,
                "is loaded by {}, but rnicd's libraries are for glibc; build it for glibc",
                loader.display()
            ),
            Obstacle::NoLoader(loader) => {
                write!(f, "is loaded by {}, which is not there; install it", loader.display())
            }
            Obstacle::Rights(why) => write!(
                f,
                "{why}, and the loader ignores {PATH_VARIABLE} and LD_PRELOAD for such programs; \
                 run it as its owner, or a copy of it (`cp` leaves that away)"
            ),
        }
    }
}

/// `S_ISUID`.
const SETUID: u32 = 0o4000;
/// `S_ISGID` with `S_IXGRP`, without which it means something else.
const SETGID: u32 = 0o2010;
