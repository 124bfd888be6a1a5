//! What both build scripts tell the linker. Shared as a file: a crate for it would be a third
//! package.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Gives the library its SONAME and its version nodes.
///
/// The nodes are empty here: a symbol names its node itself (`.symver`). rustc has a version script
/// of its own, an anonymous one by which everything else becomes local. LLD accepts ours beside it
/// as long as ours claims no symbols; GNU ld refuses any second script next to an anonymous one. So
/// LLD it is, whatever the platform's default linker.
pub fn versioned(soname: &str, nodes: &[&str]) {
    let mut script = String::new();
    let mut before = "";
    for node in nodes {
        script += &format!("{node} {{}} {before};\n");
        before = node;
    }
    let path = out_dir().join("nodes.map");
    fs::write(&path, script).expect("cargo made OUT_DIR for us");

    if let Some(directory) = lld_of_rustc() {
        link_arg(&format!("-B{}", directory.display()));
    } else if !in_path("ld.lld") {
        panic!(
            "{soname} needs LLD as its linker: rustc here comes without one and there is no ld.lld \
             in PATH (Debian package lld)"
        );
    }
    link_arg("-fuse-ld=lld");
    // It has a thread, and handlers of forks: `dlclose(3)` must not take their code away.
    link_arg("-Wl,-z,nodelete");
    link_arg(&format!("-Wl,-soname,{soname}"));
    link_arg(&format!("-Wl,--version-script={}", path.display()));
}

/// Makes `verbs/SONAME` in the directory of this profile, for LD_LIBRARY_PATH.
///
/// Cargo cannot name a library `lib*.so.1`, so this is a link to what it builds, there where it
/// puts it first and in every case. The tests of a workspace build no `cdylib`: the link leads
/// nowhere until `cargo build`.
pub fn named(built: &str, soname: &str) {
    // OUT_DIR is PROFILE/build/PACKAGE-HASH/out.
    let profile = out_dir().ancestors().nth(3).expect("so cargo lays it out").to_path_buf();
    let directory = profile.join("verbs");
    fs::create_dir_all(&directory).expect("the target directory is writable");
    let link = directory.join(soname);
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{link:?}: {error}"),
        _ => {}
    }
    symlink(Path::new("../deps").join(built), &link).expect("nothing else makes this link");
}

/// Where rustc keeps the LLD that it brings along, in the form that cc takes.
fn lld_of_rustc() -> Option<PathBuf> {
    let rustc = env::var_os("RUSTC")?;
    let printed = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?.stdout;
    let sysroot = PathBuf::from(String::from_utf8(printed).ok()?.trim());
    let host = env::var("HOST").ok()?;
    let directory = sysroot.join("lib/rustlib").join(host).join("bin/gcc-ld");
    directory.join("ld.lld").exists().then_some(directory)
}

fn in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|directory| directory.join(program).exists())
}

pub fn link_arg(arg: &str) {
    println!("cargo::rustc-link-arg-cdylib={arg}");
}

pub fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it for build scripts"))
}
