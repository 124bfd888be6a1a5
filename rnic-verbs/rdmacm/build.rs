//! Writes the jumps, and lets the linker know what they jump to.

use std::process::Command;
use std::{env, fs};

use symbols::NODES;

#[path = "../build/cdylib.rs"]
mod cdylib;
#[path = "src/symbols.rs"]
mod symbols;

/// The node of libibverbs.so.1 with what is jumped to. With a libibverbs.so.1 that is not ours the
/// dynamic linker misses this node and says so.
const TARGETS: &str = "RNIC_1";

fn main() {
    for path in ["build.rs", "src/symbols.rs", "../build/cdylib.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    fs::write(cdylib::out_dir().join("jumps.s"), jumps()).expect("cargo made OUT_DIR for us");
    cdylib::versioned("librdmacm.so.1", &NODES.map(|(node, _)| node));
    cdylib::named("librdmacm.so", "librdmacm.so.1");
    link_to_stand_in();
}

fn symbols() -> impl Iterator<Item = (&'static str, &'static str)> {
    NODES.iter().flat_map(|(node, names)| names.iter().map(|name| (*node, *name)))
}

/// One function per symbol: a jump through the global offset table, which is filled before the
/// program starts, so that what is missing is noticed there.
fn jumps() -> String {
    let jump = |target: &str| match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => format!("jmp qword ptr [rip + {target}@GOTPCREL]"),
        // x16 is there for this: no call passes anything in it.
        Ok("aarch64") => {
            format!("adrp x16, :got:{target}\n ldr x16, [x16, :got_lo12:{target}]\n br x16")
        }
        other => panic!("no jump is written for the architecture {other:?}"),
    };
    let mut text = String::from(".text\n");
    for (node, name) in symbols() {
        let jump = jump(&target(name));
        text += &format!(
            ".globl jump.{name}\n.type jump.{name},@function\njump.{name}:\n {jump}\n\
             .size jump.{name}, . - jump.{name}\n.symver jump.{name}, {name}@@{node}, remove\n"
        );
    }
    text
}

/// Cargo builds the two libraries in any order, so libibverbs.so.1 may not be there yet. The linker
/// needs of it only its SONAME and the names and versions of its symbols: what has these and
/// nothing else does as well.
fn link_to_stand_in() {
    let out = cdylib::out_dir();
    let (source, script) = (out.join("targets.s"), out.join("targets.map"));
    let library = out.join("libibverbs.so");
    let mut text = String::from(".text\n");
    for (_, name) in symbols() {
        let target = target(name);
        text += &format!(".globl {target}\n.type {target},@function\n{target}:\n");
    }
    fs::write(&source, text).expect("cargo made OUT_DIR for us");
    fs::write(&script, format!("{TARGETS} {{ global: *; }};\n")).expect("as above");

    let cc = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&cc)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libibverbs.so.1"])
        .arg(format!("-Wl,--version-script={}", script.display()))
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .status()
        .unwrap_or_else(|error| panic!("{}, the C compiler: {error}", cc.display()));
    assert!(status.success(), "the C compiler could not make a shared object: {status}");
    cdylib::link_arg(&library.display().to_string());
}

fn target(name: &str) -> String {
    format!("rnicd_cm_{name}")
}
