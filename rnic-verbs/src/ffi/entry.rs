//! The functions that programs call.
//!
//! [`entry!`](crate::ffi::entry::entry) declares them. Each converts its arguments, calls a
//! function of this crate, and converts the result. A panic aborts the process.

/// Declares C functions: `KIND NAME(ARGUMENT: TYPE, ...) -> RESULT = FUNCTION;`.
///
/// The kind is one of:
/// - `plain`;
/// - `uncancelled`: disables cancellation of the thread during the call;
/// - `cancellable`: a cancellation point (pthreads(7)). A cancelled thread unwinds through the
///   function.
///
/// The type of an argument implements [`Argument`](crate::ffi::pointers::Argument). The function
/// returns a `Result<_, Errno>`, which becomes one of:
/// - `status`: 0 or the error number;
/// - `minus_one`: 0, or -1 with `errno`;
/// - `negative<T>`: a count or the negative error number;
/// - `pointer<T>`: a `*mut T`, or null with `errno`;
/// - `nothing`: errors are only logged;
/// - `value<T>`: the function returns `T` itself.
macro_rules! entry {
    ($(
        $(#[$doc:meta])*
        $kind:ident $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ident$(<$of:ty>)?
            = $function:expr;
    )*) => {$(
        $crate::ffi::entry::entry! {
            @$kind ($(#[$doc])*) $name($($arg: $type),*) ($result $($of)?) $function
        }
    )*};
    (@plain $($rest:tt)*) => { $crate::ffi::entry::entry! { @function "C" () $($rest)* } };
    (@uncancelled $($rest:tt)*) => {
        $crate::ffi::entry::entry! {
            @function "C" (let _guard = $crate::system::uncancelled();) $($rest)*
        }
    };
    (@cancellable $($rest:tt)*) => {
        $crate::ffi::entry::entry! { @function "C-unwind" () $($rest)* }
    };
    (@function $abi:literal ($($guard:tt)*) ($($doc:tt)*) $name:ident($($arg:ident: $type:ty),*)
        ($result:ident $($of:ty)?) $function:expr) => {
        $($doc)*
        pub(crate) unsafe extern $abi fn $name(
            $($arg: <$type as $crate::ffi::pointers::Argument>::C),*
        ) -> $crate::ffi::entry::entry!(@type $result $($of)?) {
            $($guard)*
            $(
                // SAFETY: the program passes the argument in this call, and obeys the manual page.
                let $arg = unsafe { <$type as $crate::ffi::pointers::Argument>::from_c($arg) };
            )*
            $crate::ffi::entry::entry!(@leave $result $name ($function($($arg),*)) $($of)?)
        }
    };
    (@type status) => { ::libc::c_int };
    (@type minus_one) => { ::libc::c_int };
    (@type negative $of:ty) => { $of };
    (@type pointer $of:ty) => { *mut $of };
    (@type nothing) => { () };
    (@type value $of:ty) => { $of };
    (@leave status $name:ident $called:tt) => {
        $crate::errno::status($crate::errno::of_call(stringify!($name), $called))
    };
    (@leave minus_one $name:ident $called:tt) => {
        $crate::errno::minus_one($crate::errno::of_call(stringify!($name), $called))
    };
    (@leave negative $name:ident $called:tt $of:ty) => {
        $crate::errno::negative($crate::errno::of_call(stringify!($name), $called)) as $of
    };
    (@leave pointer $name:ident $called:tt $of:ty) => {
        $crate::errno::pointer($crate::errno::of_call(stringify!($name), $called))
    };
    (@leave nothing $name:ident $called:tt) => {
        $crate::errno::nothing($crate::errno::of_call(stringify!($name), $called))
    };
    (@leave value $name:ident $called:tt $of:ty) => { $called };
}

pub(crate) use entry;
