//! Makes the library one that the dynamic linker takes for libibverbs.so.1: its SONAME, its version
//! nodes, and a directory in which it lies under that name.

#[path = "build/cdylib.rs"]
mod cdylib;

/// The version nodes, each after the one it succeeds. `src/exports` says which symbols are in them.
const NODES: [&str; 20] = [
    "IBVERBS_1.0",
    "IBVERBS_1.1",
    "IBVERBS_1.5",
    "IBVERBS_1.6",
    "IBVERBS_1.7",
    "IBVERBS_1.8",
    "IBVERBS_1.9",
    "IBVERBS_1.10",
    "IBVERBS_1.11",
    "IBVERBS_1.12",
    "IBVERBS_1.13",
    "IBVERBS_1.14",
    "IBVERBS_1.15",
    "IBVERBS_1.16",
    "IBVERBS_1.17",
    "IBVERBS_PRIVATE_34",
    "IBVERBS_PRIVATE_57",
    "IBVERBS_PRIVATE_59",
    "IBVERBS_PRIVATE_64",
    // What librdmacm.so.1 calls.
    "RNIC_1",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/cdylib.rs");
    cdylib::versioned("libibverbs.so.1", &NODES);
    cdylib::named("libibverbs.so", "libibverbs.so.1");
}
