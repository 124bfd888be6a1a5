//! The parts of an installation: files, links and lines, in the order of creation.

use std::path::{Path, PathBuf};

use super::manifest::MANIFEST;
use super::root::Root;
use super::{Install, OWN_NAME, SystemError, accounts, loader, mount, service};

/// A part and its path below the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub path: PathBuf,
    pub content: Content,
}

/// Content of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Folder,
    /// A copy of a file.
    Copy {
        from: PathBuf,
        mode: u32,
    },
    /// A text that the administrator may change later. An upgrade keeps the changed text.
    Text(String),
    Link {
        to: PathBuf,
    },
    /// A line at the end of a file. `create` is true if the file need not exist.
    Line {
        line: String,
        create: bool,
    },
    /// A file that the daemon or `ldconfig` writes later.
    Output,
}

/// File names of the libraries.
pub const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", PRELOAD];
/// The libraries that programs are linked to.
pub const SONAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// The preloaded library.
const PRELOAD: &str = "librnic_preload.so";
/// The loader's list of libraries for every program.
pub const PRELOAD_LIST: &str = "/etc/ld.so.preload";
/// Directory list of `ldconfig`. The name sorts before those of the distributions, and of
/// libraries of one SONAME the loader takes the first.
pub const LOADER_CONF: &str = "/etc/ld.so.conf.d/00-rnicd.conf";
/// Configuration of the daemon.
pub const CONFIG: &str = "/etc/rnicd/rnicd.toml";
/// Programs that must be beside this one, and others that are installed if they are.
const PROGRAMS: [(&str, bool); 5] = [
    ("rnicd", true),
    ("rnicctl", true),
    ("rnic-run", false),
    ("rnic-copy", false),
    ("rnic-perf", false),
];
/// Commands that `rnicctl` answers when it is started by these names, and their folder with
/// `--commands`.
pub const COMMANDS: [(&str, &str); 3] = [("modprobe", "sbin"), ("rmmod", "sbin"), ("rdma", "bin")];
/// Subdirectories that the loader prefers to any other directory, if the CPU has these features. A
/// library of the distribution in one of them would come first.
#[cfg(target_arch = "x86_64")]
const CPU_LEVELS: &[&str] = &["x86-64-v2", "x86-64-v3", "x86-64-v4"];
#[cfg(not(target_arch = "x86_64"))]
const CPU_LEVELS: &[&str] = &[];

/// Returns the folder of the libraries below a prefix.
pub fn library_folder(prefix: &Path) -> PathBuf {
    prefix.join("lib/rnicd")
}

/// The folders with the built or unpacked programs and libraries.
pub struct Source {
    pub programs: PathBuf,
    pub libraries: PathBuf,
}

impl Source {
    /// Finds the folders of this program: as built, or as in an archive.
    pub fn of_this_program() -> Result<Self, SystemError> {
        let own = std::env::current_exe()
            .map_err(SystemError::at("cannot find the path of", Path::new("rnicctl")))?;
        let programs = own.parent().unwrap_or(Path::new("/")).to_owned();
        let folders = [programs.join("verbs"), programs.join("../lib/rnicd")];
        let found = folders.into_iter().find(|folder| folder.join(SONAMES[0]).exists());
        let libraries = found.ok_or_else(|| SystemError::NoSource {
            what: format!("{}, verbs or ../lib/rnicd,", SONAMES[0]),
            folder: programs.clone(),
        })?;
        Ok(Source { programs, libraries })
    }
}

/// Returns all parts that the options ask for.
pub fn of(args: &Install, root: &Root, source: &Source) -> Result<Vec<Part>, SystemError> {
    let mut parts = Parts(Vec::new());
    parts.folder_of(Path::new(MANIFEST));
    files(&mut parts, args, source)?;
    parts.file(LOADER_CONF, format!("{}\n", library_folder(&args.prefix).display()));
    if loader::can_update(root) {
        for path in ["/var/cache/ldconfig/aux-cache", "/etc/ld.so.cache"] {
            parts.add(Path::new(path), Content::Output);
        }
    }
    accounts::parts(&mut parts, root)?;
    parts.file(CONFIG, config(args));
    service::parts(&mut parts, args, root);
    if args.preload {
        let line = library_folder(&args.prefix).join(PRELOAD).display().to_string();
        parts.add(Path::new(PRELOAD_LIST), Content::Line { line, create: true });
    }
    if args.mount && root.is_own() {
        parts.add(Path::new(mount::DEV), Content::Link { to: mount::dev_target() });
    }
    Ok(parts.0)
}

fn files(parts: &mut Parts, args: &Install, source: &Source) -> Result<(), SystemError> {
    for (name, is_needed) in PROGRAMS {
        let from = source.programs.join(name);
        if from.exists() {
            parts.add(&args.prefix.join("bin").join(name), Content::Copy { from, mode: 0o755 });
        } else if is_needed {
            return Err(SystemError::NoSource {
                what: name.to_owned(),
                folder: source.programs.clone(),
            });
        }
    }
    let libraries = library_folder(&args.prefix);
    for name in LIBRARIES {
        let from = source.libraries.join(name);
        if !from.exists() {
            return Err(SystemError::NoSource {
                what: name.to_owned(),
                folder: source.libraries.clone(),
            });
        }
        parts.add(&libraries.join(name), Content::Copy { from, mode: 0o644 });
    }
    for level in CPU_LEVELS {
        for name in SONAMES {
            let to = Path::new("../..").join(name);
            parts.add(&libraries.join("glibc-hwcaps").join(level).join(name), Content::Link { to });
        }
    }
    for (name, folder) in COMMANDS {
        let to = PathBuf::from("../../../bin/rnicctl");
        parts.add(&libraries.join("bin").join(name), Content::Link { to });
        if args.commands {
            let to = PathBuf::from("../bin/rnicctl");
            parts.add(&args.prefix.join(folder).join(name), Content::Link { to });
        }
    }
    Ok(())
}

/// Returns the configuration, with the keys that `--allow` and `--profile` decide.
fn config(args: &Install) -> String {
    let wired = args.profile.as_ref().map(|name| {
        let name = toml::Value::from(name.as_str());
        format!("\n[wired]\nprofile = {name}\n")
    });
    format!(
        "# Written by `rnicctl system install`. `rnicd print-config` prints all keys.\n\
         [control]\n\
         user = \"{OWN_NAME}\"\n\
         group = \"{}\"\n\
         mode = \"{}\"\n{}",
        args.allow.group(),
        args.allow.mode(),
        wired.unwrap_or_default()
    )
}

/// A list of parts in which each part comes after the folders above it.
pub struct Parts(Vec<Part>);

impl Parts {
    /// Adds a part and the folders above it.
    pub fn add(&mut self, path: &Path, content: Content) {
        self.folder_of(path);
        self.0.push(Part { path: path.to_owned(), content });
    }

    /// Adds a file with a text.
    pub fn file(&mut self, path: &str, text: String) {
        self.add(Path::new(path), Content::Text(text));
    }

    fn folder_of(&mut self, path: &Path) {
        let above: Vec<&Path> = path.ancestors().skip(1).collect();
        for folder in above.into_iter().rev().filter(|folder| *folder != Path::new("/")) {
            let part = Part { path: folder.to_owned(), content: Content::Folder };
            if !self.0.contains(&part) {
                self.0.push(part);
            }
        }
    }
}
