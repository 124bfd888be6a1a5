//! Puts a link to the library beside the two that stand in for the system's.

#[path = "../build/cdylib.rs"]
#[allow(dead_code)] // It has a name of its own, and no versions.
mod cdylib;

fn main() {
    for path in ["build.rs", "../build/cdylib.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    // Its functions may be running when it is closed.
    cdylib::link_arg("-Wl,-z,nodelete");
    cdylib::link_arg("-Wl,-soname,librnic_preload.so");
    cdylib::named("librnic_preload.so", "librnic_preload.so");
}
