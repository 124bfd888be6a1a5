//! Sets the SONAME and the version nodes of libibverbs.so.1, and creates a directory that contains
//! the library under that name, so that the dynamic linker finds it.

#[path = "build/cdylib.rs"]
mod cdylib;

/// Version nodes, each after its predecessor. `src/exports` assigns symbols to them.
const NODES: [&str; 23] = [
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
    "IBVERBS_1.18",
    "IBVERBS_PRIVATE_33",
    "IBVERBS_PRIVATE_34",
    "IBVERBS_PRIVATE_57",
    "IBVERBS_PRIVATE_59",
    "IBVERBS_PRIVATE_64",
    "IBVERBS_PRIVATE_65",
    // Symbols for librdmacm.so.1 and librnic_preload.so.
    "RNIC_1",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/cdylib.rs");
    cdylib::versioned("libibverbs.so.1", &NODES);
    cdylib::named("libibverbs.so", "libibverbs.so.1");
}
