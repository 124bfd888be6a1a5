//! Linker arguments for the build scripts. A shared source file, because a crate would be an
//! additional package.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Sets the SONAME and the version nodes of the library.
///
/// The nodes are empty here, because each symbol contains the name of its node (`.symver`). rustc
/// passes an anonymous version script, which makes all other symbols local. LLD accepts a second
/// script if it claims no symbols. GNU ld refuses any script next to an anonymous one. Therefore
/// LLD is required on every platform.
pub fn versioned(soname: &str, nodes: &[&str]) {
    let mut script = String::new();
    let mut before = "";
    for node in nodes {
        script += &format!("{node} {{}} {before};\n");
        before = node;
    }
    let path = out_dir().join("nodes.map");
    fs::write(&path, script).expect("OUT_DIR is writable");

    if let Some(directory) = lld_of_rustc() {
        link_arg(&format!("-B{}", directory.display()));
    } else if !in_path("ld.lld") {
        panic!(
            "{soname} requires the linker LLD: this rustc does not include it, and there is no \
             ld.lld in PATH (install the Debian package lld)"
        );
    }
    link_arg("-fuse-ld=lld");
    // `dlclose(3)` must not unmap the code, because the library has a thread and fork handlers.
    link_arg("-Wl,-z,nodelete");
    link_arg(&format!("-Wl,-soname,{soname}"));
    link_arg(&format!("-Wl,--version-script={}", path.display()));
}

/// Creates the link `verbs/SONAME` in the directory of this profile, for LD_LIBRARY_PATH.
///
/// Cargo cannot name a library `lib*.so.1`, so this is a link to the library in `deps`, where cargo
/// always builds it first. `cargo test` does not build a `cdylib`, so the link dangles until
/// `cargo build`.
pub fn named(built: &str, soname: &str) {
    // OUT_DIR is PROFILE/build/PACKAGE-HASH/out.
    let profile = out_dir().ancestors().nth(3).expect("OUT_DIR has this layout").to_path_buf();
    let directory = profile.join("verbs");
    fs::create_dir_all(&directory).expect("the target directory is writable");
    let link = directory.join(soname);
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{link:?}: {error}"),
        _ => {}
    }
    symlink(Path::new("../deps").join(built), &link).expect("no other process creates this link");
}

/// Returns the directory of the LLD that rustc includes, for the compiler option `-B`.
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
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"))
}
