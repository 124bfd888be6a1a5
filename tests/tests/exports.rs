//! The dynamic linker accepts this project's libraries as libibverbs.so.1 and librdmacm.so.1.
//! Programs may resolve all symbols at start, so one missing symbol stops them. The tests read the
//! libraries with binutils, which come with the linker.

use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_tests::built;

const LIBIBVERBS: &str = include_str!("../../rnic-verbs/golden/libibverbs.txt");
const LIBRDMACM: &str = include_str!("../../rnic-verbs/golden/librdmacm.txt");

fn library(soname: &str) -> PathBuf {
    built::libraries().join(soname)
}

#[test]
fn libraries_export_exactly_the_abi_symbols() {
    for (soname, golden) in [("libibverbs.so.1", LIBIBVERBS), ("librdmacm.so.1", LIBRDMACM)] {
        let exported = exported(&library(soname));
        let golden: Vec<&str> = golden.lines().collect();
        let missing: Vec<_> =
            golden.iter().filter(|name| !exported.iter().any(|other| other == *name)).collect();
        let more: Vec<_> =
            exported.iter().filter(|name| !golden.contains(&name.as_str())).collect();
        assert!(missing.is_empty(), "{soname} lacks {missing:?}");
        assert!(more.is_empty(), "{soname} exports {more:?}, which its list lacks");
    }
}

/// A second copy of a library of this project would have its own state, and a system library might
/// be missing.
#[test]
fn libraries_need_only_libc_and_each_other() {
    let c = ["libc.so.6", "libgcc_s.so.1", "libm.so.6"];
    let of_c = |needed: &String| c.contains(&&**needed) || needed.starts_with("ld-linux");
    let needed = |soname: &str| {
        let mut needed = dynamic(&library(soname), "NEEDED");
        needed.retain(|needed| !of_c(needed));
        needed
    };
    assert_eq!(needed("libibverbs.so.1"), [""; 0]);
    assert_eq!(needed("librdmacm.so.1"), ["libibverbs.so.1"]);
    for soname in ["libibverbs.so.1", "librdmacm.so.1"] {
        assert_eq!(dynamic(&library(soname), "SONAME"), [soname]);
    }
}

/// Tables that are initially zero take no space in the files.
#[test]
fn files_have_little_initialised_data() {
    for file in [PathBuf::from(built::program("rnicd")), library("libibverbs.so.1")] {
        let sizes = output(Command::new("size").arg("-A").arg(&file));
        let data = sizes.lines().find_map(|line| line.strip_prefix(".data ")).unwrap();
        let bytes: u64 = data.split_whitespace().next().unwrap().parse().unwrap();
        assert!(bytes < 64 << 10, "{}: {bytes} bytes", file.display());
    }
}

/// Every call between the libraries resolves, and arguments arrive.
#[test]
fn program_with_bind_now_starts() {
    let scratch = tempfile::tempdir().unwrap();
    let source = scratch.path().join("program.c");
    let program = scratch.path().join("program");
    let text = r#"
        #include <stdio.h>
        const char *rdma_event_str(int event);
        const char *ibv_port_state_str(int state);
        int main(void) { printf("%s %s", rdma_event_str(9), ibv_port_state_str(4)); }
    "#;
    std::fs::write(&source, text).unwrap();
    let libraries = [library("librdmacm.so.1"), library("libibverbs.so.1")];
    output(Command::new("cc").arg(&source).args(libraries).arg("-o").arg(&program));
    let mut program = Command::new(program);
    program.env("LD_BIND_NOW", "1").env("LD_LIBRARY_PATH", built::libraries());
    assert_eq!(output(&mut program), "RDMA_CM_EVENT_ESTABLISHED active");
}

/// Returns the exported symbols of a library, with their versions.
fn exported(library: &Path) -> Vec<String> {
    let listing = output(Command::new("nm").args(["-D", "--defined-only"]).arg(library));
    listing.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect()
}

/// Returns the entries of the dynamic section with a tag.
fn dynamic(library: &Path, tag: &str) -> Vec<String> {
    let section = output(Command::new("readelf").args(["-d", "-W"]).arg(library));
    let tag = format!("({tag})");
    let name = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned());
    section.lines().filter(|line| line.contains(&tag)).filter_map(name).collect()
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}
