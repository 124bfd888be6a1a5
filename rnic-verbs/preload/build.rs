//! Creates the link to this library beside the two libraries that replace the system's.

#[path = "../build/cdylib.rs"]
#[allow(dead_code)] // `versioned` is not used: the library has its own name and no versions.
mod cdylib;

fn main() {
    for path in ["build.rs", "../build/cdylib.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    // The library must not be unloaded, because its functions may be running.
    cdylib::link_arg("-Wl,-z,nodelete");
    cdylib::link_arg("-Wl,-soname,librnic_preload.so");
    cdylib::named("librnic_preload.so", "librnic_preload.so");
}
