//! Exported symbols: the names of libibverbs.so.1 with their version nodes, and a node of our own
//! for librdmacm.so.1 and librnic_preload.so.
//!
//! A function of the C API may be defined anywhere in this crate, under its own name and as a plain
//! `pub(crate) unsafe extern "C" fn`, without `no_mangle`. A table in one of these modules
//! publishes it, and the imports of the module determine its path. Programs may be linked to
//! resolve every symbol at start, so the tables contain all names of the real libraries. `absent`
//! in `ffi` has the unsupported functions.

mod cm;
mod preload;
mod private;
mod public;

/// Publishes functions in a version node: `publish! { "NODE": name, ... }`.
///
/// With `also`, this version of the name is not the default: a name can be in several nodes, and
/// programs linked today get the default one. With `as`, the published name has a prefix.
///
/// The exported symbol is a jump to the function. The function itself cannot carry the version:
/// rustc would have to export it under a second name too, and `.symver` must be in the object file
/// in which the compiler happens to put the function. The name that `.symver` needs for the jump is
/// `remove`d, so only the versioned name remains.
macro_rules! publish {
    ($node:literal: $($name:ident),* $(,)?) => { publish! { "@@" $node "" $($name)* } };
    ($node:literal also: $($name:ident),* $(,)?) => { publish! { "@" $node "" $($name)* } };
    ($node:literal as $prefix:literal: $($name:ident),* $(,)?) => {
        publish! { "@@" $node $prefix $($name)* }
    };
    ($at:literal $node:literal $prefix:literal $($name:ident)*) => {
        $(
            // A test executable has no version nodes and publishes nothing.
            #[cfg(not(test))]
            std::arch::global_asm!(
                concat!(".pushsection .text.", stringify!($name), ",\"ax\",@progbits"),
                concat!(".globl jump.", $node, ".", stringify!($name)),
                concat!(".type jump.", $node, ".", stringify!($name), ",@function"),
                concat!("jump.", $node, ".", stringify!($name), ":"),
                $crate::exports::jump!(),
                concat!(
                    ".size jump.", $node, ".", stringify!($name),
                    ", . - jump.", $node, ".", stringify!($name),
                ),
                concat!(
                    ".symver jump.", $node, ".", stringify!($name),
                    ", ", $prefix, stringify!($name), $at, $node, ", remove",
                ),
                ".popsection",
                function = sym $name,
            );
            #[cfg(test)]
            const _: () = {
                let _ = $name;
            };
        )*
    };
}

#[cfg(all(not(test), target_arch = "x86_64"))]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}

#[cfg(all(not(test), target_arch = "aarch64"))]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

#[cfg(not(test))]
use jump;
use publish;
