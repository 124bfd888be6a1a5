//! Generates the jumps and links against their targets.

use std::process::Command;
use std::{env, fs};

use symbols::NODES;

#[path = "../build/cdylib.rs"]
mod cdylib;
#[path = "src/symbols.rs"]
mod symbols;

/// Version node of the jump targets in rnicd's libibverbs.so.1. If the program loads another
/// libibverbs.so.1, the dynamic linker reports this node as missing.
const TARGETS: &str = "RNIC_1";
/// Version node without symbols.
const FIRST: &str = "RNIC_RDMACM";

fn main() {
    for path in ["build.rs", "src/symbols.rs", "../build/cdylib.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    fs::write(cdylib::out_dir().join("jumps.s"), jumps()).expect("OUT_DIR is writable");
    // The loader treats the first node like no version at all: a reference without a version would
    // also find symbols that are not the default (see `at`).
    let nodes: Vec<&str> = [FIRST].into_iter().chain(NODES.map(|(node, _)| node)).collect();
    cdylib::versioned("librdmacm.so.1", &nodes);
    cdylib::named("librdmacm.so", "librdmacm.so.1");
    link_to_stand_in();
}

fn symbols() -> impl Iterator<Item = (&'static str, &'static str)> {
    NODES.iter().flat_map(|(node, names)| names.iter().map(|name| (*node, *name)))
}

/// Returns one function per symbol: a jump through the global offset table. The table is filled
/// before the program starts, so a missing target is reported at that time.
fn jumps() -> String {
    let jump = |target: &str| match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => format!("jmp qword ptr [rip + {target}@GOTPCREL]"),
        // x16 is reserved for such jumps: no call passes an argument in it.
        Ok("aarch64") => {
            format!("adrp x16, :got:{target}\n ldr x16, [x16, :got_lo12:{target}]\n br x16")
        }
        other => panic!("jumps are not implemented for the architecture {other:?}"),
    };
    let mut text = String::from(".text\n");
    for (node, name) in symbols() {
        let jump = jump(&target(name));
        text += &format!(
            ".globl jump.{name}\n.type jump.{name},@function\njump.{name}:\n {jump}\n\
             .size jump.{name}, . - jump.{name}\n.symver jump.{name}, {name}{}{node}, remove\n",
            at(name)
        );
    }
    text
}

/// Returns the mark between a symbol and its version. Functions of rsockets have names that other
/// libraries use for their own functions (`rread`, `rsend`). This library precedes those in every
/// program of `rnic-run`, so their references, which have no version, must not find it.
fn at(name: &str) -> &'static str {
    if name.starts_with("rdma_") { "@@" } else { "@" }
}

/// Links against a stand-in for libibverbs.so.1, because cargo may build the two libraries in
/// either order and the real one may not exist yet. The linker needs only its SONAME and the names
/// and versions of its symbols.
fn link_to_stand_in() {
    let out = cdylib::out_dir();
    let source = out.join("targets.s");
    let script = out.join("targets.map");
    let library = out.join("libibverbs.so");
    let mut text = String::from(".text\n");
    for (_, name) in symbols() {
        let target = target(name);
        text += &format!(".globl {target}\n.type {target},@function\n{target}:\n");
    }
    fs::write(&source, text).expect("OUT_DIR is writable");
    fs::write(&script, format!("{TARGETS} {{ global: *; }};\n")).expect("OUT_DIR is writable");

    // The linker of the target, which is a C compiler, if cargo was given one.
    let named = env::var_os("CC").or_else(|| env::var_os("RUSTC_LINKER"));
    let cc = named.unwrap_or_else(|| "cc".into());
    let status = Command::new(&cc)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libibverbs.so.1"])
        .arg(format!("-Wl,--version-script={}", script.display()))
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .status()
        .unwrap_or_else(|error| panic!("cannot run the C compiler {}: {error}", cc.display()));
    assert!(status.success(), "the C compiler failed to create a shared object: {status}");
    cdylib::link_arg(&library.display().to_string());
}

fn target(name: &str) -> String {
    format!("rnicd_cm_{name}")
}
