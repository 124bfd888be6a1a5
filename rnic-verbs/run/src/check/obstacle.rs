//! Properties of a program that prevent any use of rnicd's libraries: its file type, and privileges
//! that it gains at exec.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::elf::Elf;
use crate::libraries::PATH_VARIABLE;

/// Reason why a program cannot use rnicd's libraries, with advice.
#[derive(Debug, thiserror::Error)]
#[error("{} {obstacle}", path.display())]
pub struct Refusal {
    /// The program; for a script, its interpreter.
    pub path: PathBuf,
    /// The obstacle.
    pub obstacle: Obstacle,
}

/// A property of a program that prevents the use of rnicd's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It is linked statically.
    Static,
    /// Its target machine is not that of rnicd's libraries.
    OtherMachine,
    /// Its loader belongs to another C library.
    OtherLibc(PathBuf),
    /// Its loader does not exist.
    NoLoader(PathBuf),
    /// It gains privileges at exec; the text describes their kind.
    Rights(&'static str),
}

/// Returns the obstacle in the file type of a program. If there is none, the `Err` contains the
/// program's loader, or `None` if the program is itself a loader.
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

/// Returns the obstacle if a program gains privileges at exec. The loader ignores `LD_LIBRARY_PATH`
/// and `LD_PRELOAD` for such programs ("secure execution", ld.so(8)). execve(2) lists the
/// conditions under which the kernel grants the privileges.
pub(super) fn rights(path: &Path) -> Option<Obstacle> {
    let found = std::fs::metadata(path).ok()?;
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
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
                "is linked statically, so it cannot use rnicd's libraries: its copy of libibverbs \
                 is built in; link it dynamically (with --mount it gets the device files, but no \
                 verbs), or, if it only starts other programs, start it from a shell (sh -c)"
            ),
            Obstacle::OtherMachine => write!(
                f,
                "is for a different machine than rnicd's libraries; use a program for this machine"
            ),
            Obstacle::OtherLibc(loader) => write!(
                f,
                "is loaded by {}, but rnicd's libraries are for glibc; build it for glibc",
                loader.display()
            ),
            Obstacle::NoLoader(loader) => {
                write!(f, "is loaded by {}, which is missing; install it", loader.display())
            }
            Obstacle::Rights(why) => write!(
                f,
                "{why}, and the loader ignores {PATH_VARIABLE} and LD_PRELOAD for such programs; \
                 run it as its owner, or run a copy (`cp` does not copy these rights)"
            ),
        }
    }
}

/// `S_ISUID`.
const SETUID: u32 = 0o4000;
/// `S_ISGID` with `S_IXGRP`. Without the latter, `S_ISGID` does not mean setgid.
const SETGID: u32 = 0o2010;
