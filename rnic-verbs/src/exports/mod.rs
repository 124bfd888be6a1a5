//! What the dynamic linker sees: the names of libibverbs.so.1 with their version nodes, and for
//! librdmacm.so.1 those of a node of our own.
//!
//! A function of the C API is written anywhere in this crate, under its own name and as plain
//! `pub(crate) unsafe extern "C" fn`: no `no_mangle`. A table here publishes it, found through the
//! imports of the table's file. Programs are linked to resolve every symbol at start, so all names
//! of the real libraries must be there: [`absent`] has those that no RNIC serves.

pub(crate) mod absent;
mod cm;
mod private;
mod public;

/// Publishes functions in a version node: `publish! { "NODE": name, ... }`.
///
/// With `also`, the name is not what a program gets that is linked now: a name can be in several
/// nodes, one of which is its default. With `as`, the published name has a prefix.
///
/// What is published is a jump to the function. The function itself cannot carry the version: it
/// would have to be exported by rustc too, under a second name, and `.symver` would have to stand
/// in the object file where the compiler happens to put the function. The name that `.symver` needs
/// for the jump is `remove`d, so nothing but the versioned name remains.
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
