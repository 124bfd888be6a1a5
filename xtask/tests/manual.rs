//! The manual pages in the repository are those of the current command lines and keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use xtask::{completions, crates, manual};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/man")
}

/// Returns the paths of all files below a folder.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { BTreeSet::from([path]) })
        .collect()
}

#[test]
fn pages_are_current() {
    let pages = manual::pages();
    assert_eq!(pages.len(), 6);
    for (path, text) in &pages {
        let read = std::fs::read(folder().join(path)).unwrap_or_default();
        let text = String::from_utf8_lossy(text);
        assert!(
            String::from_utf8_lossy(&read) == text,
            "docs/man/{} is outdated; run cargo xtask manual",
            path.display()
        );
    }
    let expected = pages.iter().map(|(path, _)| folder().join(path)).collect();
    assert_eq!(files(&folder()), expected);
}

#[test]
fn pages_have_commands_options_and_keys() {
    let page = |name: &str| {
        let pages = manual::pages();
        let (_, text) = pages.iter().find(|(path, _)| path.ends_with(name)).unwrap();
        String::from_utf8(text.clone()).unwrap()
    };
    let ctl = page("rnicctl.8");
    assert!(ctl.contains("\\fBrnicctl why\\fR") && ctl.contains("SH \"SEE ALSO\""), "{ctl}");
    assert!(!page("rnicd.8").contains("demo\\-part"), "a hidden command is described");
    assert!(page("rnic-run.1").contains("SH EXAMPLES"));
    let keys = page("rnicd.toml.5");
    for line in rnicd::config::ANNOTATED_DEFAULT.lines() {
        let line = line.strip_prefix("#: ").unwrap_or(line);
        let Some((key, _)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) else {
            continue;
        };
        assert!(keys.contains(&format!("\n\\fB{key} =")), "no key {key}");
    }
}

#[test]
fn each_shell_gets_each_program() {
    let to = tempfile::tempdir().unwrap();
    completions::write(to.path()).unwrap();
    let files = files(to.path());
    assert_eq!(files.len(), 3 * 5, "{files:?}");
    let bash = to.path().join("bash-completion/completions/rnicctl");
    let said = std::process::Command::new("bash")
        .arg("-c")
        .arg(
            "source $0; COMP_WORDS=(rnicctl wh); COMP_CWORD=1
             _rnicctl rnicctl wh rnicctl; echo \"${COMPREPLY[*]}\"",
        )
        .arg(&bash)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "why");
}

#[test]
fn crates_of_release_are_listed() {
    let list = crates::list("x86_64-unknown-linux-gnu").unwrap();
    assert!(list.contains("\"pkg:cargo/crc32c@") && list.contains("\"pkg:cargo/rnicd@"), "{list}");
    // Only tests and benchmarks use these.
    assert!(!list.contains("/proptest@") && !list.contains("/plotters@"), "{list}");
}
