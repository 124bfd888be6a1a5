//! The loader's cache of libraries (`ld.so.cache`), which `ldconfig` writes.
//!
//! `ldconfig` reads the directories in the order of `ld.so.conf` and keeps the order of libraries
//! with the same SONAME. The loader takes the first of them, but prefers those in `glibc-hwcaps`
//! subdirectories that the CPU supports. So rnicd's libraries must be first in each of these
//! groups.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::SystemError;
use super::parts::{SONAMES, library_folder};
use super::root::Root;

/// Returns true if this process can update the cache of a root, and the root has one.
pub fn can_update(root: &Root) -> bool {
    let has_conf = root.at(Path::new("/etc/ld.so.conf")).is_ok_and(|conf| conf.exists());
    rustix::process::geteuid().is_root() && (root.is_own() || has_conf)
}

/// Updates the cache.
pub fn update(root: &Root) -> Result<(), SystemError> {
    ldconfig(root, &[]).map(drop)
}

/// Checks that programs get rnicd's libraries.
pub fn check(root: &Root, prefix: &Path) -> Result<(), SystemError> {
    let cache = ldconfig(root, &["-p"])?;
    for soname in SONAMES {
        let own = library_folder(prefix).join(soname);
        if let Some(first) = other_first(&cache, soname, &library_folder(prefix)) {
            let hint = "a line of /etc/ld.so.conf before `include /etc/ld.so.conf.d/*.conf` names \
                        its folder, or the include is missing";
            return Err(SystemError::NotFirst { first, own, hint });
        }
    }
    Ok(())
}

/// Returns a library that some program would get instead of the library in `own`.
fn other_first(cache: &str, soname: &str, own: &Path) -> Option<PathBuf> {
    let entries: Vec<Entry<'_>> = cache.lines().filter_map(|line| entry(line, soname)).collect();
    let is_own = |entry: &&Entry<'_>| entry.path.starts_with(own);
    let Some(abi) = entries.iter().find(is_own).map(|entry| entry.abi) else {
        let first = entries.first().map_or("no library", |entry| entry.path.to_str().unwrap_or(""));
        return Some(PathBuf::from(first));
    };
    let mut groups: Vec<&str> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.abi == abi) {
        if !groups.contains(&entry.flags) {
            groups.push(entry.flags);
            if !is_own(&entry) {
                return Some(entry.path.to_owned());
            }
        }
    }
    None
}

/// A line of `ldconfig -p`.
struct Entry<'a> {
    /// Type and architecture.
    abi: &'a str,
    /// The same, and CPU features.
    flags: &'a str,
    path: &'a Path,
}

fn entry<'a>(line: &'a str, soname: &str) -> Option<Entry<'a>> {
    let rest = line.trim_start().strip_prefix(soname)?.strip_prefix(" (")?;
    let (flags, path) = rest.split_once(") => ")?;
    let abi = flags.split(", ").next().unwrap_or(flags);
    Some(Entry { abi, flags, path: Path::new(path) })
}

fn ldconfig(root: &Root, arguments: &[&str]) -> Result<String, SystemError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/sbin".into(), "/usr/sbin".into()]);
    let folders = folders.filter(|folder| folder.is_absolute());
    let programs = folders.map(|folder| folder.join("ldconfig"));
    let program = programs.into_iter().find(|program| program.is_file());
    let program = program.unwrap_or_else(|| PathBuf::from("ldconfig"));
    let mut command = Command::new(&program);
    command.args(arguments).env("LC_ALL", "C");
    if !root.is_own() {
        command.arg("-r").arg(root.path());
    }
    run(command)
}

/// Runs a program and returns its standard output.
pub fn run(mut command: Command) -> Result<String, SystemError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |why| SystemError::Program { program: program.clone(), why };
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("no message");
        return Err(failed(format!("{}: {last}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "\tlibibverbs.so.1 (libc6,x86-64) => /p/lib/rnicd/libibverbs.so.1\n";
    const OTHER: &str = "\tlibibverbs.so.1 (libc6,x86-64) => /lib/libibverbs.so.1\n";
    const OLD: &str = "\tlibibverbs.so.1 (libc6) => /lib32/libibverbs.so.1\n";
    const FAST: &str =
        "\tlibibverbs.so.1 (libc6,x86-64, hwcap: \"x86-64-v3\") => /lib/v3/libibverbs.so.1\n";
    const OWN_FAST: &str = "\tlibibverbs.so.1 (libc6,x86-64, hwcap: \"x86-64-v3\") => \
                            /p/lib/rnicd/glibc-hwcaps/x86-64-v3/libibverbs.so.1\n";

    fn other(cache: &[&str]) -> Option<String> {
        let found = other_first(&cache.concat(), SONAMES[0], Path::new("/p/lib/rnicd"));
        found.map(|path| path.display().to_string())
    }

    #[test]
    fn own_library_must_be_first_of_its_kind() {
        let head = "9 libs found in cache `/etc/ld.so.cache'\n\tlibibverbs.so (libc6) => /x\n";
        assert_eq!(other(&[head, OWN, OTHER, OLD]), None);
        assert_eq!(other(&[head, OLD, OWN, OTHER]), None);
        assert_eq!(other(&[OTHER, OWN]).as_deref(), Some("/lib/libibverbs.so.1"));
        assert_eq!(other(&[OTHER]).as_deref(), Some("/lib/libibverbs.so.1"));
        assert_eq!(other(&[head]).as_deref(), Some("no library"));
        // The loader prefers a library for the features of the CPU to one for any CPU.
        assert_eq!(other(&[OWN, FAST]).as_deref(), Some("/lib/v3/libibverbs.so.1"));
        assert_eq!(other(&[OWN_FAST, FAST, OWN, OTHER]), None);
    }
}
